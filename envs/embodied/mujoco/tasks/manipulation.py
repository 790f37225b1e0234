"""Reacher and Pusher: an arm that brings its tip to a target, or an object to a goal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rl_platform.envs.embodied.arrays import module_of
from rl_platform.envs.embodied.mujoco.row_operations import join, never, norms, squares
from rl_platform.envs.embodied.mujoco.tasks.mujoco_task import MujocoTask, Quantities, StepOutcome

if TYPE_CHECKING:
    from gymnasium.envs.mujoco import MujocoEnv

    from rl_platform.envs.embodied.arrays import Array


class Reacher(MujocoTask):
    """reward = - distance weight * |fingertip - target| - control weight * |action|^2."""

    fields = ("xpos",)

    def __init__(self, env: MujocoEnv) -> None:
        super().__init__(env)
        self.distance_weight: float = env._reward_dist_weight
        self.control_weight: float = env._reward_control_weight
        self.tip, self.target = (env.model.body(name).id for name in ("fingertip", "target"))

    def start(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        qpos = rng.uniform(-0.1, 0.1, len(self.init_qpos)) + self.init_qpos
        target = rng.uniform(-0.2, 0.2, 2)
        while np.linalg.norm(target) >= 0.2:
            target = rng.uniform(-0.2, 0.2, 2)
        qpos[-2:] = target
        qvel = self.init_qvel + rng.uniform(-0.005, 0.005, len(self.init_qvel))
        qvel[-2:] = 0
        return qpos, qvel

    def observe(self, now: Quantities) -> Array:
        angles, module = now.qpos[:, :2], module_of(now.qpos)
        return join((module.cos(angles), module.sin(angles), now.qpos[:, 2:], now.qvel[:, :2], self._gap(now)[:, :2]))

    def outcome(self, positions: Array, now: Quantities, actions: Array) -> StepOutcome:
        distance = -norms(self._gap(now)) * self.distance_weight
        return distance + -squares(actions) * self.control_weight, never(distance)

    def _gap(self, now: Quantities) -> Array:
        return now.xpos[:, self.tip] - now.xpos[:, self.target]


class Pusher(MujocoTask):
    """reward = - weighted distances object to goal and tip to object - control weight * |action|^2."""

    fields = ("xpos",)

    def __init__(self, env: MujocoEnv) -> None:
        super().__init__(env)
        self.near_weight: float = env._reward_near_weight
        self.distance_weight: float = env._reward_dist_weight
        self.control_weight: float = env._reward_control_weight
        self.tip, self.object, self.goal = (env.model.body(name).id for name in ("tips_arm", "object", "goal"))

    def start(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        cylinder = self._cylinder(rng)
        while np.linalg.norm(cylinder) <= 0.17:  # the goal is at the origin
            cylinder = self._cylinder(rng)
        qpos = self.init_qpos.copy()
        qpos[-4:-2], qpos[-2:] = cylinder, 0
        qvel = self.init_qvel + rng.uniform(-0.005, 0.005, len(self.init_qvel))
        qvel[-4:] = 0
        return qpos, qvel

    @staticmethod
    def _cylinder(rng: np.random.Generator) -> np.ndarray:
        return np.concatenate((rng.uniform(-0.3, 0, 1), rng.uniform(-0.2, 0.2, 1)))

    def observe(self, now: Quantities) -> Array:
        places = (now.xpos[:, body] for body in (self.tip, self.object, self.goal))
        return join((now.qpos[:, :7], now.qvel[:, :7], *places))

    def outcome(self, positions: Array, now: Quantities, actions: Array) -> StepOutcome:
        thing = now.xpos[:, self.object]
        near = -norms(thing - now.xpos[:, self.tip]) * self.near_weight
        distance = -norms(thing - now.xpos[:, self.goal]) * self.distance_weight
        return distance + -squares(actions) * self.control_weight + near, never(distance)
