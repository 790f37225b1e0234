"""Tasks that reward running (Swimmer, HalfCheetah, Hopper, Walker2d, Ant, Humanoid), and HumanoidStandup."""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np

from rl_platform.envs.embodied.arrays import doubles, module_of
from rl_platform.envs.embodied.mujoco.row_operations import join, never, squares
from rl_platform.envs.embodied.mujoco.tasks.mujoco_task import NoisyStart, Quantities, StepOutcome

if TYPE_CHECKING:
    import torch
    from gymnasium.envs.mujoco import MujocoEnv

    from rl_platform.envs.embodied.arrays import Array


class RunningTask(NoisyStart):
    """reward = forward weight * speed - control weight * |action|^2 (+ healthy reward).

    Healthy means strictly within `bounds`. Episodes end at their time limit or, for some tasks, when not healthy.
    """

    hidden: ClassVar[int] = 1  # leading positions that `exclude_current_positions_from_observation` removes
    largest_speed: ClassVar[float] = np.inf  # observed velocities are clipped to it

    def __init__(self, env: MujocoEnv) -> None:
        super().__init__(env)
        self.forward_weight: float = env._forward_reward_weight
        self.control_weight: float = env._ctrl_cost_weight
        self.skipped = self.hidden if env._exclude_current_positions_from_observation else 0
        self.bounds = np.tile([[-np.inf], [np.inf]], self.model.nq + self.model.nv)  # of positions and velocities
        self.healthy_reward: float = getattr(env, "_healthy_reward", 0.0)
        self.terminates = bool(getattr(env, "_terminate_when_unhealthy", False))

    def on(self, device: torch.device) -> Self:
        _ = self.bounded  # stored now, so that the copy has it as a tensor
        return super().on(device)

    @cached_property
    def bounded(self) -> Array:
        """Columns of `bounds` with a bound."""
        return np.flatnonzero(np.isfinite(self.bounds).any(axis=0))

    def position(self, now: Quantities) -> Array:
        return now.qpos[:, 0]

    def observe(self, now: Quantities) -> Array:
        velocities = now.qvel
        if self.largest_speed < np.inf:
            velocities = velocities.clip(-self.largest_speed, self.largest_speed)
        return join((now.qpos[:, self.skipped :], velocities))

    def outcome(self, positions: Array, now: Quantities, actions: Array) -> StepOutcome:
        rewards = self.speeds(positions, now)
        rewards *= self.forward_weight
        terminated = never(rewards)
        if len(self.bounded):
            healthy = self.within_bounds(now)
            rewards += self.healthy_reward * doubles(healthy)
            terminated = ~healthy if self.terminates else terminated
        else:
            rewards += self.healthy_reward
        rewards -= float(np.float32(self.control_weight)) * squares(actions)  # Gymnasium multiplies in float32
        return rewards, terminated

    def within_bounds(self, now: Quantities) -> Array:
        """Returns which environments [N] bool are strictly within `bounds`; a number without bounds may be anything."""
        (low, high), numbers = self.bounds[:, self.bounded], join((now.qpos, now.qvel))[:, self.bounded]
        return ((low < numbers) & (numbers < high)).all(axis=1)


class Swimmer(RunningTask):
    """Swims forward. `exclude_current_positions_from_observation` removes two positions."""

    hidden = 2


class HalfCheetah(RunningTask):
    """Runs forward; initial velocities are normally distributed."""

    normal_velocities = True


class Walker2d(RunningTask):
    """Healthy while height and pitch of the torso are in range."""

    largest_speed = 10.0

    def __init__(self, env: MujocoEnv) -> None:
        super().__init__(env)
        self.bounds[:, 1], self.bounds[:, 2] = env._healthy_z_range, env._healthy_angle_range


class Hopper(Walker2d):
    """Walker2d with a range for the other coordinates."""

    def __init__(self, env: MujocoEnv) -> None:
        super().__init__(env)
        low, high = env._healthy_state_range
        np.maximum(self.bounds[0, 2:], low, out=self.bounds[0, 2:])
        np.minimum(self.bounds[1, 2:], high, out=self.bounds[1, 2:])


class ContactRunner(RunningTask):
    """A running task with a cost of contact forces."""

    @abstractmethod
    def healthy(self, now: Quantities) -> Array:
        """Returns which bodies are healthy, [N] bool."""

    @abstractmethod
    def costs(self, now: Quantities, actions: Array) -> Array:
        """Returns the costs [N] of actions and contacts."""

    def outcome(self, positions: Array, now: Quantities, actions: Array) -> StepOutcome:
        healthy = self.healthy(now)
        speeds = self.speeds(positions, now)
        rewards = self.forward_weight * speeds + self.healthy_reward * doubles(healthy) - self.costs(now, actions)
        return rewards, ~healthy if self.terminates else never(rewards)


