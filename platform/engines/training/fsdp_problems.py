"""Checks before the start whether the fsdp backend can train a model with context parallelism or adapters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rl_platform.config.schema.models import Trainable
from rl_platform.errors import Problem
from rl_platform.models.lora import unknown_targets

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig


def fsdp_problems(config: PretrainedConfig, section: Trainable, role: str) -> Iterator[Problem]:
    """Yields a problem for each setting of `section` that a model with this transformers config does not allow.

    `role`: the name of the section, such as actor.
    """
    ranks, heads, kv_heads = section.parallel.context, config.num_attention_heads, config.num_key_value_heads
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        message = (
            f"ranks that share tokens divide the model's {heads} attention heads, and its {kv_heads} key and value "
            "heads or the other way round"
        )
        fitting = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
        allowed = ", ".join(map(str, fitting))
        yield Problem(f"{role}.parallel.context", message, value=str(ranks), allowed=allowed)
    if section.lora is not None:
        yield from unknown_targets(_empty(config), section.lora, f"{role}.lora")


def _empty(config: PretrainedConfig) -> nn.Module:
    """The model's modules on the meta device."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    with init_empty_weights():
        return AutoModelForCausalLM.from_config(config).base_model
