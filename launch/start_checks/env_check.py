"""Checks of `--plan`, `--check` and scripts of jobs on an environment: an unknown id or task, and settings of the
policy that its spaces do not allow.

Not covered, as this machine may lack what they need: servers; for plans and scripts also backends of users, and images
that MuJoCo draws. A start checks all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from rl_platform.config.schema import Config
from rl_platform.config.schema.models import VLM_POLICIES
from rl_platform.envs.embodied import stepping
from rl_platform.envs.embodied.descriptions import EnvDescription
from rl_platform.envs.embodied.env_facts import inspect_env
from rl_platform.errors import ConfigError
from rl_platform.launch.start_checks.env_spaces import fitting_spaces, spaces_of
from rl_platform.launch.start_checks.missing import absent_interpreter, missing, names_nearly_one
from rl_platform.launch.start_checks.policy_fit import policy_problems
from rl_platform.user_code import is_named

_OF_NAMES = ("env.id", "env.kwargs", "env.tasks", "actor.model")  # parts of keys of problems that all machines have


def check_env(config: Config) -> None:
    """Raises ConfigError for an environment that does not exist or does not fit the policy. Builds it once, in its
    interpreter if that is on this machine.

    An id with a module of the user is not checked, nor an environment whose packages are not installed.
    """
    description, model = EnvDescription.of(config.env), config.actor.model
    if config.runner.task_type != "embodied" or description.own_backend or unbuilt(config):
        return
    if description.pixels is not None or (":" in description.id and not description.external):
        return
    try:
        with _quiet():
            spaces = inspect_env(replace(description, backend="mujoco").of_task(0)).spaces
    except ConfigError as error:
        if _lacks_packages(error) or not all(problem.key.startswith(_OF_NAMES) for problem in error.problems):
            return
        raise
    if model.type not in VLM_POLICIES and not is_named(model.type) and (problems := policy_problems(model, spaces)):
        raise ConfigError(problems)


def check_env_and_code(config: Config) -> str:
    """Checks more than `check_env`: ids with a module of the user, backends and networks of the user, each task.

    Returns why the environment was not checked, or an empty text.
    """
    if config.runner.task_type != "embodied":
        return ""
    if reason := unbuilt(config):
        return reason
    if config.env.backend == "mujoco_warp":  # needs a package of its own, and has the same tasks
        config = config.changed({"env.backend": "mujoco"})
    try:
        with _quiet():
            if any(problem.key.startswith("runner.warm_start") for problem in missing(config)):
                fitting_spaces(config)
            else:
                spaces_of(config)
    except ConfigError as error:
        if not _lacks_packages(error):
            raise
        return str(error.problems[0])
    return ""


def unbuilt(config: Config) -> str:
    """Returns why this machine cannot build the environment, with the line to type; an empty text if it can try.

    Raises ConfigError for a name of an interpreter that is nearly that of one.
    """
    if config.env.address is not None:
        return f"the servers {config.env.address} build it, and a start asks them"
    problem = absent_interpreter(config)
    if problem is not None and names_nearly_one(config):
        raise ConfigError([problem])
    return "" if problem is None else str(problem)


def _lacks_packages(error: ConfigError) -> bool:
    """Returns whether this interpreter lacks a package of the environment, which another machine may have."""
    from gymnasium.error import DependencyNotInstalled, NamespaceNotFound

    return isinstance(error.__cause__, ImportError | DependencyNotInstalled | NamespaceNotFound)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses MuJoCo's warnings about a model, which belong to a run."""
    stepping.model_warnings.disabled = True
    try:
        yield
    finally:
        stepping.model_warnings.disabled = False
