"""Checks before anything starts that import code of the user, or start what scores: extensions, agents, rewards."""

from __future__ import annotations

from functools import partial

from rl_platform.config.schema import Config
from rl_platform.config.schema.reward import Scoring
from rl_platform.envs.reasoning.question import Split
from rl_platform.errors import ConfigError, check_all, problems_of
from rl_platform.extras import required
from rl_platform.launch.start_checks.extensions import check_extensions
from rl_platform.launch.start_checks.model_checks import classifier_parts
from rl_platform.launch.start_checks.preflight import removed_secrets
from rl_platform.user_code import is_named


def check_user_functions(config: Config) -> None:
    """Raises ConfigError with all code of the user that cannot be imported; see also `check_reward`."""
    checks = [check_extensions]
    if config.runner.task_type == "reasoning":
        checks += [check_reward, _check_agent]
    check_all(*(partial(check, config) for check in checks))


def _check_agent(config: Config) -> None:
    """Raises ConfigError for schemas, parameters and a format of tools, or an environment, that cannot be used."""
    if (agent := config.rollout.agent) is None or agent.function is not None:
        return
    from rl_platform.components.agents.environment_loop import check_environment
    from rl_platform.components.agents.tool_formats import format_of
    from rl_platform.components.agents.tool_loop import schemas_of
    from rl_platform.models.tokenizer import load_tokenizer

    if agent.environment is not None:
        check_environment(agent)
    if agent.tools:
        schemas_of(agent)
        format_of(load_tokenizer(config.actor.model), agent, config.data.use_chat_template)


def check_reward(config: Config, only_functions: bool = False) -> None:
    """Raises ConfigError or WorkerError if the user's reward function cannot be imported or the reward model is
    invalid. Raises Unreachable if the reward server does not answer. Does not read the weights of a reward model.
    only_functions: those of the user, without servers and models.
    """
    for key, scoring in config.reward.parts:
        if is_named(scoring.type) or not only_functions:
            with problems_of(key, "reward"):
                _check_scoring(config, scoring)


def _check_scoring(config: Config, scoring: Scoring) -> None:
    section = next((name for name in ("judge", "model", "code") if name == scoring.type), None)
    if problems := list(removed_secrets(scoring.address, f"reward.{section}.url" if section else "reward.url")):
        raise ConfigError(problems)
    from rl_platform.components.reward import http_scorer, process_scorer, verifier_spec

    if scoring.asks_server:
        http_scorer(config.data, scoring).close()
    elif scoring.model is not None:
        classifier_parts(scoring.model)
    elif scoring.type == "code" or not verifier_spec(config.data, scoring).built_in:
        process_scorer(config.data, scoring.model_copy(update={"num_workers": 1})).close()


def check_tests(config: Config, questions: Split) -> None:
    """Raises DataError for a question without the tests that a reward of type code needs."""
    if any(part.type == "code" for _, part in config.reward.parts):
        with required("rl_platform.envs.reasoning.sandbox", "reward.type"):
            from rl_platform.envs.reasoning.sandbox.code_scorer import check_cases

        check_cases([*questions.train, *questions.validation])
