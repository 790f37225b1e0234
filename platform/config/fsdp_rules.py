"""Rules of what only the fsdp backend has: adapters, offload to main memory, ranks that share tokens."""

from __future__ import annotations

from collections.abc import Iterator

from rl_platform.config.rules import BrokenRule
from rl_platform.config.schema import Config
from rl_platform.config.schema.models import Trainable


def laid_out(config: Config) -> dict[str, Trainable]:
    """The sections whose layout the config writes, by role. A reference without one has the actor's, with its rules."""
    found: dict[str, Trainable] = {"actor": config.actor}
    if config.critic.use_critic_model:
        found["critic"] = config.critic
    if config.has_reference and config.reference.parallel is not None:
        found["reference"] = config.reference_section
    return found


def idle_fsdp_keys(config: Config) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Keys that do nothing, the reason, and the keys that decide it."""
    if config.runner.task_type == "embodied":
        kind = config.actor.model.type
        names = ("parallel.context", "cpu_offload") if kind == "vla" else ("parallel.context", "cpu_offload", "lora")
        for name in names:
            reason = "an embodied policy is small and no language model"
            yield f"actor.{name}", reason, ("runner.task_type", "actor.model.type")
    if config.reference_is_base:
        reason = "with actor.lora the reference is the actor's own model without its adapters"
        yield "reference", reason, ("actor.lora", "reference.model")


def broken_fsdp_rules(config: Config) -> Iterator[BrokenRule]:
    """What Megatron is asked for and only fsdp has."""
    for role, section in laid_out(config).items():
        backend = f"{role}.training_backend"
        if section.training_backend != "megatron":
            continue
        for name, asked, reason in (
            (
                "lora",
                section.lora is not None,
                "adapters are put into the modules of transformers, which Megatron is not",
            ),
            ("cpu_offload", section.cpu_offload, "it is a policy of FSDP2"),
            (
                "parallel.context",
                section.parallel.context > 1,
                "Megatron shares tokens by Transformer Engine's attention",
            ),
        ):
            if asked:
                message = f"{reason}, which this version does not use" if name == "parallel.context" else reason
                yield BrokenRule(f"{role}.{name}", message, (backend,), hint=f"{backend}: fsdp")
