"""Facts of an environment that a run needs before it starts: its spaces, whether an episode ends, how it draws
itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING

from rl_platform.envs.embodied.descriptions import PROBLEMS, EnvDescription, check_time_limit, closing_env, make_env
from rl_platform.envs.embodied.spaces import EnvSpaces, read_spaces
from rl_platform.envs.embodied.stepping import inspect_external, user_spaces, warp_problem
from rl_platform.errors import ConfigError
from rl_platform.extras import find

if TYPE_CHECKING:
    from rl_platform.envs.embodied.spaces import AnyEnv

USUAL_RATE = 30


@dataclass(frozen=True)
class EnvFacts:
    """render_rate: steps per second of the simulated time. uses_mujoco: MuJoCo draws it."""

    spaces: EnvSpaces
    render_modes: tuple[str, ...] = ()
    render_rate: int = USUAL_RATE
    uses_mujoco: bool = False


def inspect_env(description: EnvDescription, *, limited: bool = True) -> EnvFacts:
    """Builds the environment once, in its interpreter, or reads the facts of its servers. Raises ConfigError for one
    that the platform cannot train on.

    limited: an environment without a time limit is one of those, if it is of this interpreter.
    """
    if description.external:
        return inspect_external(description, limited=limited)
    if description.own_backend:
        return EnvFacts(user_spaces(description, tried=True))
    with closing_env(make_env(description), description.id) as env:
        if description.backend == "mujoco_warp" and (problem := warp_problem(env)) is not None:
            raise ConfigError([problem])
        check_camera: Callable[[AnyEnv, object, str], None] = find(PROBLEMS, "cameras.check_camera", lambda *_: None)
        check_camera(env, description.of_task(0).kwargs.get("camera_name"), "env.kwargs.camera_name")
        spaces = read_spaces(env, description.id)
        if limited:
            check_time_limit(env, description.id)
        modes, rate = rendering(env)
        uses_mujoco = hasattr(env.unwrapped, "mujoco_renderer") or getattr(env.unwrapped, "draws_with_mujoco", False)
        return EnvFacts(spaces, modes, rate, uses_mujoco)


def rendering(env: AnyEnv) -> tuple[tuple[str, ...], int]:
    """Returns the render modes of an environment and its steps per second, from its metadata; the usual values for
    those that are missing or of another type."""
    metadata = env.metadata if isinstance(env.metadata, Mapping) else {}
    modes, rate = metadata.get("render_modes"), metadata.get("render_fps")
    number = float(rate) if isinstance(rate, Real) else math.nan
    steps = int(number) if 1 <= number < math.inf else USUAL_RATE
    return tuple(modes) if isinstance(modes, list | tuple | set) else (), steps
