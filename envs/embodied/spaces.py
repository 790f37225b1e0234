"""What a simulation looks like from outside: which environment, the shape of its observations, the kind of its actions.

Finds and builds Gymnasium environments and rejects, with a message for the user, what the platform cannot train on.
Stepping them is `block.py`; this module imports no torch, so worker processes start quickly.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from rl_platform.errors import ConfigError, Problem
from rl_platform.user_function import import_user_module

if TYPE_CHECKING:
    import gymnasium
    from gymnasium.envs.registration import EnvSpec

    from rl_platform.config.schema.env import Env

logger = logging.getLogger(__name__)

Dtype = Literal["float32", "uint8"]

# Deprecations that this run has shown, a line each. MuJoCo 4 names them whenever it reads a model file, and every
# process of a run reads the same few. In the environment, so that the processes that this one starts know of them too.
_SHOWN_DEPRECATIONS = "RL_PLATFORM_SHOWN_DEPRECATIONS"
_USES_MUJOCO = ("gymnasium.envs.mujoco", "gymnasium_robotics", "metaworld")  # what entry points begin with
_warning_handler = threading.Lock()


@dataclass(frozen=True)
class ActionSpace:
    """Actions as the policy sees them: `size` numbers ("continuous") or one of `size` choices ("discrete")."""

    kind: Literal["continuous", "discrete"]
    size: int


@dataclass(frozen=True)
class Pixels:
    """How a MuJoCo environment is drawn to be observed; camera None: its usual view."""

    width: int
    height: int
    camera: str | None = None
    frame_stack: int = 1
    grayscale: bool = False


@dataclass(frozen=True)
class EnvDescription:
    """Which environment: a registered id (`module:id` imports a module that registers it) and how to build it. With
    `pixels` it observes pictures. tasks: of several tasks, what each adds to `kwargs`; environments take turns.
    backend: what steps the physics of Gymnasium's MuJoCo tasks."""

    id: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    max_episode_steps: int | None = None
    pixels: Pixels | None = None
    tasks: tuple[dict[str, Any], ...] = ()
    backend: str = "mujoco"

    @classmethod
    def of(cls, env: Env) -> EnvDescription:
        """What the config's section `env` asks for."""
        pixels = None if env.pixels is None else Pixels(**env.pixels.model_dump())
        tasks = tuple(task.kwargs for task in env.tasks)
        return cls(env.id, env.kwargs, env.max_episode_steps, pixels, tasks, env.backend)

    def of_task(self, number: int) -> EnvDescription:
        """What environment `number` of the run is."""
        if not self.tasks:
            return self
        return replace(self, kwargs=self.kwargs | self.tasks[number % len(self.tasks)], tasks=())


@dataclass(frozen=True)
class EnvSpaces:
    """Observation and action spaces of one environment.

    observation_shape: as the environment gives it; observations travel flattened to `observation_size` numbers, images
    as uint8 and the rest as float32. Images have height, width and channels, or a stack of pictures in front of them.
    action_shape: of one action of the environment; action_low, action_high: bounds, flattened, empty when discrete.
    """

    observation_shape: tuple[int, ...]
    action: ActionSpace
    action_shape: tuple[int, ...]
    action_low: tuple[float, ...] = ()
    action_high: tuple[float, ...] = ()
    action_start: int = 0
    observation_dtype: Dtype = "float32"

    @property
    def images(self) -> bool:
        return self.observation_dtype == "uint8"

    @property
    def observation_size(self) -> int:
        size = 1
        for length in self.observation_shape:
            size *= length
        return size


def find_spec(description: EnvDescription) -> EnvSpec:
    """The registered specification. Raises ConfigError with near names for an unknown id, or for a missing module."""
    import gymnasium

    module, _, name = description.id.rpartition(":")
    try:
        if module:
            import_user_module(module)
        return gymnasium.spec(name)
    except ImportError as error:
        hint = f"install what brings {module}, or start where it can be imported"
        problem = Problem("env.id", f"its module cannot be imported ({error})", value=repr(description.id), hint=hint)
        raise ConfigError([problem]) from error
    except gymnasium.error.Error as error:
        near = difflib.get_close_matches(name, list(gymnasium.registry), n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(near)}?" if near else "write module:id if a module of yours registers it"
        problem = Problem("env.id", f"no such environment ({error})", value=repr(description.id), hint=hint)
        raise ConfigError([problem]) from error


