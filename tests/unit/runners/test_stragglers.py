"""Ranks that take much longer than the others of their component."""

from __future__ import annotations

from typing import Any

import pytest

from rl_platform.runners.watching.stragglers import Stragglers


class Rank:
    def __init__(self, label: str) -> None:
        self.label, self.calls, self.seconds = label, 0, 0.0

    def timings(self) -> dict[str, tuple[int, float]]:
        return {"generate": (self.calls, self.seconds), "close": (0, 0.0)}


class Group:
    def __init__(self, name: str, size: int) -> None:
        self.workers, self.world_size = [Rank(f"{name}[{rank}]") for rank in range(size)], size


def notes_of(*steps: list[float], name: str = "rollout") -> list[str]:
    """The notes after steps in which each rank generated for so many seconds."""
    notes: list[str] = []
    group: Any = Group(name, len(steps[0]))
    watch = Stragglers({name: group}, notes.append)
    for seconds in steps:
        for rank, added in zip(group.workers, seconds, strict=True):
            rank.calls += added > 0
            rank.seconds += added
        watch.look()
    return notes


def test_rank_method_and_times_of_the_median_are_named_once() -> None:
    slow = [1.0, 4.2, 1.0, 1.2]
    assert notes_of(*[slow] * 8) == [
        "rollout[1] is a straggler: generate took 4.2 times the median of the other ranks in each of 3 steps "
        "(4.2 s, median 1.0 s)"
    ]


@pytest.mark.parametrize(
    "steps",
    [
        [[1.0, 1.9, 1.0]] * 5,
        [[0.01, 0.4, 0.01]] * 5,
        [[1.0, 4.0, 1.0], [1.0, 4.0, 1.0], [4.0, 1.0, 1.0]] * 3,
        [[4.0]] * 5,
        [[4.0, 0.0]] * 5,
    ],
    ids=["not twice as long", "noise", "not in a row", "alone", "work of one rank"],
)
def test_others_are_not(steps: list[list[float]]) -> None:
    assert notes_of(*steps) == []
