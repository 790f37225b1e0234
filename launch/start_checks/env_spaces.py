"""Builds the environment of a config once for its spaces, and compares them with the policy and the demonstrations.

Imports no torch, so that a plan can check its environment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

from rl_platform.config.schema import Config
from rl_platform.envs.embodied.descriptions import EnvDescription
from rl_platform.envs.embodied.env_facts import inspect_env
from rl_platform.envs.embodied.spaces import EnvSpaces
from rl_platform.envs.embodied.stepping import inspect_tasks
from rl_platform.errors import ConfigError, Problem
from rl_platform.extras import required
from rl_platform.launch.start_checks.policy_fit import policy_problems


def spaces_of(config: Config) -> EnvSpaces:
    """Returns the spaces of the environment. Raises ConfigError for an unknown id, and for a policy or demonstrations
    that do not fit."""
    spaces = fitting_spaces(config)
    if config.runner.warm_start is not None:
        with required("rl_platform.components.demonstrations", "runner.warm_start"):
            from rl_platform.components.demonstrations.demonstration_files import read_demonstrations
        read_demonstrations(config.runner.warm_start, spaces)
    return spaces


def fitting_spaces(config: Config) -> EnvSpaces:
    """Returns what `spaces_of` returns, and reads no demonstrations."""
    description = EnvDescription.of(config.env)
    inspect_tasks(description)
    spaces, *others = (_spaces_of_task(description, number) for number in range(max(len(config.env.tasks), 1)))
    for number, other in enumerate(others, start=1):
        if other != spaces:
            message = f"task {config.env.tasks[number].name} has other spaces than {config.env.tasks[0].name}"
            value, allowed = _differences(other, spaces), _differences(spaces, other)
            raise ConfigError([Problem(f"env.tasks[{number}].kwargs", message, value=value, allowed=allowed)])
    if problems := [*policy_problems(config.actor.model, spaces), *_scaled_twice(config, spaces)]:
        raise ConfigError(problems)
    return spaces


def _scaled_twice(config: Config, spaces: EnvSpaces) -> Iterator[Problem]:
    """Yields the problem of a SmolVLA of LeRobot, which scales states as in its training, on scaled observations."""
    model, key = config.actor.model, "env.normalize_observations"
    if model.type == "smolvla" and model.path is not None and config.env.normalize_observations and not spaces.images:
        message = "the folder of actor.model.path scales the states, and would get them scaled by other statistics"
        yield Problem(key, message, value="true", allowed="false", hint=f"{key}: false")


def _differences(spaces: EnvSpaces, others: EnvSpaces) -> str:
    """Returns the fields of `spaces` that differ from those of `others`, as `observation_shape (3,)`."""
    names = [each.name for each in fields(spaces) if getattr(spaces, each.name) != getattr(others, each.name)]
    return ", ".join(f"{name} {getattr(spaces, name)}" for name in names)


def _spaces_of_task(description: EnvDescription, number: int) -> EnvSpaces:
    try:
        return inspect_env(description.of_task(number)).spaces
    except ConfigError as error:
        if not description.tasks:
            raise
        key = f"env.tasks[{number}].kwargs"
        # an entry of a list cannot be set on the command line, so the hint names the key alone
        problems = [
            replace(each, key=each.key.replace("env.kwargs", key), hint=each.hint.partition("env.kwargs.")[0].strip())
            if each.key.startswith("env.kwargs.") and each.key.split(".")[2] in description.tasks[number]
            else each
            for each in error.problems
        ]
        raise ConfigError(problems) from error
