"""All checks before a run starts, and the environment's spaces or the questions that they read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from rl_platform.config.schema import Config
from rl_platform.envs.embodied.descriptions import EnvDescription
from rl_platform.envs.embodied.env_facts import inspect_env
from rl_platform.envs.embodied.spaces import EnvSpaces
from rl_platform.envs.reasoning.question import Split
from rl_platform.envs.reasoning.tasks import build_questions
from rl_platform.errors import ConfigError, Problem, check_all
from rl_platform.extras import required
from rl_platform.launch.start_checks.missing import check_present
from rl_platform.launch.start_checks.model_checks import check_architectures
from rl_platform.launch.start_checks.policy_fit import policy_problems
from rl_platform.launch.start_checks.preflight import check_cheap
from rl_platform.launch.start_checks.sharding import check_kernels
from rl_platform.launch.start_checks.user_code_checks import check_tests, check_user_functions
from rl_platform.placement.scheduler import Placement


def checked(config: Config, placement: Placement) -> EnvSpaces | Split:
    """Returns the spaces of the environment, or the questions. Raises ConfigError with the problems of all checks, else
    the first other error."""
    worlds: list[EnvSpaces | Split] = []

    def questions() -> None:
        split = build_questions(config.data, config.runner.seed)
        check_tests(config, split)
        worlds.append(split)

    checks: list[Callable[[], object]] = [
        partial(check_cheap, config, placement),
        partial(check_kernels, config, placement),
        partial(check_present, config),
    ]
    if config.runner.task_type == "embodied":
        checks.append(lambda: worlds.append(spaces_of(config)))
    else:
        checks += [questions, partial(check_architectures, config, placement)]
    check_all(*checks, partial(check_user_functions, config))
    return worlds[0]


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
    spaces, *others = (_spaces_of_task(description, number) for number in range(max(len(config.env.tasks), 1)))
    for number, other in enumerate(others, start=1):
        if other != spaces:
            message = f"task {config.env.tasks[number].name} has other spaces than {config.env.tasks[0].name}"
            raise ConfigError([Problem(f"env.tasks[{number}].kwargs", message, value=str(other), allowed=str(spaces))])
    if problems := policy_problems(config.actor.model, spaces):
        raise ConfigError(problems)
    return spaces


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
