"""All checks before a run starts, and the environment's spaces or the questions that they read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rl_platform.config.schema import Config
from rl_platform.envs.embodied.spaces import EnvSpaces
from rl_platform.envs.reasoning.question import Split
from rl_platform.envs.reasoning.tasks import build_questions
from rl_platform.errors import check_all
from rl_platform.launch.start_checks.env_spaces import spaces_of
from rl_platform.launch.start_checks.missing import check_present
from rl_platform.launch.start_checks.model_checks import check_architectures
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
