"""Checks before the start whether a model can be trained with context parallelism, adapters or a balanced router."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rl_platform.config.schema.models import Actor, Trainable
from rl_platform.errors import Problem

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_GATE = "shared_expert_gate"


def model_problems(config: PretrainedConfig, section: Trainable, role: str) -> Iterator[Problem]:
    """Yields a problem for each setting of `section` that a model with this transformers config does not allow.

    `role`: the name of the section, such as actor. Attention heads are those of one tensor rank.
    """
    tensor = section.parallel.tensor if section.training_backend == "megatron" else 1
    ranks = section.parallel.context
    heads, kv_heads = config.num_attention_heads // tensor, config.num_key_value_heads // tensor
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        whose = "the model's" if tensor == 1 else "a tensor rank's"
        message = (
            f"ranks that share tokens divide {whose} {heads} attention heads, and its {kv_heads} key and value "
            "heads or the other way round"
        )
        fitting = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
        allowed = ", ".join(map(str, fitting))
        yield Problem(f"{role}.parallel.context", message, value=str(ranks), allowed=allowed)
    if role != "reference" and section.router_aux_loss_coef and getattr(config, "num_experts_per_tok", None) is None:
        message = f"it balances the experts of a model, and a {config.model_type} model has none"
        key, value = f"{role}.router_aux_loss_coef", str(section.router_aux_loss_coef)
        yield Problem(key, message, value=value, hint=f"{key}=0")
    if role == "actor" and isinstance(section, Actor) and section.router_replay:
        yield from _replay_problems(config)
    if section.lora is not None:
        from rl_platform.models.adapters.lora import unknown_targets
        from rl_platform.models.causal_lm import meta_causal_lm

        yield from unknown_targets(meta_causal_lm(config).base_model, section.lora, f"{role}.lora")
        if section.training_backend == "megatron" and _GATE in section.lora.target_modules:
            message = "Megatron keeps the gate of the shared experts as a vector, which has no adapter"
            yield Problem(f"{role}.lora.target_modules", message, value=_GATE)


def _replay_problems(config: PretrainedConfig) -> Iterator[Problem]:
    key = "actor.router_replay"
    if getattr(config, "num_experts_per_tok", None) is None:
        message = f"it repeats the selection of experts, and a {config.model_type} model has none"
        yield Problem(key, message, value="true", hint=f"{key}=false")
    elif config.model_type == "phimoe":
        message = "a phimoe model draws its experts one after another, and their weights depend on the order"
        yield Problem(key, message, value="true", hint=f"{key}=false")