class Ant(ContactRunner):
    """Runs in the plane. Its position is that of the main body; it observes contact forces."""

    fields = ("xpos", "cfrc_ext")
    hidden = 2
    normal_velocities = True

    def __init__(self, env: MujocoEnv) -> None:
        super().__init__(env)
        self.z_range: tuple[float, float] = env._healthy_z_range
        self.main_body: int = env.model.body(env._main_body).id
        self.contact_weight: float = env._contact_cost_weight
        self.force_range: tuple[float, float] = env._contact_force_range
        self.observes_forces = bool(env._include_cfrc_ext_in_observation)

    def position(self, now: Quantities) -> Array:
        return now.xpos[:, self.main_body, 0]

    def observe(self, now: Quantities) -> Array:
        forces = (now.cfrc_ext[:, 1:].clip(*self.force_range),) if self.observes_forces else ()
        return join((now.qpos[:, self.skipped :], now.qvel, *forces))

    def healthy(self, now: Quantities) -> Array:
        low, high = self.z_range  # inclusive, unlike other tasks
        isfinite = module_of(now.qpos).isfinite
        finite = isfinite(now.qpos).all(axis=1) & isfinite(now.qvel).all(axis=1)
        return finite & (now.qpos[:, 2] >= low) & (now.qpos[:, 2] <= high)

    def costs(self, now: Quantities, actions: Array) -> Array:
        contact = self.contact_weight * squares(now.cfrc_ext.clip(*self.force_range))
        return self.control_weight * squares(actions) + contact


_BODY_FIELDS = ("ctrl", "cinert", "cvel", "qfrc_actuator", "cfrc_ext")


class _Body:
    """The observed numbers of a humanoid."""

    def __init__(self, env: MujocoEnv) -> None:
        self.skipped = 2 if env._exclude_current_positions_from_observation else 0
        # Gymnasium includes a part only for True itself
        self.inertia = env._include_cinert_in_observation is True
        self.velocity = env._include_cvel_in_observation is True
        self.actuators = env._include_qfrc_actuator_in_observation is True
        self.forces = env._include_cfrc_ext_in_observation is True

    def observe(self, now: Quantities) -> Array:
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

    fields = (*_BODY_FIELDS, "xipos")

    def __init__(self, env: MujocoEnv) -> None:
        super().__init__(env)
        self.body = _Body(env)
        self.z_range: tuple[float, float] = env._healthy_z_range
        self.masses: np.ndarray = env.model.body_mass.copy()
        self.contact_weight: float = env._contact_cost_weight
        self.contact_range: tuple[float, float] = env._contact_cost_range

    def position(self, now: Quantities) -> Array:
        # the rounding of a matrix product would depend on the number of simulations
        return (now.xipos[:, :, 0] * self.masses).sum(axis=1) / self.masses.sum()

    def observe(self, now: Quantities) -> Array:
        return self.body.observe(now)

    def healthy(self, now: Quantities) -> Array:
        low, high = self.z_range
        return (now.qpos[:, 2] > low) & (now.qpos[:, 2] < high)

    def costs(self, now: Quantities, actions: Array) -> Array:
        contact = (self.contact_weight * squares(now.cfrc_ext)).clip(*self.contact_range)
        return self.control_weight * squares(now.ctrl) + contact


class HumanoidStandup(NoisyStart):
    """reward = height of the torso / time step of the physics - costs + 1; never terminates."""

    fields = _BODY_FIELDS

    def __init__(self, env: MujocoEnv) -> None:
        super().__init__(env)
        self.body = _Body(env)
        self.timestep: float = env.model.opt.timestep
        self.control_weight: float = env._ctrl_cost_weight
        self.impact_weight: float = env._impact_cost_weight
        self.impact_range: tuple[float, float] = env._impact_cost_range

    def observe(self, now: Quantities) -> Array:
        return self.body.observe(now)

    def outcome(self, positions: Array, now: Quantities, actions: Array) -> StepOutcome:
        # Gymnasium ignores `uph_cost_weight`
        height = now.qpos[:, 2] / self.timestep
        impact = (self.impact_weight * squares(now.cfrc_ext)).clip(*self.impact_range)
        return height - self.control_weight * squares(now.ctrl) - impact + 1, never(height)
