"""Messages about cameras that a MuJoCo model does not have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_platform.errors import ConfigError, Problem
from rl_platform.suggest import did_you_mean, nearest

if TYPE_CHECKING:
    from rl_platform.envs.embodied.spaces import AnyEnv


def check_camera(env: AnyEnv, camera: object, key: str) -> None:
    """Raises ConfigError for an unknown camera of a MuJoCo environment, for which Gymnasium would use its default
    view. key: of the camera in the config."""
    model: Any = getattr(env.unwrapped, "model", None)
    if not isinstance(camera, str) or not hasattr(model, "ncam"):
        return
    names = [name for index in range(model.ncam) if (name := model.camera(index).name)]
    if camera not in names:
        message, allowed = "the model has no such camera", ", ".join(names) or "null: it has none"
        near = did_you_mean(camera, names)
        hint = f"{near} {key}={nearest(camera, names)}" if near else ""
        raise ConfigError([Problem(key, message, value=camera, allowed=allowed, hint=hint)])
