"""Gymnasium's MuJoCo environments in batches: all environments of a process are stepped and computed at once.

Model, settings and spaces are read from one environment that Gymnasium built. The physics runs in native threads
(`physics.py`); observations, rewards and ends of all environments are array operations (`tasks/`). The results equal
those of Gymnasium's environments for the same seeds and actions. Not covered, and stepped by Gymnasium: environments
other than its MuJoCo tasks of version 5, unknown wrappers, rendered observations.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from rl_platform.envs.embodied.descriptions import time_limit
from rl_platform.envs.embodied.mujoco.tasks import native_task
from rl_platform.envs.embodied.saved_states.env_state import NATIVE
from rl_platform.tracing import recorder

if TYPE_CHECKING:
    import torch
    from gymnasium.envs.mujoco import MujocoEnv

    from rl_platform.envs.embodied.mujoco.device_envs import NativeOnDevice, Starts
    from rl_platform.envs.embodied.mujoco.physics import DevicePhysics, Physics
    from rl_platform.envs.embodied.spaces import AnyEnv


class NativeEnvs:
    """N environments like `env`, stepped in `threads` threads. The number of threads does not change results.

    diverged [N] bool: the last step is invalid. MuJoCo reset a bad state, time went backwards, or a position or
    velocity is not finite or exceeds MuJoCo's limit (1e10). success: these tasks have none.
    """

    success: np.ndarray | None = None

    def __init__(self, env: AnyEnv, num_envs: int, threads: int, physics: type[Physics] | None = None) -> None:
        """`physics`: None selects the fastest for the task. Raises ValueError if only Gymnasium can step `env`."""
        import mujoco

        from rl_platform.envs.embodied.mujoco.physics import make_physics

        kind = native_task(env)
        if kind is None:
            raise ValueError(f"{env} has to be stepped by Gymnasium")
        inner: MujocoEnv = env.unwrapped
        self.task = kind(inner)
        self._physics: Physics = (physics or make_physics)(
            inner.model, inner.frame_skip, num_envs, threads, self.task.fields
        )
        self.limit = time_limit(env) or sys.maxsize
        self.largest: float = mujoco.mjMAXVAL
        self._rngs: list[np.random.Generator | None] = [None] * num_envs
        self._starts: Starts | None = None  # for rollouts on a device; None: the generators have changed
        self.positions = np.zeros(num_envs)  # a step rewards their change
        self.diverged = np.zeros(num_envs, bool)

    @classmethod
    def of(cls, env: AnyEnv, num_envs: int, threads: int, backend: str = "mujoco") -> NativeEnvs | None:
        """Returns None if only Gymnasium can step such environments. backend: `env.backend` of the config."""
        if native_task(env) is None:
            return None
        if backend == "mujoco":
            return cls(env, num_envs, threads)
        from rl_platform.envs.embodied.mujoco.warp import WarpPhysics

        return cls(env, num_envs, threads, WarpPhysics)

    def reset(self, which: np.ndarray, seeds: Sequence[int | None]) -> np.ndarray:
        """Starts episodes of environments `which` [K] and returns their first observations [K,D] float64.

        A seed of None keeps an environment's random generator.
        """
        from gymnasium.utils import seeding

        self._starts, starts = None, []
        for i, seed in zip(which.tolist(), seeds, strict=True):
            rng = self._rngs[i]
            if rng is None or seed is not None:
                rng = self._rngs[i] = seeding.np_random(seed)[0]
            starts.append(self.task.start(rng))
        qpos, qvel = (np.array(arrays) for arrays in zip(*starts, strict=True))
        began = time.monotonic()
        self._physics.reset(which, qpos, qvel)
        recorder.add("work", "physics", began)
        begun = self._physics.now.rows(which)
        self.positions[which] = self.task.position(begun)
        return self.task.observe(begun)

    def step(
        self, actions: np.ndarray, lengths: np.ndarray, idle: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Returns observations [N,D] float64, rewards, terminated and truncated [N], equal to those of `Env.step`.

        actions [N,A] within their bounds; lengths [N]: steps of each episode before this one; idle [N] bool:
        environments that are not stepped, whose results are undefined.
        """
        began = time.monotonic()
        self._physics.step(actions, None if idle is None else np.flatnonzero(~idle))
        recorder.add("work", "physics", began)
        now, task = self._physics.now, self.task
        idle_positions = None if idle is None else self.positions[idle]
        rewards, terminated = task.outcome(self.positions, now, actions)
        self.diverged = now.diverged(lengths, task.dt, self.largest)
        if np.count_nonzero(self._physics.warnings):
            self.diverged |= (self._physics.warnings != 0).any(axis=1)
        if idle is not None:
            self.positions[idle], self.diverged[idle] = idle_positions, False
        return task.observe(now), rewards, terminated, lengths >= self.limit - 1

    @property
    def device(self) -> torch.device | None:
        """The device of a simulation whose numbers are tensors (`to_device`); None: they are arrays."""
        return getattr(self._physics, "device", None)

    def to_device(
        self, running: Sequence[np.ndarray], bounds: tuple[np.ndarray, np.ndarray], steps: int
    ) -> NativeOnDevice:
        """Returns all environments as tensors of `device`, for a rollout of `steps` steps.

        running: observations [N,D], returns and lengths [N] of the running episodes. `finish` of the result overwrites
        them, then calls `continue_from`. bounds: lowest and highest actions [N,A].
        """
        from rl_platform.envs.embodied.mujoco.device_envs import NativeOnDevice, Starts

        if self._starts is None or self._starts.count != steps:
            self._starts = Starts(self.task, [rng for rng in self._rngs if rng is not None], steps)
        return NativeOnDevice(self, cast("DevicePhysics", self._physics), self._starts, running, bounds)

    def continue_from(self, positions: np.ndarray, used: np.ndarray) -> None:
        """Continues where a rollout on the device ended; used [N]: episodes that each environment has begun there."""
        assert self._starts is not None
        self.positions[:] = positions
        for index in np.flatnonzero(used).tolist():
            rng = self._rngs[index]
            assert rng is not None
            self._starts.remove(index, int(used[index]), rng)
        cast("DevicePhysics", self._physics).update_now()

    def save(self, index: int) -> bytes:
        """Returns the state of one environment: physics and random generator."""
        state = (self._physics.save(index), float(self.positions[index]), self._rngs[index])
        return NATIVE + pickle.dumps(state)

    def restore(self, index: int, saved: bytes) -> None:
        """Continues from `save`. Raises ValueError for a state of another kind."""
        if not saved.startswith(NATIVE):
            raise ValueError(
                "this state is Gymnasium's or an older version's, and these environments are stepped natively"
            )
        state, self.positions[index], self._rngs[index] = pickle.loads(saved.removeprefix(NATIVE))
        self._starts = None
        self._physics.restore(index, state)

    def close(self) -> None:
        self._physics.close()
