"""Rules of a recurrent policy: what its sequences are cut from, and what cannot be combined with them."""

from __future__ import annotations

from collections.abc import Iterator

from rl_platform.config.action_level_rules import CHUNKS
from rl_platform.config.rules import BrokenRule
from rl_platform.config.schema import Config

TYPE, LENGTH = "actor.model.type", "actor.model.sequence_length"
RECURRENT = ("type", "recurrent_size", "sequence_length")
_TASK, _STEPS = "runner.task_type", "env.rollout_steps"


def broken_recurrent_rules(config: Config) -> Iterator[BrokenRule]:
    """The rules that an embodied `config` breaks."""
    algorithm, model = config.algorithm, config.actor.model
    if model.type != "gru":
        return
    if model.num_action_chunks > 1:
        message = "a recurrent policy sees every step, and a chunk of actions would be chosen without those inside it"
        yield BrokenRule(CHUNKS, message, (TYPE, _TASK), f"{CHUNKS}: 1, or {TYPE}: mlp")
    for name in ("logprob_type", "entropy_type"):
        if getattr(algorithm, name) == "token_level":
            message = "a position of a recurrent policy's sequence is a step, whose components share one log-prob"
            yield BrokenRule(f"algorithm.{name}", message, (TYPE, _TASK), f"algorithm.{name}: chunk_level")
    if algorithm.loss_agg_func != "token-mean":
        key = "algorithm.loss_agg_func"
        message = "a sequence is a piece of a rollout, cut where its steps are full: every step weighs the same"
        yield BrokenRule(key, message, (TYPE, _TASK), f"{key}: token-mean")
    length = config.sequence_length
    if config.env.rollout_steps % length:
        message = f"sequences of {length} steps do not divide the {config.env.rollout_steps} of {_STEPS}"
        yield BrokenRule(LENGTH, message, (_STEPS, TYPE, _TASK))
    reason = f"a recurrent policy is trained on sequences of {length} transitions ({LENGTH}; null: {_STEPS})"
    sizes = {
        "data.mini_batch_size": config.data.mini_batch_size,
        "actor.micro_batch_size": config.actor.micro_batch_size,
    }
    for key, size in sizes.items():
        if size is not None and size % length:
            hint = f"a multiple of {length}"
            yield BrokenRule(key, f"{reason}, and this is no multiple of them", (LENGTH, _STEPS, TYPE, _TASK), hint)


def idle_recurrent_keys(config: Config) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Keys without effect in an embodied `config`: key, reason, the keys that decide it."""
    if config.actor.model.type != "gru":
        for name in RECURRENT[1:]:
            yield f"actor.model.{name}", f"{TYPE} {config.actor.model.type} remembers nothing", (TYPE,)
