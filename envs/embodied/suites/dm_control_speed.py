"""Replaces three functions of dm_control by faster ones with bit-identical results.

A step of its suite has 6 to 30 microseconds of physics and about 20 of Python. A version of dm_control that lacks an
attribute of 1.0.28 keeps its own function. Not covered: the tasks' own observations and rewards.
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from functools import cache

import numpy as np

from rl_platform.acceleration import VARIABLE

MOST_NAMES = 4096


@cache
def quicken() -> None:
    """Replaces `Physics.step`, the look-up of names in `physics.named`, and `rewards.tolerance`, once per process.

    Does nothing with `runner.accelerate: off`.
    """
    if os.environ.get(VARIABLE) == "off":
        return
    for replace in (_quicken_steps, _quicken_names, _quicken_rewards):
        with suppress(ImportError, AttributeError):
            replace()


def _quicken_steps() -> None:
    """Compares MuJoCo's counters of warnings as bytes; dm_control enters a context manager in each step."""
    import mujoco
    from dm_control.mujoco.engine import Physics

    plain, step1, step2, whole_step = Physics.step, mujoco.mj_step1, mujoco.mj_step2, mujoco.mj_step
    runge_kutta = mujoco.mjtIntegrator.mjINT_RK4.value

    def step(self: Physics, nstep: int = 1) -> None:
        try:
            wrapped, warnings, legacy = self.data, self._warnings, self.legacy_step
        except AttributeError:
            plain(self, nstep)
            return
        model, data, before = wrapped.model.ptr, wrapped.ptr, warnings.tobytes()
        if not legacy:
            whole_step(model, data, nstep)
        else:
            if model.opt.integrator == runge_kutta:
                whole_step(model, data, nstep)
            else:
                step2(model, data)
                if nstep > 1:
                    whole_step(model, data, nstep - 1)
            step1(model, data)
        if warnings.tobytes() != before:
            now = warnings.copy()
            warnings[:] = memoryview(before).cast(warnings.dtype.char)
            with self.check_invalid_state():  # raises or logs, for the counters that grew
                warnings[:] = now

    Physics.step = step


def _quicken_names() -> None:
    """Stores the indices of names, for example those of `named.data.xmat["torso", "zz"]`."""
    from dm_control.mujoco.index import FieldIndexer

    convert, _, stored = FieldIndexer._convert_key, FieldIndexer._axes, {}

    def converted(self: FieldIndexer, key: object) -> object:
        named = type(key) is str or (type(key) is tuple and key and type(key[0]) is type(key[-1]) is str)
        if not named:
            return convert(self, key)
        place = self._axes, key
        index = stored.get(place)
        if index is None:
            index = convert(self, key)
            if len(stored) >= MOST_NAMES:  # tasks may compile a new model for each episode
                stored.clear()
            stored[place] = index
        return index

    FieldIndexer._convert_key = converted


def _quicken_rewards() -> None:
    """Computes the reward of a number without `np.where`, and its sigmoid only outside the bounds. Two of the sigmoids
    are computed without NumPy, whose functions of one number take microseconds."""
    from dm_control.utils import rewards

    general, sigmoid_of = rewards.tolerance, rewards._sigmoids
    default = rewards._DEFAULT_VALUE_AT_MARGIN

    def tolerance(
        x: object,
        bounds: tuple[float, float] = (0.0, 0.0),
        margin: float = 0.0,
        sigmoid: str = "gaussian",
        value_at_margin: float = default,
    ) -> object:
        lower, upper = bounds
        if not (isinstance(x, float) and lower <= upper and margin >= 0):  # an array, or an error to raise
            return general(x, bounds, margin, sigmoid, value_at_margin)
        if lower <= x <= upper:
            return 1.0
        if margin == 0:
            return 0.0
        distance = float(lower - x if x < lower else x - upper)
        if sigmoid in ("linear", "quadratic") and 0 <= value_at_margin < 1:
            # linear: 1 - x (1 - v);  quadratic: 1 - x^2 (1 - v);  0 beyond
            slope = 1 - value_at_margin
            scaled = distance / margin * (slope if sigmoid == "linear" else math.sqrt(slope))
            if not abs(scaled) < 1:  # also a number that is not finite
                return 0.0
            return float(1 - (scaled if sigmoid == "linear" else scaled**2))
        return float(sigmoid_of(np.float64(distance) / margin, value_at_margin, sigmoid))

    rewards.tolerance = tolerance
