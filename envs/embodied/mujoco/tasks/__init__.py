"""Observations, rewards, ends and starts of Gymnasium's MuJoCo environments, version 5, for many simulations at once.

There is one class per task. Settings are read from a built environment, so its constructor arguments apply. Not
covered: stepping the physics (`physics.py`), and the environment that combines both (`native.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_platform.envs.embodied.mujoco.tasks.locomotion import (
    Ant,
    HalfCheetah,
    Hopper,
    Humanoid,
    HumanoidStandup,
    Swimmer,
    Walker2d,
)
from rl_platform.envs.embodied.mujoco.tasks.manipulation import Pusher, Reacher
from rl_platform.envs.embodied.mujoco.tasks.mujoco_task import MujocoTask
from rl_platform.envs.embodied.mujoco.tasks.pendulums import InvertedDoublePendulum, InvertedPendulum

if TYPE_CHECKING:
    from rl_platform.envs.embodied.spaces import AnyEnv

TASKS: dict[str, type[MujocoTask]] = {
    "gymnasium.envs.mujoco.ant_v5.AntEnv": Ant,
    "gymnasium.envs.mujoco.half_cheetah_v5.HalfCheetahEnv": HalfCheetah,
    "gymnasium.envs.mujoco.hopper_v5.HopperEnv": Hopper,
    "gymnasium.envs.mujoco.humanoid_v5.HumanoidEnv": Humanoid,
    "gymnasium.envs.mujoco.humanoidstandup_v5.HumanoidStandupEnv": HumanoidStandup,
    "gymnasium.envs.mujoco.inverted_double_pendulum_v5.InvertedDoublePendulumEnv": InvertedDoublePendulum,
    "gymnasium.envs.mujoco.inverted_pendulum_v5.InvertedPendulumEnv": InvertedPendulum,
    "gymnasium.envs.mujoco.pusher_v5.PusherEnv": Pusher,
    "gymnasium.envs.mujoco.reacher_v5.ReacherEnv": Reacher,
    "gymnasium.envs.mujoco.swimmer_v5.SwimmerEnv": Swimmer,
    "gymnasium.envs.mujoco.walker2d_v5.Walker2dEnv": Walker2d,
}
"""By the full name of the environment's class, as a subclass may compute something else."""
_WRAPPERS = ("TimeLimit", "OrderEnforcing")  # wrappers that `NativeEnvs` implements


def native_task(env: AnyEnv) -> type[MujocoTask] | None:
    """Returns the task by which `NativeEnvs` can step `env` with its wrappers; None if only Gymnasium can."""
    if env.render_mode is not None:
        return None
    layer: AnyEnv = env
    while layer is not env.unwrapped:
        if type(layer).__module__ != "gymnasium.wrappers.common" or type(layer).__name__ not in _WRAPPERS:
            return None
        layer = layer.env
    kind = type(layer)
    task = TASKS.get(f"{kind.__module__}.{kind.__qualname__}")
    if task is not None:
        from rl_platform.envs.embodied.mujoco.physics import is_covered

        if not is_covered(layer.model):
            return None
    return task
