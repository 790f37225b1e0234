"""Whether episodes succeed, for environments that say it with each step.

Meta-World says `info["success"]`, Gymnasium-Robotics and others `info["is_success"]`. Two rates are made of it, as
ManiSkill defines them: `success_once`, succeeded at any step, and `success_at_end`, succeeded at the last one. A robot
that pushes a cube over its goal and beyond has the first and not the second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

UNSAID = -1  # in arrays: the environment does not say; otherwise 0 or 1
_KEYS = ("success", "is_success")


class Success(NamedTuple):
    """Of one episode."""

    once: bool
    at_end: bool


class SuccessCount:
    """Follows N environments step by step. `ended_once`, `ended_at_end` [N] int8: filled for episodes that end."""

    def __init__(self, ended_once: np.ndarray, ended_at_end: np.ndarray) -> None:
        self._ended_once, self._ended_at_end = ended_once, ended_at_end
        self._once = np.full(len(ended_once), UNSAID, np.int8)
        self._now = self._once.copy()

    def step(self, index: int, info: Any) -> None:
        """What environment `index` says of the step it has made. Silence where it has spoken before is no success."""
        said = _said(info)
        if said != UNSAID:
            self._now[index], self._once[index] = said, max(said, self._once[index])
        elif self._now[index] > 0:
            self._now[index] = 0

    def end(self, ended: np.ndarray) -> None:
        """Episodes of the environments `ended` (indices) are over."""
        self._ended_once[ended], self._ended_at_end[ended] = self._once[ended], self._now[ended]

    def begin(self, which: np.ndarray) -> None:
        """Environments `which` (indices) start an episode."""
        self._once[which] = self._now[which] = UNSAID

    def save(self, index: int) -> tuple[int, int]:
        return int(self._once[index]), int(self._now[index])

    def restore(self, index: int, saved: tuple[int, int] = (UNSAID, UNSAID)) -> None:
        self._once[index], self._now[index] = saved


def success_of(once: int, at_end: int) -> Success | None:
    """From the numbers of an episode that ended; None if the environment does not say."""
    return None if once == UNSAID else Success(bool(once > 0), bool(at_end > 0))


def success_rates(episodes: Sequence[Success | None], prefix: str) -> dict[str, float]:
    """`PREFIX/success_once` and `PREFIX/success_at_end` of the episodes that say it; nothing if none does."""
    said = [episode for episode in episodes if episode is not None]
    if not said:
        return {}
    rates = ((name, sum(getattr(episode, name) for episode in said) / len(said)) for name in Success._fields)
    return {f"{prefix}/success_{name}": rate for name, rate in rates}


def _said(info: Any) -> int:
    if info and isinstance(info, Mapping):
        for key in _KEYS:
            value = info.get(key)
            if isinstance(value, Real | np.bool_):
                return int(value > 0.5)
    return UNSAID
