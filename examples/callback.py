"""Stops a run once the mean return of its episodes has been high for three steps in a row."""

from collections.abc import Mapping


class StopWhenGood:
    def __init__(self) -> None:
        self.good_steps = 0

    def __call__(self, step: int, metrics: Mapping[str, float]) -> bool:
        good = metrics.get("episode/return", 0.0) > 20.0
        self.good_steps = self.good_steps + 1 if good else 0
        return self.good_steps == 3
