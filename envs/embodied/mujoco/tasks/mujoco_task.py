"""Base classes of the MuJoCo tasks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np

from rl_platform.envs.embodied.arrays import module_of
from rl_platform.envs.embodied.mujoco.row_operations import join

if TYPE_CHECKING:
    import torch
    from gymnasium.envs.mujoco import MujocoEnv

    from rl_platform.envs.embodied.arrays import Array

StepOutcome = tuple["Array", "Array"]
"""rewards [N] float64, terminated [N] bool."""


class Quantities:
    """Fields of MuJoCo's data for N simulations, as attributes: `qpos` [N,nq], `xpos` [N,bodies,3], ...

    They are arrays, or tensors of one device.
    """

    def __init__(self, fields: dict[str, Array]) -> None:
        vars(self).update(fields)

    def __getattr__(self, name: str) -> Array:
        raise AttributeError(f"{name} is not read from the physics: add it to the task's `fields`")

    def rows(self, which: np.ndarray) -> Quantities:
        """Returns a copy with simulations `which` only."""
        return Quantities({name: array[which] for name, array in vars(self).items()})

    def diverged(self, lengths: Array, dt: float, largest: float) -> Array:
        """Returns [N] bool: MuJoCo reset a bad state, which sets the time back, or a position or velocity is not finite
        or not below `largest`.

        lengths [N]: steps of each episode before the last one; dt: seconds of a step.
        """
        numbers = join((self.qpos, self.qvel))
        was_reset = ~(self.time >= (lengths + 0.5) * dt)
        if isinstance(numbers, np.ndarray) and np.vdot(numbers, numbers) < largest:
            return was_reset  # every number is at most the square root of that sum
        return was_reset | ~(abs(numbers) < largest).all(1)


class MujocoTask(ABC):
    """One kind of environment. `env`: an unwrapped environment with the settings of all simulations.

    `position`, `observe` and `outcome` compute with arrays. Those of the copy that `on` returns compute with tensors.
    """

    fields: ClassVar[tuple[str, ...]] = ()
    """Fields that the task reads besides `qpos` and `qvel`. `cfrc_ext` costs another pass over the bodies."""

    def __init__(self, env: MujocoEnv) -> None:
        self.model = env.model
        self.dt: float = env.dt
        self.init_qpos: np.ndarray = env.init_qpos.copy()
        self.init_qvel: np.ndarray = env.init_qvel.copy()

    def on(self, device: torch.device) -> Self:
        """Returns a copy that computes with tensors of `device`."""
        import torch

        moved = copy(self)
        arrays = {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        vars(moved).update({name: torch.from_numpy(array).to(device) for name, array in arrays.items()})
        return moved

    @abstractmethod
    def start(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draws qpos [nq] and qvel [nv] of a new episode, in Gymnasium's order of random numbers."""

    @abstractmethod
    def observe(self, now: Quantities) -> Array:
        """Returns observations [N,D] float64."""

    @abstractmethod
    def outcome(self, positions: Array, now: Quantities, actions: Array) -> StepOutcome:
        """Returns rewards [N] and terminations [N] of a step.

        positions [N]: `position` before the step; tasks that reward speed update it in place. actions [N,A] float32:
        Gymnasium sums their squares in this precision.
        """

    def position(self, now: Quantities) -> Array:
        """Returns the position [N] whose speed is rewarded; 0 for tasks that do not reward speed."""
        return module_of(now.qpos).zeros_like(now.qpos[:, 0])

    def speeds(self, positions: Array, now: Quantities) -> Array:
        """Returns the speeds [N] since `positions`, which are updated in place."""
        reached = self.position(now)
        speeds: Array = reached - positions
        speeds /= self.dt
        positions[:] = reached
        return speeds


class NoisyStart(MujocoTask):
    """Episodes start near the model's initial state, with noise of `reset_noise_scale`."""

    normal_velocities: ClassVar[bool] = False

    def __init__(self, env: MujocoEnv) -> None:
        super().__init__(env)
        self.noise: float = env._reset_noise_scale

    def start(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        noise, positions, velocities = self.noise, len(self.init_qpos), len(self.init_qvel)
        qpos = self.init_qpos + rng.uniform(-noise, noise, positions)
        if self.normal_velocities:
            return qpos, self.init_qvel + noise * rng.standard_normal(velocities)
        return qpos, self.init_qvel + rng.uniform(-noise, noise, velocities)
