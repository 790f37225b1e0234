"""Success of episodes, for environments that report it with each step.

Meta-World reports `info["success"]`, Gymnasium-Robotics and others `info["is_success"]`. The two rates are those of
ManiSkill: `success_once`, success at any step, and `success_at_end`, success at the last step. A robot that pushes a
cube over its goal and beyond has the first and not the second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import NamedTuple

import numpy as np

UNREPORTED = -1  # in arrays: the environment reports no success; otherwise 0 or 1
_KEYS = ("success", "is_success")


class Success(NamedTuple):
    """The success of one episode."""

    once: bool
    at_end: bool


class SuccessCount:
    """Tracks N environments step by step. `ended_once`, `ended_at_end` [N] int8: outputs for episodes that end."""

    def __init__(self, ended_once: np.ndarray, ended_at_end: np.ndarray) -> None:
        self._ended_once, self._ended_at_end = ended_once, ended_at_end
        self._once = np.full(len(ended_once), UNREPORTED, np.int8)
        self._now = self._once.copy()

    def step(self, index: int, info: object) -> None:
        """Reads the `info` of environment `index` after a step. A missing report after an earlier one is no success."""
        success = _reported(info)
        if success != UNREPORTED:
            self._now[index], self._once[index] = success, max(success, self._once[index])
        elif self._now[index] > 0:
            self._now[index] = 0

    def step_all(self, success: np.ndarray, idle: np.ndarray) -> None:
        """Reads the success [N] bool of all environments after a step, except those that are idle [N] bool."""
        self._now[~idle] = success[~idle]
        self._once[:] = np.maximum(self._once, self._now)

    def end(self, ended: np.ndarray) -> None:
        """Writes the outputs of environments `ended` (indices), whose episodes have ended."""
        self._ended_once[ended], self._ended_at_end[ended] = self._once[ended], self._now[ended]

    def begin(self, which: np.ndarray) -> None:
        """Resets environments `which` (indices), which start an episode."""
        self._once[which] = self._now[which] = UNREPORTED

    def save(self, index: int) -> tuple[int, int]:
        return int(self._once[index]), int(self._now[index])

    def restore(self, index: int, saved: tuple[int, int]) -> None:
        self._once[index], self._now[index] = saved


def success_of(once: int, at_end: int) -> Success | None:
    """Returns the success of an ended episode; None if the environment does not report it."""
    return None if once == UNREPORTED else Success(bool(once > 0), bool(at_end > 0))


def success_rates(episodes: Sequence[Success | None], prefix: str) -> dict[str, float]:
    """Returns `PREFIX/success_once` and `PREFIX/success_at_end` over episodes with a report; {} if there are none."""
    reported = [episode for episode in episodes if episode is not None]
    if not reported:
        return {}
    rates = ((name, sum(getattr(episode, name) for episode in reported) / len(reported)) for name in Success._fields)
    return {f"{prefix}/success_{name}": rate for name, rate in rates}


def _reported(info: object) -> int:
    if info and isinstance(info, Mapping):
        for key in _KEYS:
            value = info.get(key)
            if isinstance(value, Real | np.bool_):
                return int(float(value) > 0.5)
            flags = np.asarray(value).reshape(-1) if hasattr(value, "__array__") else np.empty(0)
            if len(flags) == 1 and flags.dtype.kind in "bif":  # an array or tensor of one flag
                return int(flags[0] > 0.5)
    return UNREPORTED
