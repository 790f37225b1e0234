"""Stepping Gymnasium's MuJoCo environments without their Python, several at a time.

The environments stay Gymnasium's: they are built, reset, saved and rendered by its code, and their physics data is
stepped in place. Only what `step` computes around the physics is done here, for all environments at once, and the
physics itself runs in threads, for it does not hold the interpreter lock. HalfCheetah is covered; other environments
are stepped by Gymnasium.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from gymnasium import Env

Numbers = tuple[np.ndarray, np.ndarray, np.ndarray]
"""observations [N,D] float64, rewards [N] float64, terminated [N] bool."""


class NativeStepper:
    """Steps environments of one kind in `threads` threads; the result is the same for any number of them."""

    def __init__(self, envs: Sequence[Env[Any, Any]], threads: int) -> None:
        import mujoco

        self._mj_step = mujoco.mj_step
        inner = [env.unwrapped for env in envs]
        self._task = _TASKS[_kind(envs[0])](inner[0])
        self._frame_skip: int = inner[0].frame_skip  # type: ignore[attr-defined]
        self._limits = np.array([_time_limit(env) for env in envs])
        self._physics = [(env.model, env.data) for env in inner]  # type: ignore[attr-defined]
        self._ctrl = [data.ctrl for _, data in self._physics]
        self._qpos = [data.qpos for _, data in self._physics]
        self._qvel = [data.qvel for _, data in self._physics]
        threads = min(threads, len(envs))
        bounds = np.linspace(0, len(envs), threads + 1).astype(int).tolist()
        self._shares = list(pairwise(bounds))
        self._pool = ThreadPoolExecutor(threads - 1, "physics") if threads > 1 else None

    @classmethod
    def of(cls, envs: Sequence[Env[Any, Any]], threads: int) -> NativeStepper | None:
        """None if Gymnasium has to step these environments itself."""
        if all(_kind(env) in _TASKS and env.render_mode is None for env in envs):
            return cls(envs, threads)
        return None

    def step(
        self, actions: np.ndarray, lengths: np.ndarray, idle: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """actions [N,A] within their bounds, lengths [N]: steps of each episode before this one; idle [N] bool: whose
        physics stands still, and whose results mean nothing.

        Returns observations [N,D], rewards, terminated and truncated [N], as `Env.step` gives them.
        """
        before = self._positions()
        rest = self._shares[1:]
        others = [self._pool.submit(self._simulate, share, actions, idle) for share in rest] if self._pool else ()
        self._simulate(self._shares[0], actions, idle)
        for other in others:
            other.result()
        return *self._task(before, self._positions(), actions), lengths + 1 >= self._limits

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def _positions(self) -> Positions:
        rows = len(self._qpos)
        return Positions(np.concatenate(self._qpos).reshape(rows, -1), np.concatenate(self._qvel).reshape(rows, -1))

    def _simulate(self, share: tuple[int, int], actions: np.ndarray, idle: np.ndarray | None) -> None:
        mj_step, frame_skip, ctrl = self._mj_step, self._frame_skip, self._ctrl
        for i in range(*share) if idle is None else (i for i in range(*share) if not idle[i]):
            model, data = self._physics[i]
            ctrl[i][:] = actions[i]
            mj_step(model, data, frame_skip)


@dataclass(frozen=True)
class Positions:
    """Generalised positions [N,nq] and velocities [N,nv] of all environments."""

    qpos: np.ndarray
    qvel: np.ndarray


Task = Callable[[Positions, Positions, np.ndarray], Numbers]


def _half_cheetah(env: Any) -> Task:
    """`HalfCheetahEnv.step` of Gymnasium 1.x, version 5 of the environment."""
    forward_weight, control_weight = env._forward_reward_weight, env._ctrl_cost_weight
    skipped, dt = int(env._exclude_current_positions_from_observation), env.dt

    def step(before: Positions, after: Positions, actions: np.ndarray) -> Numbers:
        velocity = (after.qpos[:, 0] - before.qpos[:, 0]) / dt
        rewards = forward_weight * velocity - control_weight * np.square(actions).sum(axis=1)
        observations = np.concatenate((after.qpos[:, skipped:], after.qvel), axis=1)
        return observations, rewards, np.zeros(len(rewards), bool)

    return step


_TASKS: dict[str, Callable[[Any], Task]] = {
    "gymnasium.envs.mujoco.half_cheetah_v5.HalfCheetahEnv": _half_cheetah,
}
_WRAPPERS = ("TimeLimit", "OrderEnforcing")  # the ones whose whole effect on a step is known here


def _kind(env: Env[Any, Any]) -> str:
    """The class of the environment; empty if something else than the usual wrappers is around it."""
    layer: Any = env
    while layer is not env.unwrapped:
        if type(layer).__module__ != "gymnasium.wrappers.common" or type(layer).__name__ not in _WRAPPERS:
            return ""
        layer = layer.env
    return f"{type(layer).__module__}.{type(layer).__qualname__}"


def _time_limit(env: Env[Any, Any]) -> int:
    """Steps after which an episode is truncated."""
    layer = _time_limit_layer(env)
    return sys.maxsize if layer is None else int(layer._max_episode_steps)


def set_elapsed(env: Env[Any, Any], steps: int) -> None:
    """Tell the environment's own step counter, which native steps do not advance, where its episode is."""
    layer = _time_limit_layer(env)
    if layer is not None:
        layer._elapsed_steps = steps


def _time_limit_layer(env: Env[Any, Any]) -> Any:
    layer: Any = env
    while layer is not env.unwrapped:
        if type(layer).__name__ == "TimeLimit":
            return layer
        layer = layer.env
    return None
