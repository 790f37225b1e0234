"""Tasks of robosuite 1.5 as Gymnasium environments, observed as states, by cameras, or both.

`env.id: rl_platform.envs.embodied.suites.robosuite:Task` with `env.kwargs: {task: Lift}`. It imports robosuite, which
usually needs an interpreter of its own (`env.python`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict

from rl_platform.envs.embodied.suites.egl import select_egl_device
from rl_platform.envs.embodied.suites.names import check_name
from rl_platform.envs.embodied.suites.observation import Observation

PARTS = ("robot0_proprio-state", "object-state")


class Task(gymnasium.Env[Observation, np.ndarray]):
    """One robosuite environment. `info["success"]`: its own check of success.

    task: a name of robosuite, as Lift, Door, Stack. robots: one name, or two for tasks of two arms. observations: names
    of its observables, joined in this order. cameras: names of cameras, each observed as an image [size,size,3] uint8;
    if `observations` are not empty, an observation is a Dict of the images and `state`. options: other arguments of
    `robosuite.make`, as control_freq. An episode has `horizon` steps. The sizes of objects are drawn once, from the
    option `seed`.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012 - as Gymnasium declares it
    draws_with_mujoco = True

    def __init__(
        self,
        task: str,
        robots: str | Sequence[str] = "Panda",
        horizon: int = 200,
        observations: Sequence[str] = PARTS,
        cameras: Sequence[str] = (),
        size: int = 84,
        render_mode: str | None = None,
        **options: object,
    ) -> None:
        logging.disable(logging.WARNING)  # notes on packages for other robots
        try:
            import robosuite
        finally:
            logging.disable(logging.NOTSET)
        logging.getLogger("robosuite_logs").setLevel(logging.ERROR)
        select_egl_device()
        check_name("task", task, robosuite.ALL_ENVIRONMENTS)
        for robot in robots if isinstance(robots, list | tuple) else (robots,):
            check_name("robots", robot, robosuite.robots.ROBOT_CLASS_MAPPING, robots)
        self.render_mode, self._parts, self.max_path_length = render_mode, tuple(observations), horizon
        self._cameras, self._size = tuple(cameras), size
        draws = render_mode is not None or bool(cameras)
        self._env = robosuite.make(
            task,
            robots=robots,
            horizon=horizon,
            has_renderer=False,
            has_offscreen_renderer=draws,
            use_camera_obs=False,
            **{"reward_shaping": True, "control_freq": 20, "hard_reset": False, "seed": 0} | options,
        )
        first = self._env.reset()
        for name in self._parts:
            check_name("observations", name, first, self._parts)
        for camera in cameras:
            check_name("cameras", camera, self._env.sim.model.camera_names, cameras)
        spaces = {camera: Box(0, 255, (size, size, 3), np.uint8) for camera in cameras}
        if self._parts:
            spaces["state"] = Box(-np.inf, np.inf, self._joined(first).shape, np.float32)
        self.observation_space = next(iter(spaces.values())) if len(spaces) == 1 else Dict(spaces)
        low, high = self._env.action_spec
        self.action_space = Box(low.astype(np.float32), high.astype(np.float32), dtype=np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, object] | None = None
    ) -> tuple[Observation, dict[str, object]]:
        super().reset(seed=seed)
        if seed is not None:
            self._env.rng = np.random.default_rng(seed)
            self._env.placement_initializer.rng = self._env.rng
        return self._observed(self._env.reset()), {}

    def step(self, action: np.ndarray) -> tuple[Observation, float, bool, bool, dict[str, object]]:
        observation, reward, done, _ = self._env.step(action)
        # robosuite ends an episode by its horizon only
        return (
            self._observed(observation),
            float(reward),
            False,
            bool(done),
            {"success": bool(self._env._check_success())},
        )

    def render(self) -> np.ndarray:
        return self._drawn("agentview", 320, 240)

    def close(self) -> None:
        self._env.close()

    def _observed(self, observation: dict[str, np.ndarray]) -> Observation:
        seen = {camera: self._drawn(camera, self._size, self._size) for camera in self._cameras}
        if self._parts:
            seen["state"] = self._joined(observation)
        return seen if isinstance(self.observation_space, Dict) else next(iter(seen.values()))

    def _drawn(self, camera: str, width: int, height: int) -> np.ndarray:
        pixels = self._env.sim.render(width=width, height=height, camera_name=camera)
        return np.ascontiguousarray(pixels[::-1])  # OpenGL's first row is the lowest one

    def _joined(self, observation: dict[str, np.ndarray]) -> np.ndarray:
        return np.concatenate([np.ravel(observation[name]) for name in self._parts]).astype(np.float32)
