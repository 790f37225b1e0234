"""Tasks that reward running: Swimmer, HalfCheetah, Hopper, Walker2d, Ant."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np

from rl_platform.envs.embodied.mujoco_tasks.base import NoisyStart, Outcome, Quantities, join, never, squares
from rl_platform.envs.embodied.step_loops import run_outcome, within_bounds


class Runner(NoisyStart):
    """reward = forward weight * speed - control weight * |action|^2; episodes end by their time limit only."""

    hidden: ClassVar[int] = 1  # leading positions that `exclude_current_positions_from_observation` leaves out

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.forward_weight: float = env._forward_reward_weight
        self.control_weight: float = env._ctrl_cost_weight
        self.skipped = self.hidden if env._exclude_current_positions_from_observation else 0

    def position(self, now: Quantities) -> np.ndarray:
        return now.qpos[:, 0]

    def observe(self, now: Quantities) -> np.ndarray:
        return join((now.qpos[:, self.skipped :], now.qvel))

    def costs(self, now: Quantities, actions: np.ndarray) -> np.ndarray:
        return self.control_weight * squares(actions)

    def outcome(self, speeds: np.ndarray, now: Quantities, actions: np.ndarray) -> Outcome:
        return self.forward_weight * speeds - self.costs(now, actions), never(len(speeds))


class Swimmer(Runner):
    hidden = 2


class HalfCheetah(Runner):
    normal_velocities = True


class HealthyRunner(Runner):
    """Runner that is paid for being healthy and, by default, ends when it is not."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.healthy_reward: float = env._healthy_reward
        self.terminates: bool = bool(env._terminate_when_unhealthy)
        self.z_range: tuple[float, float] = env._healthy_z_range

    @abstractmethod
    def healthy(self, now: Quantities) -> np.ndarray:
        """[N] bool."""

    def outcome(self, speeds: np.ndarray, now: Quantities, actions: np.ndarray) -> Outcome:
        healthy, costs = self.healthy(now), self.costs(now, actions)
        rewards, ends = np.empty(len(healthy)), np.empty(len(healthy), bool)
        run_outcome()(speeds, costs, healthy, self.forward_weight, self.healthy_reward, self.terminates, rewards, ends)
        return rewards, ends


class Walker2d(HealthyRunner):
    """Healthy while height and pitch of the torso are in range."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.bounds = np.tile([[-np.inf], [np.inf]], self.model.nq + self.model.nv)  # of positions and velocities
        self.bounds[:, 1], self.bounds[:, 2] = self.z_range, env._healthy_angle_range

    def observe(self, now: Quantities) -> np.ndarray:
        return join((now.qpos[:, self.skipped :], np.minimum(np.maximum(now.qvel, -10.0), 10.0)))

    def healthy(self, now: Quantities) -> np.ndarray:
        found = np.empty(len(now.qpos), bool)
        within_bounds()(now.qpos, now.qvel, *self.bounds, found)
        return found


class Hopper(Walker2d):
    """Walker2d whose other coordinates have a range too."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        low, high = env._healthy_state_range
        np.maximum(self.bounds[0, 2:], low, out=self.bounds[0, 2:])
        np.minimum(self.bounds[1, 2:], high, out=self.bounds[1, 2:])


class Ant(HealthyRunner):
    """Runner in the plane, measured at its main body, that pays for contact forces and observes them."""

    fields = ("xpos", "cfrc_ext")
    hidden = 2
    normal_velocities = True

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.main_body: int = env.model.body(env._main_body).id
        self.contact_weight: float = env._contact_cost_weight
        self.force_range: tuple[float, float] = env._contact_force_range
        self.observes_forces = bool(env._include_cfrc_ext_in_observation)

    def position(self, now: Quantities) -> np.ndarray:
        return now.xpos[:, self.main_body, 0]

    def observe(self, now: Quantities) -> np.ndarray:
        forces = (np.clip(now.cfrc_ext[:, 1:], *self.force_range),) if self.observes_forces else ()
        return join((now.qpos[:, self.skipped :], now.qvel, *forces))

    def healthy(self, now: Quantities) -> np.ndarray:
        low, high = self.z_range  # inclusive for this one
        finite = np.isfinite(now.qpos).all(axis=1) & np.isfinite(now.qvel).all(axis=1)
        return finite & (now.qpos[:, 2] >= low) & (now.qpos[:, 2] <= high)

    def costs(self, now: Quantities, actions: np.ndarray) -> np.ndarray:
        return super().costs(now, actions) + self.contact_weight * squares(np.clip(now.cfrc_ext, *self.force_range))
