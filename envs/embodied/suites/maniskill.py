"""Tasks of ManiSkill 3 as Gymnasium environments, simulated on the CPU and observed as states, by cameras, or both.

`env.id: rl_platform.envs.embodied.suites.maniskill:ManiSkillTask` with `env.kwargs: {task: PickCube-v1}`. It
imports mani_skill, which usually needs an interpreter of its own (`env.python`). Not covered: ManiSkill's batched
simulation on a GPU.
"""

from __future__ import annotations

import logging
from functools import cache

import gymnasium
import numpy as np

from rl_platform.envs.embodied.suites.names import check_name
from rl_platform.envs.embodied.suites.observation import Observation
from rl_platform.envs.embodied.suites.packages import installed
from rl_platform.errors import ConfigError, Problem

OF_VULKAN = ("vk::", "Vulkan", "failed to find device")  # parts of the messages without a device
VULKAN = "ManiSkill needs Vulkan, for states too; docs/maniskill.md has the setup of Mesa's lavapipe for a CPU"


class ManiSkillTask(gymnasium.Env[Observation, np.ndarray]):
    """One environment of ManiSkill. `info["success"]` is ManiSkill's check of success.

    task: its id. observations: `state`; `rgb`: images [size,size,3] uint8 and the state of the robot; `state+rgb`: the
    images and the whole state, for experts that are recorded. options: other arguments of the task, as control_mode or
    robot_uids. An episode has as many steps as ManiSkill registers for it.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012 - as Gymnasium declares it

    def __init__(
        self, task: str, observations: str = "state", size: int = 128, render_mode: str | None = None, **options: object
    ) -> None:
        check_name("observations", observations, ("state", "rgb", "state+rgb"))
        with installed("maniskill", "env.id"):
            import mani_skill.envs  # noqa: F401 - registers the tasks
            import torch
            from mani_skill.utils.registration import REGISTERED_ENVS
            from mani_skill.utils.wrappers.flatten import FlattenRGBDObservationWrapper
            from mani_skill.utils.wrappers.gymnasium import CPUGymWrapper
        check_name("task", task, REGISTERED_ENVS)
        torch.set_num_threads(1)
        logging.getLogger("mani_skill").setLevel(logging.ERROR)  # it warns of a missing GPU
        defaults: dict[str, object] = {"num_envs": 1, "sim_backend": "physx_cpu", "reward_mode": "normalized_dense"}
        if not torch.cuda.is_available():  # Mesa's lavapipe, the same device for each environment of the process
            _accept_pci()
            defaults["render_backend"] = "pci:0"
        images = observations != "state"
        if images:
            defaults["sensor_configs"] = {"width": size, "height": size}
        self.render_mode, self.max_path_length = render_mode, REGISTERED_ENVS[task].max_episode_steps
        mode = observations.replace("state+", "state_dict+")
        try:
            env = gymnasium.make(task, obs_mode=mode, render_mode=render_mode, **defaults | options)
        except RuntimeError as error:
            if not any(sign in str(error) for sign in OF_VULKAN):
                raise
            problem = Problem("env.id", f"{task} cannot be built: {error}", value=task, hint=VULKAN)
            raise ConfigError([problem]) from error
        if images:
            env = FlattenRGBDObservationWrapper(env, rgb=True, depth=False, state=True)
        self._env = CPUGymWrapper(env)
        self.observation_space, self.action_space = self._env.observation_space, self._env.action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, object] | None = None
    ) -> tuple[Observation, dict[str, object]]:
        super().reset(seed=seed)
        # without a seed ManiSkill would begin an episode that no seed of the run determines
        observation, _ = self._env.reset(seed=int(self.np_random.integers(2**31)) if seed is None else seed)
        return observation, {}

    def step(self, action: np.ndarray) -> tuple[Observation, float, bool, bool, dict[str, object]]:
        observation, reward, terminated, truncated, info = self._env.step(action)
        success: dict[str, object] = {"success": bool(info["success"])} if "success" in info else {}
        return observation, float(reward), bool(terminated), bool(truncated), success

    def render(self) -> np.ndarray:
        pixels: np.ndarray = self._env.render()
        return pixels

    def close(self) -> None:
        self._env.close()


@cache
def _accept_pci() -> None:
    """Lets ManiSkill 3.0 render on the first Vulkan device: for a PCI device its parser does not return a pair."""
    from mani_skill.envs.utils.system import backend

    parse = backend.parse_backend_device_id
    backend.parse_backend_device_id = lambda name: (name, None) if name.startswith("pci:") else parse(name)
