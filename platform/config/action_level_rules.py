"""Rules between the length of action chunks and the levels of rewards and log-probs."""

from __future__ import annotations

from collections.abc import Iterator

from rl_platform.config.rules import BrokenRule
from rl_platform.config.schema import Config

CHUNKS = "actor.model.num_action_chunks"
_TASK = "runner.task_type"


def broken_action_level_rules(config: Config) -> Iterator[BrokenRule]:
    """The rules that an embodied `config` breaks."""
    algorithm, num_actions = config.algorithm, config.actor.model.num_action_chunks
    if config.env.rollout_steps % num_actions:
        message = f"chunks of {num_actions} actions ({CHUNKS}) do not divide it, and a rollout ends where a chunk does"
        yield BrokenRule("env.rollout_steps", message, (CHUNKS, _TASK))
    coarser = algorithm.reward_type == "action_level" and algorithm.logprob_type == "chunk_level"
    if coarser and num_actions > 1:
        key, rewards = "algorithm.logprob_type", "algorithm.reward_type"
        message = "the one log-prob of a chunk cannot be weighed with the advantages of its actions (reward_type)"
        hint = f"{key}: action_level, or {rewards}: chunk_level"
        yield BrokenRule(key, message, (rewards, CHUNKS, _TASK), hint)
