"""Checks of `--plan`, `--check` and scripts of jobs on an environment: an unknown id, and settings of the policy
that its spaces do not allow.

Not covered, as this machine may lack what they need: other interpreters, servers, backends of users, images. A start
checks all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from rl_platform.config.schema import Config
from rl_platform.config.schema.models import VLM_POLICIES
from rl_platform.envs.embodied import descriptions
from rl_platform.envs.embodied.descriptions import EnvDescription, find_spec
from rl_platform.envs.embodied.env_facts import inspect_env
from rl_platform.errors import ConfigError
from rl_platform.launch.start_checks.policy_fit import policy_problems
from rl_platform.user_code import is_named


def check_env(config: Config, *, imports: bool = False) -> None:
    """Raises ConfigError for an environment that does not exist or does not fit the policy. Builds it once.

    imports: import the module before the `:` of an id; without it such ids are not checked. An environment whose
    packages are not installed is left to the start.
    """
    description, model = EnvDescription.of(config.env), config.actor.model
    if config.runner.task_type != "embodied" or description.external or description.own_backend:
        return
    if ":" in description.id and not imports:
        return
    from gymnasium.error import DependencyNotInstalled, NamespaceNotFound

    try:
        find_spec(description)
        if description.pixels is not None:
            return
        with _quiet():
            spaces = inspect_env(replace(description, backend="mujoco")).spaces
    except ConfigError as error:
        if isinstance(error.__cause__, ImportError | DependencyNotInstalled | NamespaceNotFound):
            return
        raise
    if model.type not in VLM_POLICIES and not is_named(model.type) and (problems := policy_problems(model, spaces)):
        raise ConfigError(problems)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses MuJoCo's warnings about a model, which belong to a run."""
    descriptions.logger.disabled = True
    try:
        yield
    finally:
        descriptions.logger.disabled = False
