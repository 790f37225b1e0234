"""Descriptions of environments, and their observation and action spaces.

Finds and builds Gymnasium environments, and rejects with a message those that the platform cannot train on. Not
covered: stepping them, see `block.py`. Nothing here imports torch, so worker processes start quickly.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from rl_platform.errors import ConfigError, Problem
from rl_platform.extras import required
from rl_platform.user_code import import_user_module, is_named

if TYPE_CHECKING:
    import gymnasium
    import numpy as np
    from gymnasium.envs.registration import EnvSpec

    from rl_platform.config.schema.env import Env

    AnyEnv = gymnasium.Env[Any, Any]

logger = logging.getLogger(__name__)

Dtype = Literal["float32", "uint8"]

# Environment variable with the deprecations that this run has logged, one per line. MuJoCo 4 reports them for each
# model file that it reads, and child processes read the same files and inherit the variable.
_SHOWN_DEPRECATIONS = "RL_PLATFORM_SHOWN_DEPRECATIONS"
_USES_MUJOCO = ("gymnasium.envs.mujoco", "gymnasium_robotics", "metaworld")  # what entry points begin with
OF_PROGRAM = "function/"  # what the ids of environments begin with that exist in the program of the user only
_warning_handler = threading.Lock()


@dataclass(frozen=True)
class ActionSpace:
    """Actions of the policy: `size` numbers ("continuous"), one of `size` choices ("discrete"), or several independent
    choices ("multi_discrete"), of which `choices` has the numbers of possibilities and `size` their sum."""

    kind: Literal["continuous", "discrete", "multi_discrete"]
    size: int
    choices: tuple[int, ...] = ()

    @property
    def counts(self) -> tuple[int, ...]:
        """The possibilities of each choice; of continuous actions none."""
        return self.choices or (() if self.kind == "continuous" else (self.size,))

    @property
    def components(self) -> int:
        """The number of log-probs of an action: of continuous actions one per number, else one per choice."""
        return len(self.counts) or self.size


@dataclass(frozen=True)
class PixelFormat:
    """How MuJoCo renders observations; camera None: the environment's default view."""

    width: int
    height: int
    camera: str | None = None
    frame_stack: int = 1
    grayscale: bool = False


@dataclass(frozen=True)
class EnvDescription:
    """The id of an environment (`module:id` imports the module that registers or makes it) and the arguments to build
    it.

    pixels: observations are rendered images. tasks: additions to `kwargs` for each of several tasks, which environments
    have in turn. backend: the physics engine of Gymnasium's MuJoCo tasks, or a class of the user that steps all
    environments (`user_backend.py`); `id` is then its name.
    """

    id: str
    kwargs: dict[str, object] = field(default_factory=dict)
    max_episode_steps: int | None = None
    pixels: PixelFormat | None = None
    tasks: tuple[dict[str, object], ...] = ()
    backend: str = "mujoco"

    @classmethod
    def of(cls, env: Env) -> EnvDescription:
        """Returns the description in the config's section `env`."""
        pixels = None if env.pixels is None else PixelFormat(**env.pixels.model_dump())
        tasks = tuple(task.kwargs for task in env.tasks)
        return cls(env.name, env.kwargs, env.max_episode_steps, pixels, tasks, env.backend)

    @property
    def own_backend(self) -> bool:
        """True if `backend` is a class of the user."""
        return is_named(self.backend)

    def of_task(self, number: int) -> EnvDescription:
        """Returns the description of environment `number` of the run."""
        if not self.tasks:
            return self
        return replace(self, kwargs=self.kwargs | self.tasks[number % len(self.tasks)], tasks=())


@dataclass(frozen=True)
class ObservationPart:
    """A part of an observation of several: `name` (keys and positions, joined by dots), its `shape` before it is
    flattened to `size` numbers. numbers: they are normalised; False: one-hot or binary choices."""

    name: str
    shape: tuple[int, ...]
    size: int
    numbers: bool


