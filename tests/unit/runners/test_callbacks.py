"""Callbacks: who is called with what, who stops the run, and errors of the user's code."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from rl_platform.errors import ConfigError, WorkerError
from rl_platform.runners.step_callbacks import stopped_by


class Above:
    def __init__(self, limit: float) -> None:
        self.limit, self.seen = limit, []

    def __call__(self, step: int, metrics: Mapping[str, float]) -> bool:
        self.seen.append(step)
        return metrics.get("val/return", 0.0) > self.limit


def quiet(step: int, metrics: Mapping[str, float]) -> None: ...


def broken(step: int, metrics: Mapping[str, float]) -> None:
    raise KeyError("val/retrun")


def test_all_are_called_and_those_that_stop_are_named() -> None:
    low, high = Above(1.0), Above(5.0)
    assert stopped_by([low, quiet, high], 3, {"val/return": 2.0}) == ["Above"]
    assert stopped_by([low, high], 4, {}) == []
    assert low.seen == high.seen == [3, 4]


def test_an_error_carries_its_traceback() -> None:
    told = r"(?s)broken raised KeyError at .*test_callbacks\.py:27: 'val/retrun'.*in broken\n"
    with pytest.raises(WorkerError, match=told) as failed:
        stopped_by([broken], 1, {})
    assert failed.value.exit_code == 70


def test_an_error_whose_text_raises_is_named() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            return self.text  # type: ignore[attr-defined, no-any-return]

    def mute(step: int, metrics: Mapping[str, float]) -> None:
        raise Mute

    with pytest.raises(WorkerError, match=r"(?s)raised Mute at .*its __str__ raised AttributeError.*raise Mute\n"):
        stopped_by([mute], 1, {})


@pytest.mark.parametrize("result", [{"stop": False}, 0, "continue", np.array([True, False])], ids=str)
def test_a_result_that_is_no_bool_stops_nothing_and_is_refused(result: object) -> None:
    with pytest.raises(ConfigError, match="neither True, False nor None"):
        stopped_by([lambda step, metrics: result], 1, {})  # type: ignore[list-item, return-value]


def test_a_bool_of_numpy_counts() -> None:
    assert len(stopped_by([lambda step, metrics: np.bool_(True)], 1, {})) == 1  # type: ignore[list-item, return-value]
