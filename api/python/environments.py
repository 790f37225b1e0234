"""Environments that a program passes as a function: registered with Gymnasium while a run needs them.

Worker processes of the run get the function by cloudpickle, so lambdas and closures work. Not covered: other machines.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rl_platform.envs.embodied.descriptions import OF_PROGRAM
from rl_platform.errors import ConfigError, Problem

MakeEnv = Callable[..., Any]  # returns a new gymnasium.Env; keyword arguments are those of env.kwargs
_ALLOWED = 'an id as "Walker2d-v5", or a function or class that makes an environment'


def id_of(env: str | MakeEnv) -> str:
    """Returns the `env.id` of an environment. Raises ConfigError for what is neither an id nor a function."""
    if isinstance(env, str):
        return env
    if not callable(env):
        is_env = hasattr(env, "reset") and hasattr(env, "step")
        message = "is one environment, and a run makes several" if is_env else "makes no environment"
        hint = f"pass a function: lambda: {type(env).__name__}(...)" if is_env else ""
        raise ConfigError([Problem("env", message, value=repr(env)[:80], allowed=_ALLOWED, hint=hint)])
    module, name = getattr(env, "__module__", None) or "", _name(env)
    if module != "__main__" and getattr(sys.modules.get(module), name, None) is env:
        return f"{module}:{name}"
    return f"{OF_PROGRAM}{name}"


@contextmanager
def registered(env: str | MakeEnv | None) -> Iterator[None]:
    """Within the block, Gymnasium makes the environment by its `id_of`."""
    if env is None or isinstance(env, str) or not (env_id := id_of(env)).startswith(OF_PROGRAM):
        yield
        return
    import gymnasium

    before = gymnasium.registry.pop(env_id, None)
    gymnasium.register(env_id, env)
    try:
        yield
    finally:
        del gymnasium.registry[env_id]
        if before is not None:
            gymnasium.registry[env_id] = before


def _name(env: MakeEnv) -> str:
    name = getattr(env, "__qualname__", type(env).__qualname__)
    return re.sub(r"\W", "", name.rpartition(".")[2])