@dataclass(frozen=True)
class EnvSpaces:
    """Observation and action spaces of one environment.

    observation_shape: of the environment. Observations are passed flattened to `observation_size` numbers, images as
    uint8 and others as float32. Images are [height,width,channels] or a stack [S,height,width,channels].
    action_shape: of one action of the environment; action_low, action_high: flattened bounds, empty if discrete.
    action_start: the environment's number of choice 0, of several choices one number each if they are not all 0.
    action_dtype: of several choices. parts: of a Dict or Tuple, in the order in which they are flattened.
    """

    observation_shape: tuple[int, ...]
    action: ActionSpace
    action_shape: tuple[int, ...]
    action_low: tuple[float, ...] = ()
    action_high: tuple[float, ...] = ()
    action_start: int | tuple[int, ...] = 0
    observation_dtype: Dtype = "float32"
    action_dtype: str = "int64"
    parts: tuple[ObservationPart, ...] = ()

    @property
    def images(self) -> bool:
        return self.observation_dtype == "uint8"

    @property
    def normalized(self) -> tuple[bool, ...]:
        """Per number of an observation: whether it is normalised. Empty: all are."""
        each = tuple(part.numbers for part in self.parts for _ in range(part.size))
        return () if all(each) else each

    def environment_choices(self, chosen: np.ndarray) -> np.ndarray:
        """Choices [N] or [N,D] of the policy -> actions [N,...] of the environment, in its shape, type and numbers."""
        import numpy as np

        shifted = (chosen + np.asarray(self.action_start)).astype(self.action_dtype)
        return shifted.reshape(-1, *self.action_shape)

    @property
    def policy_action_shape(self) -> tuple[int, ...]:
        """Of an action as the policy chooses it: numbers [A], one choice [], or several choices [D]."""
        return () if self.action.kind == "discrete" else (self.action.components,)

    @property
    def policy_action_dtype(self) -> type[np.float32 | np.int64]:
        """Of an action as the policy chooses it."""
        import numpy as np

        return np.float32 if self.action.kind == "continuous" else np.int64

    @property
    def observation_size(self) -> int:
        size = 1
        for length in self.observation_shape:
            size *= length
        return size


@dataclass(frozen=True)
class EnvSetup:
    """How every process builds its environments of a `VectorEnv`.

    numbers: the numbers of the environments in the run, which determine their tasks. restarts: the most replacements of
    environments. spec: None of a backend of the user.
    """

    description: EnvDescription
    spec: EnvSpec | None
    spaces: EnvSpaces
    numbers: Sequence[int]
    render_mode: str | None = None
    restarts: int = 0

    def make(self, index: int) -> AnyEnv:
        """Builds the environment at this index of `numbers`."""
        return make_env(self.description.of_task(self.numbers[index]), self.spec, self.render_mode)


def find_spec(description: EnvDescription) -> EnvSpec:
    """Returns the registered specification, or one of a function or class of the module that makes the environment.

    Raises ConfigError, with similar ids, for an unknown id or module.
    """
    import gymnasium
    from gymnasium.envs.registration import EnvSpec

    module, _, name = description.id.rpartition(":")
    try:
        if module:
            found = getattr(import_user_module(module), name, None)
            if name not in gymnasium.registry and callable(found):
                return EnvSpec(name, found)
        return gymnasium.spec(name)
    except ImportError as error:
        hint = f"install the package of {module}, or start where it can be imported"
        problem = Problem("env.id", f"its module cannot be imported ({error})", value=repr(description.id), hint=hint)
        raise ConfigError([problem]) from error
    except gymnasium.error.Error as error:
        near = _similar_ids(name, list(gymnasium.registry))
        register = f"write MODULE:{name} with the module whose import registers it"
        if name.startswith(OF_PROGRAM):
            register = (
                "a program made it by a function: pass that as env=... to rl.evaluate; rl.load_policy needs model/, "
                "which a finished run has"
            )
        hint = f"did you mean {', '.join(near)}?" if near else register
        problem = Problem("env.id", f"no such environment ({error})", value=repr(description.id), hint=hint)
        raise ConfigError([problem]) from error


def _similar_ids(name: str, known: Sequence[str]) -> list[str]:
    """At most three registered ids whose names are close in spelling, whatever their namespaces and versions."""
    by_name: dict[str, list[str]] = {}
    for each in known:
        by_name.setdefault(_bare(each), []).append(each)
    close = difflib.get_close_matches(_bare(name), by_name, n=3, cutoff=0.7)
    return [each for bare in close for each in difflib.get_close_matches(name, by_name[bare], n=3, cutoff=0)][:3]


def _bare(env_id: str) -> str:
    return re.sub(r"-v\d+$", "", env_id.rpartition("/")[2]).lower()


def make_env(description: EnvDescription, spec: EnvSpec | None = None, render_mode: str | None = None) -> AnyEnv:
    """Builds one environment, with the first of several tasks; observations of several parts are flattened.

    Raises ConfigError for an unknown id or arguments that the environment does not accept.
    """
    import gymnasium

    from rl_platform.envs.embodied.adapter import flattened

    spec, description = spec or find_spec(description), description.of_task(0)
    kwargs = description.kwargs if render_mode is None else {**description.kwargs, "render_mode": render_mode}
    if description.pixels is not None:
        with required("rl_platform.envs.embodied.pictures", "env.pixels"):
            from rl_platform.envs.embodied.pictures.pixels import PixelObservation, drawing_kwargs
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
    if description.pixels is not None:
        return PixelObservation(env, description.pixels)
    if render_mode is not None:
        from rl_platform.envs.embodied.pictures.drawing import draw_quickly, follow_robot

        draw_quickly(env)
        follow_robot(env)
    return flattened(env)


