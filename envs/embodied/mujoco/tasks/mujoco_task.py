"""Base classes of the MuJoCo tasks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

import numpy as np

if TYPE_CHECKING:
    from gymnasium.envs.mujoco import MujocoEnv

StepOutcome = tuple[np.ndarray, np.ndarray]
"""rewards [N] float64, terminated [N] bool."""


class Quantities:
    """Fields of MuJoCo's data for N simulations, as attributes: `qpos` [N,nq], `xpos` [N,bodies,3], ..."""

    def __init__(self, fields: dict[str, np.ndarray]) -> None:
        vars(self).update(fields)

    def __getattr__(self, name: str) -> np.ndarray:
        raise AttributeError(f"{name} is not read from the physics: add it to the task's `fields`")

    def rows(self, which: np.ndarray) -> Quantities:
        """Returns a copy with simulations `which` only."""
        return Quantities({name: array[which] for name, array in vars(self).items()})


class MujocoTask(ABC):
    """One kind of environment. `env`: an unwrapped environment with the settings of all simulations."""

    fields: ClassVar[tuple[str, ...]] = ()
    """Fields that the task reads besides `qpos` and `qvel`. `cfrc_ext` costs another pass over the bodies."""

    def __init__(self, env: MujocoEnv) -> None:
        self.model = env.model
        self.dt: float = env.dt
        self.init_qpos: np.ndarray = env.init_qpos.copy()
        self.init_qvel: np.ndarray = env.init_qvel.copy()

    @abstractmethod
    def start(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draws qpos [nq] and qvel [nv] of a new episode, in Gymnasium's order of random numbers."""

    @abstractmethod
    def observe(self, now: Quantities) -> np.ndarray:
        """Returns observations [N,D] float64."""

    @abstractmethod
    def outcome(self, positions: np.ndarray, now: Quantities, actions: np.ndarray) -> StepOutcome:
        """Returns rewards [N] and terminations [N] of a step.

        positions [N]: `position` before the step; tasks that reward speed update it in place. actions [N,A] float32:
        Gymnasium sums their squares in this precision.
        """

    def position(self, now: Quantities) -> np.ndarray:
        """Returns the position [N] whose speed is rewarded; 0 for tasks that do not reward speed."""
        return np.zeros(len(now.qpos))

    def speeds(self, positions: np.ndarray, now: Quantities) -> np.ndarray:
        """Returns the speeds [N] since `positions`, which are updated in place."""
        reached = self.position(now)
        speeds: np.ndarray = reached - positions
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


def never(count: int) -> np.ndarray:
    """Returns [count] bool, all False: no episode terminates."""
    return np.zeros(count, bool)


def squares(array: np.ndarray) -> np.ndarray:
    """Returns the sum of squares of each row, [N,...] -> [N]."""
    squared = np.square(array)
    summed: np.ndarray = np.add.reduce(squared if squared.ndim == 2 else squared.reshape(len(array), -1), axis=1)
    return summed


def join(parts: Iterable[np.ndarray]) -> np.ndarray:
    """Flattens the rows of arrays [N,...] and concatenates them to [N,D]."""
    return np.concatenate([part if part.ndim == 2 else part.reshape(len(part), -1) for part in parts], axis=1)
