"""Every kind of user code: its protocol, its key, and its names in a config.

`docs/extending.md` has one section and one example of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from rl_platform.algorithms.variants.filters import GROUPS, SAMPLES
from rl_platform.algorithms.variants.user_estimator import ESTIMATOR
from rl_platform.algorithms.variants.user_policy_loss import LOSS
from rl_platform.components.agents.agent_function import AGENT, AGENT_TOOL, TEXT_ENVIRONMENT, TOOL
from rl_platform.config.explanations.foreign_rewards import of_rewards
from rl_platform.config.schema import Config
from rl_platform.engines.rollout.base import ENGINE
from rl_platform.envs.embodied.user_backend import BACKEND
from rl_platform.envs.reasoning.verifiers import REWARD
from rl_platform.errors import check_all
from rl_platform.metrics import LOGGER
from rl_platform.models.policies.network import NETWORK
from rl_platform.runners.step_callbacks import CALLBACK
from rl_platform.user_code import Extension, is_named


class Use(NamedTuple):
    """A use of a kind of user code. example: a file of `examples/`, or a section of the docs. names: of a config.

    options: further arguments of the constructor, where only a run builds the class.
    """

    kind: Extension
    example: str
    names: Callable[[Config], list[str | None]]
    options: Callable[[Config], Iterable[str]] = lambda config: ()


USES = (
    Use(NETWORK, "policy_network", lambda config: [config.actor.model.type], lambda config: config.actor.model.kwargs),
    Use(BACKEND, "env_backend", lambda config: [config.env.backend]),
    Use(ENGINE, "rollout_engine", lambda config: [config.rollout.backend], lambda config: config.rollout.engine_args),
    Use(ESTIMATOR, "estimator", lambda config: [config.algorithm.adv_type]),
    Use(LOSS, "policy_loss", lambda config: [config.algorithm.policy_loss]),
    Use(
        GROUPS, "filter", lambda config: [sampling.filter if (sampling := config.algorithm.dynamic_sampling) else None]
    ),
    Use(SAMPLES, "filter", lambda config: [config.algorithm.sample_filter]),
    Use(of_rewards(REWARD), "", lambda config: []),  # its own process imports it: user_code_checks.check_reward
    Use(TOOL, "", lambda config: [turns.tool if (turns := config.rollout.multi_turn) else None]),
    Use(AGENT, "", lambda config: [agent.function if (agent := config.rollout.agent) else None]),
    Use(AGENT_TOOL, "", lambda config: [tool.type for tool in agent.tools] if (agent := config.rollout.agent) else []),
    Use(
        TEXT_ENVIRONMENT,
        "",
        lambda config: [game.type] if (agent := config.rollout.agent) and (game := agent.environment) else [],
    ),
    Use(LOGGER, "logger", lambda config: [*config.runner.logger_backends]),
    Use(CALLBACK, "callback", lambda config: [*config.runner.callbacks]),
)


def check_extensions(config: Config) -> None:
    """Imports all user code. Raises ConfigError with everything that does not satisfy its protocol."""
    named = [(use, name) for use in USES for name in use.names(config) if name is not None and is_named(name)]
    check_all(*(lambda use=use, name=name: use.kind.load(name, use.options(config)) for use, name in named))
