"""Selects what steps environments: native simulation, backends of users, other interpreters, or servers.

The only module of the core that imports these extras: `mujoco/`, `user_envs/`, `processes/` and `remote/`. Without
`mujoco/` Gymnasium steps its MuJoCo tasks itself.
"""

from __future__ import annotations

import logging
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING

from rl_platform.errors import Problem
from rl_platform.extras import is_present, required

if TYPE_CHECKING:
    from gymnasium.envs.registration import EnvSpec

    from rl_platform.envs.embodied.descriptions import EnvDescription
    from rl_platform.envs.embodied.env_facts import EnvFacts
    from rl_platform.envs.embodied.mujoco.native import NativeEnvs
    from rl_platform.envs.embodied.processes.workers import EnvWorkers
    from rl_platform.envs.embodied.spaces import AnyEnv, EnvSpaces
    from rl_platform.envs.embodied.user_envs.user_envs import UserEnvs

model_warnings = logging.getLogger(__name__)
"""MuJoCo's warnings about the model files of environments."""


def native_envs(env: AnyEnv, num_envs: int, threads: int, backend: str) -> NativeEnvs | None:
    """Simulates `num_envs` environments like `env`; None if Gymnasium has to step them. backend: `env.backend`."""
    if not _present():
        return None
    from rl_platform.envs.embodied.mujoco.native import NativeEnvs

    return NativeEnvs.of(env, num_envs, threads, backend)


def stop_timers() -> None:
    """Switches MuJoCo's timers per stage off, once MuJoCo was imported."""
    if "mujoco" in sys.modules and _present():
        from rl_platform.envs.embodied.mujoco.physics import stop_timers as stop

        stop()


def deprecations_once(spec: EnvSpec) -> AbstractContextManager[None]:
    """Logs each deprecation that MuJoCo reports within the block once per run."""
    if not _present():
        return nullcontext()
    from rl_platform.envs.embodied.mujoco.deprecations import deprecations_once as once

    return once(spec)


def warp_problem(env: AnyEnv) -> Problem | None:
    """Returns why MuJoCo Warp cannot step the built environment `env`; None: it can."""
    if not _present():
        return Problem("env.backend", "this installation has no native simulation", value="mujoco_warp", hint="mujoco")
    from rl_platform.envs.embodied.mujoco.warp import warp_problem as problem  # imports MuJoCo

    return problem(env)


def inspect_external(description: EnvDescription, *, limited: bool) -> EnvFacts:
    """Returns the facts of environments in another interpreter (`env.python`) or of a server (`env.address`)."""
    if description.addresses:
        with required("rl_platform.envs.embodied.remote", "env.address"):
            from rl_platform.envs.embodied.remote.remote_workers import inspect_remote
        return inspect_remote(description, limited=limited)
    with required("rl_platform.envs.embodied.processes", "env.python"):
        from rl_platform.envs.embodied.processes.interpreter import inspect_in_interpreter

    return inspect_in_interpreter(description)


def inspect_tasks(description: EnvDescription) -> None:
    """Prepares `inspect_external` of several tasks in another interpreter: one process builds all of them."""
    if description.python is not None and len(description.tasks) > 1:
        with required("rl_platform.envs.embodied.processes", "env.python"):
            from rl_platform.envs.embodied.processes.interpreter import inspect_tasks_in_interpreter

        inspect_tasks_in_interpreter(description)


def workers_class(description: EnvDescription) -> type[EnvWorkers]:
    """Returns the class of the processes, or of the connections to servers, that step environments."""
    if description.addresses:
        with required("rl_platform.envs.embodied.remote", "env.address"):
            from rl_platform.envs.embodied.remote.remote_workers import RemoteWorkers
        return RemoteWorkers
    with required("rl_platform.envs.embodied.processes", "env.num_workers", hint="env.num_workers=0"):
        from rl_platform.envs.embodied.processes.workers import EnvWorkers
    return EnvWorkers


def user_envs(description: EnvDescription, spaces: EnvSpaces, num_envs: int) -> UserEnvs:
    """Returns the environments of the user's backend."""
    with required("rl_platform.envs.embodied.user_envs", "env.backend"):
        from rl_platform.envs.embodied.user_envs.user_envs import UserEnvs

    return UserEnvs(description, spaces, num_envs)


def user_spaces(description: EnvDescription, *, tried: bool = False) -> EnvSpaces:
    """Returns the spaces of the user's backend. tried: it simulates two environments first. Raises ConfigError."""
    with required("rl_platform.envs.embodied.user_envs", "env.backend"):
        from rl_platform.envs.embodied.user_envs.user_envs import backend_spaces, try_backend

    return try_backend(description) if tried else backend_spaces(description)


@cache
def _present() -> bool:
    return is_present("rl_platform.envs.embodied.mujoco")
