"""The environments of `NativeEnvs` as tensors of a device: a rollout of them never waits for the device.

The host would have to wait to read which episodes ended. The start states of all episodes that may begin in a rollout
are therefore drawn before it. Each environment draws them from its own generator, in the order of `NativeEnvs`, so the
results are equal. Not covered: idle environments, and saving a state during a rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rl_platform.device_copy import on_device
from rl_platform.envs.embodied.mujoco.device_step import DeviceStep
from rl_platform.errors import Diverged, WorkerError

if TYPE_CHECKING:
    from rl_platform.envs.embodied.mujoco.native import NativeEnvs
    from rl_platform.envs.embodied.mujoco.physics import DevicePhysics
    from rl_platform.envs.embodied.mujoco.tasks.mujoco_task import MujocoTask


class Starts:
    """The next `count` start states of each environment, drawn from a copy of its generator.

    qpos [N,count,nq], qvel [N,count,nv] float32.
    """

    def __init__(self, task: MujocoTask, rngs: list[np.random.Generator], count: int) -> None:
        self._task, self._ahead = task, [deepcopy(rng) for rng in rngs]
        shape = len(rngs), count
        self.qpos = np.empty((*shape, len(task.init_qpos)), np.float32)
        self.qvel = np.empty((*shape, len(task.init_qvel)), np.float32)
        for index in range(len(rngs)):
            self._draw(index, 0)

    @property
    def count(self) -> int:
        return self.qpos.shape[1]

    def remove(self, index: int, number: int, rng: np.random.Generator) -> None:
        """Removes the first `number` starts of an environment and appends new ones; advances its generator `rng`."""
        for _ in range(number):
            self._task.start(rng)
        for array in (self.qpos[index], self.qvel[index]):
            array[: self.count - number] = array[number:].copy()
        self._draw(index, self.count - number)

    def _draw(self, index: int, first: int) -> None:
        for place in range(first, self.count):
            self.qpos[index, place], self.qvel[index, place] = self._task.start(self._ahead[index])


class NativeOnDevice:
    """`DeviceEnvs` of a `NativeEnvs` whose physics is a `DevicePhysics`, for at most `starts.count` steps.

    running, bounds: see `NativeEnvs.to_device`.
    """

    def __init__(
        self,
        native: NativeEnvs,
        physics: DevicePhysics,
        starts: Starts,
        running: Sequence[np.ndarray],
        bounds: tuple[np.ndarray, np.ndarray],
    ) -> None:
        self.device = physics.device
        self._native, self._physics, self._starts, self._running = native, physics, starts, running
        self._task, self._limit, self._largest = native.task.on(self.device), native.limit, native.largest
        arrays = *running, native.positions, starts.qpos, starts.qvel, *bounds
        copied = on_device([torch.from_numpy(array) for array in arrays], self.device)
        # on a CPU the tensors share memory with the host's arrays, which must not change before `finish`
        self._observations, self._returns, self._lengths, self._positions = (part.clone() for part in copied[:4])
        self._qpos, self._qvel, self._low, self._high = copied[4:]
        self._used = torch.zeros_like(self._lengths)
        self._everyone = torch.arange(len(self._used), device=self.device)
        self._bad_actions, self._bad_starts = (torch.zeros_like(self._used, dtype=torch.bool) for _ in range(2))

    def computing(self) -> AbstractContextManager[None]:
        return self._physics.computing()

    def step(self, actions: Tensor) -> DeviceStep:
        self._bad_actions |= ~_are_finite(actions).all(1)
        actions = torch.minimum(torch.maximum(actions, self._low), self._high)
        self._physics.step_on_device(actions)
        now = self._physics.now_on_device()
        rewards, terminated = self._task.outcome(self._positions, now, actions)
        finals = self._task.observe(now).float()
        truncated = self._lengths >= self._limit - 1
        invalid = now.diverged(self._lengths, self._task.dt, self._largest)
        invalid |= ~(_are_finite(finals).all(1) & _are_finite(rewards))
        finals = torch.where(invalid[:, None], self._observations, finals)
        rewards = rewards.masked_fill(invalid, 0.0)
        terminated, truncated = terminated & ~invalid, truncated | invalid
        ended = terminated | truncated
        returns, lengths = self._returns + rewards, self._lengths + 1
        self._begin(ended, finals)
        self._returns, self._lengths = returns.masked_fill(ended, 0.0), lengths.masked_fill(ended, 0)
        return DeviceStep(self._observations, rewards, terminated, ended, invalid, finals, returns, lengths)

    def _begin(self, begins: Tensor, finals: Tensor) -> None:
        """Starts the next episode of the environments `begins` [N] bool; the others continue with `finals`."""
        place = self._used.clamp(max=self._starts.count - 1)
        self._physics.reset_on_device(begins, self._qpos[self._everyone, place], self._qvel[self._everyone, place])
        self._used += begins
        begun = self._physics.now_on_device()
        first = self._task.observe(begun).float()
        self._bad_starts |= begins & ~_are_finite(first).all(1)
        self._observations = torch.where(begins[:, None], first, finals)
        self._positions = torch.where(begins, self._task.position(begun), self._positions)

    def finish(self) -> None:
        flags = torch.stack((self._used, self._bad_actions, self._bad_starts)).cpu().numpy()
        used, bad_actions, bad_starts = flags
        if bad_actions.any():
            raise Diverged(
                f"the policy's actions for environments {np.flatnonzero(bad_actions).tolist()} are not finite"
            )
        if bad_starts.any():
            number = int(np.flatnonzero(bad_starts)[0])
            raise WorkerError(f"environment {number} failed in reset: an observation that is not finite")
        for array, tensor in zip(self._running, (self._observations, self._returns, self._lengths), strict=True):
            array[:] = tensor.cpu().numpy()
        self._native.continue_from(self._positions.cpu().numpy(), used)


def _are_finite(numbers: Tensor) -> Tensor:
    """Returns the result of `torch.isfinite`, with two kernels instead of four."""
    return numbers.abs() < torch.inf
