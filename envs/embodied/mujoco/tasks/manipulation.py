"""Reacher and Pusher: an arm that brings its tip to a target, or an object to a goal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rl_platform.envs.embodied.mujoco.tasks.mujoco_task import MujocoTask, Quantities, StepOutcome, join, never, squares

if TYPE_CHECKING:
    from gymnasium.envs.mujoco import MujocoEnv


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

    def observe(self, now: Quantities) -> np.ndarray:
        angles = now.qpos[:, :2]
        return join((np.cos(angles), np.sin(angles), now.qpos[:, 2:], now.qvel[:, :2], self._gap(now)[:, :2]))

    def outcome(self, positions: np.ndarray, now: Quantities, actions: np.ndarray) -> StepOutcome:
        distance = -np.linalg.norm(self._gap(now), axis=1) * self.distance_weight
        return distance + -squares(actions) * self.control_weight, never(len(actions))

    def _gap(self, now: Quantities) -> np.ndarray:
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

    def observe(self, now: Quantities) -> np.ndarray:
        places = (now.xpos[:, body] for body in (self.tip, self.object, self.goal))
        return join((now.qpos[:, :7], now.qvel[:, :7], *places))

    def outcome(self, positions: np.ndarray, now: Quantities, actions: np.ndarray) -> StepOutcome:
        thing = now.xpos[:, self.object]
        near = -np.linalg.norm(thing - now.xpos[:, self.tip], axis=1) * self.near_weight
        distance = -np.linalg.norm(thing - now.xpos[:, self.goal], axis=1) * self.distance_weight
        return distance + -squares(actions) * self.control_weight + near, never(len(actions))
