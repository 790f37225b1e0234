"""Tasks of LIBERO as Gymnasium environments, observed by cameras, with the robot's state if wanted.

`env.id: rl_platform.envs.embodied.suites.libero:LiberoTask` with `env.kwargs: {suite: libero_spatial, number: 0}`. It
imports libero, which usually needs an interpreter of its own (`env.python`). LIBERO's package of PyPI downloads meshes
and textures. It was tried with boxes in their place; tests use a stand-in of the package.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict

from rl_platform.envs.embodied.suites.egl import select_egl_device
from rl_platform.envs.embodied.suites.names import check_name
from rl_platform.envs.embodied.suites.observation import Observation
from rl_platform.envs.embodied.suites.packages import installed
from rl_platform.errors import ConfigError, Problem

DOWNLOAD = f"echo n | {sys.executable} -c 'from libero.libero import get_assets_path as a; a()'"
WAIT = np.array([0.0] * 6 + [-1.0])  # an action that moves nothing and opens the gripper


class LiberoTask(gymnasium.Env[Observation, np.ndarray]):
    """One environment of a task. The reward is 1 in the step of success, which ends the episode, else 0.

    suite: as libero_spatial. number: of the task in its suite, from 0. cameras: each observed as an image [size,size,3]
    uint8. state: position (3), axis times angle (3) and fingers (2) of the hand too, as published policies observe; an
    observation is then a Dict of the images and `state`. settle: steps that let objects fall into place, before the
    first observation. The seed of an episode chooses one of the task's published initial states and the place of
    furniture. The seeds of an evaluation of 50 episodes choose each of 50 states once; so do, for each of ten tasks,
    those of 500 episodes.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012 - as Gymnasium declares it
    draws_with_mujoco = True

    def __init__(
        self,
        suite: str = "libero_spatial",
        number: int = 0,
        cameras: Sequence[str] = ("agentview",),
        size: int = 256,
        state: bool = False,
        settle: int = 10,
        render_mode: str | None = None,
    ) -> None:
        try:
            with installed("libero", "env.id"):
                from libero.libero import benchmark
                from libero.libero.envs import OffScreenRenderEnv
        except EOFError as error:  # its first import prompts for the folder of data sets
            raise ConfigError(
                [Problem("env.id", "LIBERO has no file of its folders yet", hint=f"with network: `{DOWNLOAD}`")]
            ) from error
        select_egl_device()
        suites = benchmark.get_benchmark_dict()
        check_name("suite", suite, suites)
        tasks = suites[suite]()
        if not 0 <= number < tasks.n_tasks:
            allowed = f"0 to {tasks.n_tasks - 1}"
            raise ConfigError([Problem("env.kwargs.number", f"no task of {suite}", value=str(number), allowed=allowed)])
        self.instruction = tasks.get_task(number).language
        self.render_mode, self._cameras, self._state, self._settle = render_mode, tuple(cameras), state, settle
        self._starts = np.asarray(tasks.get_task_init_states(number))
        with _named_problems(self._cameras):
            self._env = OffScreenRenderEnv(
                bddl_file_name=tasks.get_task_bddl_file_path(number),
                camera_names=list(cameras),
                camera_heights=size,
                camera_widths=size,
                ignore_done=True,  # the run has the time limit
            )
        spaces = {camera: Box(0, 255, (size, size, 3), np.uint8) for camera in cameras}
        if state:
            spaces["state"] = Box(-np.inf, np.inf, (8,), np.float32)
        self.observation_space = next(iter(spaces.values())) if len(spaces) == 1 else Dict(spaces)
        self.action_space = Box(-1.0, 1.0, (7,))

    def reset(
        self, *, seed: int | None = None, options: dict[str, object] | None = None
    ) -> tuple[Observation, dict[str, object]]:
        super().reset(seed=seed)
        self._env.seed(int(self.np_random.integers(2**31)))  # else the places of furniture depend on earlier episodes
        self._env.reset()
        count = len(self._starts)
        # the second term lets every tenth seed, those of one of ten tasks, reach all states
        number = self.np_random.integers(count) if seed is None else (seed + seed // count) % count
        observed = self._env.set_init_state(self._starts[number])
        for _ in range(self._settle):
            observed = self._env.step(WAIT)[0]
        return self._observed(observed), {}

    def step(self, action: np.ndarray) -> tuple[Observation, float, bool, bool, dict[str, object]]:
        observed, _, _, _ = self._env.step(action)
        success = bool(self._env.check_success())
        return self._observed(observed), float(success), success, False, {"success": success}

    def render(self) -> np.ndarray:
        pixels = self._env.sim.render(width=320, height=240, camera_name="agentview")
        return np.ascontiguousarray(pixels[::-1])  # OpenGL's first row is the lowest one

    def close(self) -> None:
        self._env.close()

    def _observed(self, observed: dict[str, np.ndarray]) -> Observation:
        # both axes are turned, as in the images on which published policies were trained
        parts = {camera: np.ascontiguousarray(observed[f"{camera}_image"][::-1, ::-1]) for camera in self._cameras}
        if self._state:
            hand = observed["robot0_eef_pos"], axis_angle(observed["robot0_eef_quat"]), observed["robot0_gripper_qpos"]
            parts["state"] = np.concatenate(hand).astype(np.float32)
        return parts if isinstance(self.observation_space, Dict) else next(iter(parts.values()))


@contextmanager
def _named_problems(cameras: Sequence[str]) -> Iterator[None]:
    """Turns errors about missing meshes and unknown cameras into ConfigError."""
    try:
        yield
    except FileNotFoundError as error:
        hint = f"the meshes are downloaded once, with network: `{DOWNLOAD}`"
        raise ConfigError([Problem("env.id", f"LIBERO has no file {error.filename}", hint=hint)]) from error
    except ValueError as error:
        # as MuJoCo's bindings in robosuite say it
        if (
            match := re.search(r'No "camera" with name .* exists\. Available "camera" names = (.*)\.', str(error))
        ) is None:
            raise
        known = re.findall(r"[\w-]+", match[1])
        for camera in cameras:
            check_name("cameras", camera, known, cameras)
        raise


def axis_angle(quaternion: np.ndarray) -> np.ndarray:
    """Returns axis times angle [3], in [0, 2 pi], of a unit quaternion (x, y, z, w)."""
    real = np.clip(quaternion[3], -1.0, 1.0)
    # q = (axis * sin(angle / 2), cos(angle / 2))
    sine = np.sqrt(1.0 - real * real)
    rotation: np.ndarray = quaternion[:3] * (2.0 * np.arccos(real) / sine) if sine > 0.0 else np.zeros(3)
    return rotation
