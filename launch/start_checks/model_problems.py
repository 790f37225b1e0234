"""Checks before the start whether a model can be trained with context parallelism, adapters or a balanced router.

The module imports no torch, because plans call `context_problems`.
"""

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
    yield from context_problems(section, role, config.num_attention_heads, config.num_key_value_heads)
    if role != "reference" and section.router_aux_loss_coef and getattr(config, "num_experts_per_tok", None) is None:
        message = f"it balances the experts of a model, and a {config.model_type} model has none"
        key, value = f"{role}.router_aux_loss_coef", str(section.router_aux_loss_coef)
        yield Problem(key, message, value=value, hint=f"{key}=0")
    if role == "actor" and isinstance(section, Actor) and section.router_replay:
        yield from _replay_problems(config)
    if section.lora is not None:
        from rl_platform.models.adapters.lora import linear_names
        from rl_platform.models.adapters.targets import unknown_targets
        from rl_platform.models.causal_lm import meta_causal_lm

        yield from unknown_targets(linear_names(meta_causal_lm(config).base_model), section.lora, f"{role}.lora")
        if section.training_backend == "megatron" and _GATE in section.lora.target_modules:
            message = "Megatron keeps the gate of the shared experts as a vector, which has no adapter"
            yield Problem(f"{role}.lora.target_modules", message, value=_GATE)


def context_problems(section: Trainable, role: str, heads: int, kv_heads: int) -> Iterator[Problem]:
    """Yields a problem if the ranks that share tokens have no equal shares of the model's attention heads."""
    fitting = context_sizes(section, heads, kv_heads)
    if section.parallel.context not in fitting:
        tensor = tensor_ranks(section)
        whose = "the model's" if tensor == 1 else "a tensor rank's"
        message = (
            f"ranks that share tokens divide {whose} {heads // tensor} attention heads, and its {kv_heads // tensor} "
            "key and value heads or the other way round"
        )
        value, allowed = str(section.parallel.context), ", ".join(map(str, fitting))
        yield Problem(f"{role}.parallel.context", message, value=value, allowed=allowed)


def context_sizes(section: Trainable, heads: int, kv_heads: int) -> list[int]:
    """Returns the numbers of context ranks that have equal shares of the attention heads of a tensor rank."""
    heads, kv_heads = (max(1, number // tensor_ranks(section)) for number in (heads, kv_heads))
    return [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]


def tensor_ranks(section: Trainable) -> int:
    """Returns the degree of tensor parallelism of a model: 1 unless Megatron trains it."""
    return section.parallel.tensor if section.training_backend == "megatron" else 1


def _replay_problems(config: PretrainedConfig) -> Iterator[Problem]:
    key = "actor.router_replay"
    if getattr(config, "num_experts_per_tok", None) is None:
        message = f"it repeats the selection of experts, and a {config.model_type} model has none"
        yield Problem(key, message, value="true", hint=f"{key}=false")
    elif config.model_type == "phimoe":
        message = "a phimoe model draws its experts one after another, and their weights depend on the order"
        yield Problem(key, message, value="true", hint=f"{key}=false")
