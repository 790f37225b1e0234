"""Rules of the training backends: which keys they read, and what Megatron does not train."""

from __future__ import annotations

from collections.abc import Iterator

from rl_platform.config.components import Trainable
from rl_platform.config.fsdp_rules import broken_fsdp_rules, idle_fsdp_keys
from rl_platform.config.rules import BrokenRule
from rl_platform.config.schema import Config


def idle_parallel_keys(config: Config) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Keys of the layout that do nothing, the reason, and the keys that decide it."""
    yield from idle_fsdp_keys(config)
    roles = ("actor", "critic") if config.critic.use_critic_model else ("actor",)
    for role in roles:
        section: Trainable = getattr(config, role)
        backend, tensor = f"{role}.training_backend", f"{role}.parallel.tensor"
        if section.training_backend != "megatron":
            for name in ("tensor", "pipeline", "sequence"):
                reason = f"only {backend} megatron splits a model; fsdp shards it over all ranks"
                yield f"{role}.parallel.{name}", reason, (backend,)
        elif section.parallel.tensor == 1:
            yield f"{role}.parallel.sequence", f"tensor ranks share the tokens, and {tensor} is 1", (tensor,)


def broken_parallel_rules(config: Config) -> Iterator[BrokenRule]:
    """What a Megatron model cannot do."""
    yield from broken_fsdp_rules(config)
    algorithm, backend = config.algorithm, "actor.training_backend"
    if config.actor.training_backend != "megatron":
        return
    for key, used in (
        ("algorithm.kl_penalty", algorithm.full_kl_in_reward),
        ("algorithm.kl_loss_type", algorithm.full_kl_in_loss),
    ):
        if used:
            message = "a full KL needs the logits of the whole vocabulary, which Megatron's ranks share"
            yield BrokenRule(key, message, (backend,), hint=f"{backend}: fsdp, or another estimator")
