"""InvertedPendulum and InvertedDoublePendulum: a cart that keeps a pole up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_platform.envs.embodied.arrays import doubles, module_of
from rl_platform.envs.embodied.mujoco.row_operations import join
from rl_platform.envs.embodied.mujoco.tasks.mujoco_task import NoisyStart, Quantities, StepOutcome

if TYPE_CHECKING:
    from gymnasium.envs.mujoco import MujocoEnv

    from rl_platform.envs.embodied.arrays import Array


class InvertedPendulum(NoisyStart):
    """One point for every step within 0.2 rad of upright."""

    def observe(self, now: Quantities) -> Array:
        return join((now.qpos, now.qvel))

    def outcome(self, positions: Array, now: Quantities, actions: Array) -> StepOutcome:
        isfinite = module_of(now.qpos).isfinite
        finite = isfinite(now.qpos).all(axis=1) & isfinite(now.qvel).all(axis=1)
        up = finite & (abs(now.qpos[:, 1]) <= 0.2)
        return doubles(up), ~up


class InvertedDoublePendulum(NoisyStart):
    """Healthy reward minus penalties for the tip's position and the poles' speeds; ends when the tip is below 1 m."""

    fields = ("site_xpos", "qfrc_constraint")
    normal_velocities = True

    def __init__(self, env: MujocoEnv) -> None:
        super().__init__(env)
        self.healthy_reward: float = env._healthy_reward

    def observe(self, now: Quantities) -> Array:
        angles, module = now.qpos[:, 1:], module_of(now.qpos)
        force = now.qfrc_constraint[:, :1].clip(-10, 10)
        return join((now.qpos[:, :1], module.sin(angles), module.cos(angles), now.qvel.clip(-10, 10), force))

    def outcome(self, positions: Array, now: Quantities, actions: Array) -> StepOutcome:
        x, y = now.site_xpos[:, 0, 0], now.site_xpos[:, 0, 2]
        first, second = now.qvel[:, 1], now.qvel[:, 2]
        place = 0.01 * x**2 + (y - 2) ** 2
        motion = 0.001 * first**2 + 0.005 * second**2
        fallen = y <= 1
        return self.healthy_reward * doubles(~fallen) - place - motion, fallen
