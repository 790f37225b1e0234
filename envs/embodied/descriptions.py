"""Descriptions of Gymnasium environments: finds and builds the environments of a config.

Not covered: their observation and action spaces (`spaces.py`), and stepping them (`block.py`). Nothing here imports
torch, so worker processes start quickly.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

from rl_platform.envs.embodied.spaces import EnvSpaces
from rl_platform.envs.embodied.stepping import deprecations_once
from rl_platform.errors import ConfigError, Problem, message_of
from rl_platform.extras import find, required
from rl_platform.user_code import import_user_module, is_named, raised

if TYPE_CHECKING:
    import numpy as np
    from gymnasium.envs.registration import EnvSpec

    from rl_platform.config.schema.env import Env
    from rl_platform.envs.embodied.spaces import AnyEnv

logger = logging.getLogger(__name__)
PROBLEMS = "rl_platform.envs.embodied.build_problems"  # an extra
SUITES = "rl_platform.envs.embodied.suites"  # an extra
OF_PROGRAM = "function/"  # prefix of the ids of environments that exist in the user's program only
ENV_ERRORS = (Exception, SystemExit)  # what an environment may raise; not what ends this process: KeyboardInterrupt
_told: set[tuple[str, str]] = set()  # errors of close() that were logged: name and text
_made: WeakValueDictionary[int, AnyEnv] = WeakValueDictionary()  # by id; those of this process that still exist


class SupportsClose(Protocol):
    def close(self) -> object: ...


@dataclass(frozen=True)
class PixelFormat:
    """Settings of MuJoCo's drawing of observations; camera None: the environment's default view."""

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
    have in turn. task_names: their names. backend: the physics engine of Gymnasium's MuJoCo tasks, or a class of the
    user that steps all environments (`user_backend.py`); `id` is then its name. python: the interpreter of the
    processes that build it (`processes/interpreter.py`), None: this one. addresses: servers that build it
    (`remote/remote_workers.py`). token_file: their secret, None: in an environment variable.
    """

    id: str
    kwargs: dict[str, object] = field(default_factory=dict)
    max_episode_steps: int | None = None
    pixels: PixelFormat | None = None
    tasks: tuple[dict[str, object], ...] = ()
    task_names: tuple[str, ...] = ()
    backend: str = "mujoco"
    python: str | None = None
    addresses: tuple[str, ...] = ()
    token_file: str | None = None

    @classmethod
    def of(cls, env: Env) -> EnvDescription:
        """Returns the description in the config's section `env`."""
        pixels = None if env.pixels is None else PixelFormat(**env.pixels.model_dump())
        tasks, names = tuple(task.kwargs for task in env.tasks), tuple(task.name for task in env.tasks)
        where = env.python, env.addresses, env.token_file
        return cls(env.name, env.kwargs, env.max_episode_steps, pixels, tasks, names, env.backend, *where)

    @property
    def own_backend(self) -> bool:
        """True if `backend` is a class of the user."""
        return is_named(self.backend)

    @property
    def external(self) -> bool:
        """Whether another interpreter or a server builds the environment."""
        return self.python is not None or bool(self.addresses)

    def of_task(self, number: int) -> EnvDescription:
        """Returns the description of environment `number` of the run; this one with servers, which have the tasks."""
        if not self.tasks or self.addresses:
            return self
        return replace(self, kwargs=self.kwargs | self.tasks[number % len(self.tasks)], tasks=(), task_names=())


