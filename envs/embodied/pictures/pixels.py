"""Replaces observations by images that MuJoCo renders. Not covered: graphics libraries, see `drawing.py`."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, cast

import gymnasium
import mujoco
import numpy as np
from gymnasium.envs.registration import EnvSpec, load_env_creator

from rl_platform.envs.embodied.build_problems.cameras import check_camera
from rl_platform.envs.embodied.descriptions import EnvDescription, PixelFormat
from rl_platform.errors import ConfigError, Problem

if TYPE_CHECKING:
    from gymnasium.envs.mujoco import MujocoEnv

    from rl_platform.envs.embodied.spaces import AnyEnv

# weights of red, green and blue in luma: ITU-R BT.601
_LUMA = np.array([0.299, 0.587, 0.114], np.float32)
# Resolution of the shadow map. MuJoCo's default of 4,096 costs 75 MB per environment and most of the time of software
# rendering, and makes no visible difference in small images.
_SHADOW_SIZE = 512
_TAKEN = ("render_mode", "width", "height", "camera_name", "camera_id")


class PixelObservation(gymnasium.ObservationWrapper[np.ndarray, object, object]):
    """Observes the latest `frame_stack` images, oldest first, concatenated in the channels: [height,width,C] uint8.

    At the start of an episode all of them are the first image.
    """

    def __init__(self, env: AnyEnv, pixels: PixelFormat) -> None:
        """Raises ConfigError for a camera that the model does not have."""
        super().__init__(env)
        check_camera(env, pixels.camera, "env.pixels.camera")
        inner = cast("MujocoEnv", env.unwrapped)
        visual: mujoco.MjVisual = inner.model.vis
        visual.quality.shadowsize = min(visual.quality.shadowsize, _SHADOW_SIZE)
        visual.global_.offwidth, visual.global_.offheight = pixels.width, pixels.height
        self._channels = 1 if pixels.grayscale else 3
        shape = (pixels.height, pixels.width, self._channels * pixels.frame_stack)
        self.observation_space = gymnasium.spaces.Box(0, 255, shape, np.uint8)
        self._pictures = np.zeros(shape, np.uint8)

    def reset(
        self, *, seed: int | None = None, options: dict[str, object] | None = None
    ) -> tuple[np.ndarray, dict[str, object]]:
        _, info = self.env.reset(seed=seed, options=options)
        self._pictures[:] = np.tile(self._draw(), self._pictures.shape[2] // self._channels)
        return self._pictures.copy(), info

    def observation(self, observation: object) -> np.ndarray:
        self._pictures[:, :, : -self._channels] = self._pictures[:, :, self._channels :]
        self._pictures[:, :, -self._channels :] = self._draw()
        return self._pictures.copy()

    def _draw(self) -> np.ndarray:
        """Returns the image [height,width,channels] uint8."""
        if cast("MujocoEnv", self.env.unwrapped).mujoco_renderer.viewer is None:
            self._aim()
        picture = np.asarray(self.env.render())
        return picture if self._channels == 3 else np.rint(picture @ _LUMA).astype(np.uint8)[:, :, None]

    def _aim(self) -> None:
        """Renders one image at the home positions of the bodies.

        Gymnasium points the default view at the bodies of the first image, so this gives all environments, also those
        of a resumed run, the same view.
        """
        inner = cast("MujocoEnv", self.env.unwrapped)
        before = copy.copy(inner.data)
        mujoco.mj_resetData(inner.model, inner.data)
        mujoco.mj_forward(inner.model, inner.data)
        self.env.render()
        mujoco.mj_copyData(inner.data, inner.model, before)


def drawing_kwargs(description: EnvDescription, spec: EnvSpec) -> dict[str, object]:
    """Returns arguments of gymnasium.make for these pixels. Raises ConfigError if MuJoCo does not render `spec`."""
    pixels = description.pixels
    assert pixels is not None
    if not _drawn_by_mujoco(spec):
        message = f"{spec.id} is none of Gymnasium's MuJoCo tasks"
        hint = "an environment that observes images itself needs no env.pixels"
        raise ConfigError([Problem("env.pixels", message, allowed="Gymnasium's MuJoCo environments", hint=hint)])
    if taken := [name for name in _TAKEN if name in description.kwargs]:
        message = f"{', '.join(taken)}: env.pixels says it"
        raise ConfigError([Problem("env.kwargs", message, hint="set width, height and camera under env.pixels")])
    camera = {} if pixels.camera is None else {"camera_name": pixels.camera}
    return {"render_mode": "rgb_array", "width": pixels.width, "height": pixels.height, **camera}


def _drawn_by_mujoco(spec: EnvSpec) -> bool:
    """Returns whether the environment's class inherits from a MuJoCo environment of Gymnasium or another package."""
    creator = load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point
    bases: tuple[type, ...] = creator.__mro__ if isinstance(creator, type) else ()
    return any("mujoco" in f"{base.__module__}.{base.__name__}".lower() for base in bases)