def make_env(
    description: EnvDescription, spec: EnvSpec | None = None, render_mode: str | None = None
) -> gymnasium.Env[Any, Any]:
    """Build one environment, of several tasks the first; observations of several parts are joined.

    Raises ConfigError for an unknown id or arguments that the environment does not take.
    """
    import gymnasium

    from rl_platform.envs.embodied.adapter import flattened

    spec, description = spec or find_spec(description), description.of_task(0)
    kwargs = description.kwargs if render_mode is None else {**description.kwargs, "render_mode": render_mode}
    if description.pixels is not None:
        from rl_platform.envs.embodied.pixels import PixelObservation, drawing_kwargs

        kwargs = {**kwargs, **drawing_kwargs(description, spec)}
    try:
        with _deprecations_once(spec):
            env = gymnasium.make(
                spec, max_episode_steps=description.max_episode_steps, disable_env_checker=True, **kwargs
            )
    except gymnasium.error.DependencyNotInstalled as error:
        problem = Problem("env.id", "a package is missing", value=repr(description.id), hint=str(error))
        raise ConfigError([problem]) from error
    except Exception as error:
        message = f"{spec.id} cannot be built ({type(error).__name__}: {error})"
        hint = "check env.kwargs against the environment's documentation"
        raise ConfigError([Problem("env.kwargs", message, value=repr(kwargs), hint=hint)]) from error
    return flattened(env) if description.pixels is None else PixelObservation(env, description.pixels)


def read_spaces(env: gymnasium.Env[Any, Any], env_id: str) -> EnvSpaces:
    """Spaces of a built environment. Raises ConfigError for those that no policy here can use, all at once."""
    import numpy as np
    from gymnasium.spaces import Box, Discrete

    observation, action = env.observation_space, env.action_space
    problems = []
    if not isinstance(observation, Box):
        hint = "wrap it with gymnasium.wrappers.FlattenObservation and register the wrapped environment"
        problems.append(_unusable("observation", env_id, observation, "Box, Dict and Tuple of Boxes", hint))
    if not isinstance(action, Discrete) and not (isinstance(action, Box) and np.issubdtype(action.dtype, np.floating)):
        hint = "wrap it so that an action is one choice or a vector of floats"
        problems.append(_unusable("action", env_id, action, "Discrete, Box of floats", hint))
    if problems:
        raise ConfigError(problems)
    assert isinstance(observation, Box)
    shape = observation.shape
    dtype: Dtype = "uint8" if observation.dtype == np.uint8 and len(shape) in (3, 4) else "float32"
    if isinstance(action, Discrete):
        start = int(action.start)
        return EnvSpaces(shape, ActionSpace("discrete", int(action.n)), (), (), (), start, dtype)
    size = int(np.prod(action.shape))
    low, high = (tuple(map(float, bound.reshape(-1))) for bound in (action.low, action.high))
    return EnvSpaces(shape, ActionSpace("continuous", size), action.shape, low, high, 0, dtype)


def time_limit(env: gymnasium.Env[Any, Any]) -> int | None:
    """Steps after which a wrapper truncates an episode; None: no wrapper does."""
    layer: Any = env
    while True:
        if type(layer).__name__ == "TimeLimit":
            return int(layer._max_episode_steps)
        if not hasattr(layer, "env"):
            return None
        layer = layer.env


def check_time_limit(env: gymnasium.Env[Any, Any], env_id: str) -> None:
    """Raises ConfigError for an environment without a time limit: an evaluation runs each episode to its end, and a
    policy that never gets there would keep it for ever."""
    own_limit = getattr(env.unwrapped, "max_path_length", None)  # Meta-World truncates its episodes itself
    if time_limit(env) is None and own_limit is None:
        message = f"{env_id} has no time limit, so that an evaluation episode may never end"
        hint = "set it, or register the environment with max_episode_steps"
        raise ConfigError([Problem("env.max_episode_steps", message, value="null", allowed="at least 1", hint=hint)])


def _unusable(what: str, env_id: str, space: object, allowed: str, hint: str) -> Problem:
    return Problem("env.id", f"{what} space of {env_id} cannot be used", value=str(space), allowed=allowed, hint=hint)


@contextlib.contextmanager
def _deprecations_once(spec: EnvSpec) -> Iterator[None]:
    """Show each deprecation that MuJoCo finds in a model file once per run; its other warnings are passed on."""
    entry_point = spec.entry_point
    origin = entry_point if isinstance(entry_point, str) else getattr(entry_point, "__module__", "")
    if "mujoco" not in sys.modules and not str(origin).startswith(_USES_MUJOCO):
        yield
        return
    try:
        import mujoco
    except ImportError:  # building the environment reports it
        yield
        return

    def handle(message: str) -> None:
        line = " ".join(message.split())
        shown = os.environ.get(_SHOWN_DEPRECATIONS, "").splitlines()
        if line in shown:
            return
        if "deprecated" in line:
            os.environ[_SHOWN_DEPRECATIONS] = "\n".join([*shown, line])
        logger.warning("MuJoCo, model of %s: %s", spec.id, line)

    with _warning_handler:
        previous = mujoco.get_mju_user_warning()
        mujoco.set_mju_user_warning(handle)
        try:
            yield
        finally:
            mujoco.set_mju_user_warning(previous)