@dataclass(frozen=True)
class EnvSetup:
    """Settings by which every process builds its environments of a `VectorEnv`.

    numbers: the numbers of the environments in the run, which determine their tasks. restarts: the most replacements of
    environments. spec: None of a backend of the user, and of another interpreter, which finds it itself.
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
    code: object = None
    try:
        if module:
            code = import_user_module(module)
            entry_point = getattr(code, name, None)
            if name not in gymnasium.registry and callable(entry_point):
                return EnvSpec(name, entry_point)
        return gymnasium.spec(name)
    except Exception as error:
        problem_of = find(PROBLEMS, "find_failure.find_problem", _not_found)
        if (problem := problem_of(description.id, code, error)) is None:
            raise
        raise ConfigError([problem]) from error


def make_env(description: EnvDescription, spec: EnvSpec | None = None, render_mode: str | None = None) -> AnyEnv:
    """Builds one environment, with the first of several tasks; observations of several parts are flattened.

    Raises ConfigError for an unknown id or arguments that the environment does not accept.
    """
    import gymnasium

    from rl_platform.envs.embodied.adapter import flattened, with_typed_actions

    spec, description = spec or find_spec(description), description.of_task(0)
    kwargs = deepcopy(description.kwargs)  # an environment may change its lists
    if render_mode is not None:
        kwargs["render_mode"] = render_mode
    if description.pixels is not None:
        with required("rl_platform.envs.embodied.pictures", "env.pixels"):
            from rl_platform.envs.embodied.pictures.pixels import PixelObservation, drawing_kwargs
        kwargs = {**kwargs, **drawing_kwargs(description, spec)}
    if str(spec.entry_point).startswith("gymnasium_robotics"):
        find(SUITES, "names.check_reward_type", lambda _: None)(kwargs)
    try:
        with deprecations_once(spec), warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*precision lowered by casting")  # of the bounds of Meta-World's spaces
            env = gymnasium.make(
                spec, max_episode_steps=description.max_episode_steps, disable_env_checker=True, **kwargs
            )
    except ConfigError:
        raise
    except ENV_ERRORS as error:
        problem_of = find(PROBLEMS, "build_failure.build_problem", _not_built)
        raise ConfigError([problem_of(description.id, spec.id, kwargs, error)]) from error
    inner = env.unwrapped
    if _made.get(id(inner)) is inner:
        message = f"{spec.id} returns the same environment again; a run steps several environments"
        raise ConfigError([Problem("env.id", message, value=description.id, hint="make a new one in each call")])
    _made[id(inner)] = inner
    if absent := [name for name in ("observation_space", "action_space") if getattr(env, name, None) is None]:
        hint = "set it in __init__: a space of gymnasium.spaces"
        raise ConfigError([Problem("env.id", f"{spec.id} has no {' and no '.join(absent)}", value=spec.id, hint=hint)])
    env = with_typed_actions(env)
    if description.pixels is not None:
        return PixelObservation(env, description.pixels)
    if render_mode is not None:
        from rl_platform.envs.embodied.pictures.drawing import draw_quickly, follow_robot

        draw_quickly(env)
        follow_robot(env)
    return flattened(env)


def close_env(env: SupportsClose, name: str, warned: np.ndarray | None = None) -> None:
    """Closes an environment, or a backend of them. An error costs a warning, once for each text: nothing is lost, and
    simulators often raise there.

    warned [N] bool: shared by processes, of which one warns.
    """
    try:
        env.close()
    except ENV_ERRORS as error:
        text = raised(error)
        if (name, text) not in _told and not (warned is not None and warned.any()):
            _told.add((name, text))
            if warned is not None:
                warned[:] = True
            logger.warning("%s: close() raised %s", name, text)


def warned_of_closing(name: str) -> bool:
    """Returns whether this process has warned of an error in closing an environment of this name."""
    return any(name == other for other, _ in _told)


@contextmanager
def closing_env(env: AnyEnv, name: str) -> Iterator[AnyEnv]:
    """Closes the environment after the block, see `close_env`."""
    try:
        yield env
    finally:
        close_env(env, name)


def _not_found(env_id: str, code: object, error: BaseException) -> Problem | None:
    known = isinstance(error, sys.modules["gymnasium"].error.Error | ImportError)
    return Problem("env.id", str(error), value=repr(env_id)) if known else None


def _not_built(env_id: str, spec_id: str, kwargs: object, error: BaseException) -> Problem:
    return Problem("env", f"{spec_id} cannot be built ({type(error).__name__}: {message_of(error)})", value=env_id)


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
    """Raises ConfigError for an environment without a declared time limit: an evaluation episode might never end."""
    own_limit = getattr(env.unwrapped, "max_path_length", None)  # Meta-World truncates its episodes itself
    if time_limit(env) is None and own_limit is None:
        raise ConfigError([no_time_limit(env_id)])


def no_time_limit(env_id: str) -> Problem:
    """Returns the problem of an environment without a declared time limit."""
    message = f"{env_id} declares no time limit, so that an evaluation episode may never end"
    hint = (
        'env.max_episode_steps=1000, in Python overrides={"env.max_episode_steps": 1000}; or register the '
        "environment with max_episode_steps"
    )
    return Problem("env.max_episode_steps", message, value="null", allowed="at least 1", hint=hint)
