"""Humanoid and HumanoidStandup: observations of inertias, velocities and forces of every body."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rl_platform.envs.embodied.mujoco.tasks.base import NoisyStart, Quantities, StepOutcome, join, never, squares
from rl_platform.envs.embodied.mujoco.tasks.locomotion import ContactRunner

if TYPE_CHECKING:
    from gymnasium.envs.mujoco import MujocoEnv

_FIELDS = ("ctrl", "cinert", "cvel", "qfrc_actuator", "cfrc_ext")


class _Body:
    """The observed numbers of a humanoid."""

    def __init__(self, env: MujocoEnv) -> None:
        self.skipped = 2 if env._exclude_current_positions_from_observation else 0
        # Gymnasium includes a part only for True itself
        self.inertia = env._include_cinert_in_observation is True
        self.velocity = env._include_cvel_in_observation is True
        self.actuators = env._include_qfrc_actuator_in_observation is True
        self.forces = env._include_cfrc_ext_in_observation is True

    def observe(self, now: Quantities) -> np.ndarray:
        parts = [now.qpos[:, self.skipped :], now.qvel]
        if self.inertia:
            parts.append(now.cinert[:, 1:])
        if self.velocity:
            parts.append(now.cvel[:, 1:])
        if self.actuators:
            parts.append(now.qfrc_actuator[:, 6:])
        if self.forces:
            parts.append(now.cfrc_ext[:, 1:])
        return join(parts)


class Humanoid(ContactRunner):
    """Its position is that of the centre of mass. It is healthy while the torso is up."""

    fields = (*_FIELDS, "xipos")

    def __init__(self, env: MujocoEnv) -> None:
        super().__init__(env)
        self.body = _Body(env)
        self.z_range: tuple[float, float] = env._healthy_z_range
        self.masses: np.ndarray = env.model.body_mass.copy()
        self.contact_weight: float = env._contact_cost_weight
        self.contact_range: tuple[float, float] = env._contact_cost_range

    def position(self, now: Quantities) -> np.ndarray:
        # the rounding of a matrix product would depend on the number of simulations
        return (now.xipos[:, :, 0] * self.masses).sum(axis=1) / self.masses.sum()

    def observe(self, now: Quantities) -> np.ndarray:
        return self.body.observe(now)

    def healthy(self, now: Quantities) -> np.ndarray:
        low, high = self.z_range
        return (now.qpos[:, 2] > low) & (now.qpos[:, 2] < high)

    def costs(self, now: Quantities, actions: np.ndarray) -> np.ndarray:
        contact = np.clip(self.contact_weight * squares(now.cfrc_ext), *self.contact_range)
        return self.control_weight * squares(now.ctrl) + contact


class HumanoidStandup(NoisyStart):
    """reward = height of the torso / time step of the physics - costs + 1; never terminates."""

    fields = _FIELDS

    def __init__(self, env: MujocoEnv) -> None:
        super().__init__(env)
        self.body = _Body(env)
        self.timestep: float = env.model.opt.timestep
        self.control_weight: float = env._ctrl_cost_weight
        self.impact_weight: float = env._impact_cost_weight
        self.impact_range: tuple[float, float] = env._impact_cost_range

    def observe(self, now: Quantities) -> np.ndarray:
        return self.body.observe(now)

    def outcome(self, positions: np.ndarray, now: Quantities, actions: np.ndarray) -> StepOutcome:
        # Gymnasium ignores `uph_cost_weight`
        height = now.qpos[:, 2] / self.timestep
        impact = np.clip(self.impact_weight * squares(now.cfrc_ext), *self.impact_range)
        return height - self.control_weight * squares(now.ctrl) - impact + 1, never(len(height))