def read_spaces(env: AnyEnv, env_id: str, key: str = "env.id") -> EnvSpaces:
    """Returns the spaces of an environment. Raises ConfigError that lists all spaces no policy can use.

    key: of the config, for messages.
    """
    import numpy as np
    from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
    from gymnasium.spaces.utils import flatdim

    from rl_platform.envs.embodied.adapter import FlatObservations, leaves

    observation, action = env.observation_space, env.action_space
    problems = []
    if not isinstance(observation, Box):
        hint = "wrap it with gymnasium.wrappers.FlattenObservation and register the wrapped environment"
        problems.append(
            _unusable(
                key,
                f"observation space of {env_id}",
                observation,
                "Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of them",
                hint,
            )
        )
    choices = isinstance(action, Discrete | MultiDiscrete | MultiBinary)
    if not choices and not (isinstance(action, Box) and np.issubdtype(action.dtype, np.floating)):
        hint = "wrap it so that an action is a vector of choices or of floats"
        problems.append(
            _unusable(
                key, f"action space of {env_id}", action, "Discrete, MultiDiscrete, MultiBinary, Box of floats", hint
            )
        )
    several = list(leaves(env.env.observation_space)) if isinstance(env, FlatObservations) else []
    if images := [name for name, space in several if _is_image(space)]:
        message = f"observations of {env_id} have images among other parts: {', '.join(images)}"
        hint = "wrap it so that it observes the image alone or the other parts alone"
        problems.append(Problem("env.id", message, value=str(env.env.observation_space), hint=hint))
    if problems:
        raise ConfigError(problems)
    assert isinstance(observation, Box)
    shape = observation.shape
    dtype: Dtype = "uint8" if _is_image(observation) else "float32"
    parts = tuple(
        ObservationPart(name, space.shape or (), flatdim(space), isinstance(space, Box)) for name, space in several
    )
    if isinstance(action, Discrete):
        start = int(action.start)
        return EnvSpaces(shape, ActionSpace("discrete", int(action.n)), (), (), (), start, dtype, parts=parts)
    if isinstance(action, MultiDiscrete | MultiBinary):
        binary = isinstance(action, MultiBinary)
        counts, first = (np.full(action.shape, 2), np.zeros(1)) if binary else (action.nvec, action.start)
        kind = ActionSpace("multi_discrete", int(counts.sum()), tuple(counts.reshape(-1).tolist()))
        starts, action_dtype = tuple(first.reshape(-1).tolist()) if first.any() else 0, np.dtype(action.dtype).name
        return EnvSpaces(shape, kind, action.shape, (), (), starts, dtype, action_dtype, parts)
    size = int(np.prod(action.shape))
    low, high = (tuple(map(float, bound.reshape(-1))) for bound in (action.low, action.high))
    return EnvSpaces(shape, ActionSpace("continuous", size), action.shape, low, high, 0, dtype, parts=parts)


def _is_image(space: object) -> bool:
    from gymnasium.spaces import Box

    return isinstance(space, Box) and space.dtype == "uint8" and len(space.shape) in (3, 4)


def time_limit(env: AnyEnv) -> int | None:
    """Returns the number of steps after which a wrapper truncates an episode; None if no wrapper does."""
    layer: Any = env
    while True:
        if type(layer).__name__ == "TimeLimit":
            return int(layer._max_episode_steps)
        if not hasattr(layer, "env"):
            return None
        layer = layer.env


def check_time_limit(env: AnyEnv, env_id: str) -> None:
    """Raises ConfigError for an environment without a time limit, in which an evaluation episode might never end."""
    own_limit = getattr(env.unwrapped, "max_path_length", None)  # Meta-World truncates its episodes itself
    if time_limit(env) is None and own_limit is None:
        message = f"{env_id} has no time limit, so that an evaluation episode may never end"
        hint = "set it, or register the environment with max_episode_steps"
        raise ConfigError([Problem("env.max_episode_steps", message, value="null", allowed="at least 1", hint=hint)])


def _unusable(key: str, what: str, space: object, allowed: str, hint: str) -> Problem:
    return Problem(key, f"{what} cannot be used", value=str(space), allowed=allowed, hint=hint)


@contextlib.contextmanager
def _deprecations_once(spec: EnvSpec) -> Iterator[None]:
    """Logs each deprecation that MuJoCo reports once per run, and every other warning of MuJoCo."""
    entry_point = spec.entry_point
    origin = entry_point if isinstance(entry_point, str) else getattr(entry_point, "__module__", "")
    if "mujoco" not in sys.modules and not str(origin).startswith(_USES_MUJOCO):
        yield
        return
    try:
        import mujoco
    except ImportError:  # the error is reported when the environment is built
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
