"""Which models the Megatron backend can train in which layout; asked before anything is started."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rl_platform.config.components import Parallel
from rl_platform.errors import Problem

FAMILIES = ("llama", "qwen2", "qwen3")
ROTARY = ("default", "linear", "llama3")  # fixed frequencies, nothing else


def unfit(config: Any, parallel: Parallel, role: str) -> Iterator[Problem]:
    """Why a model with this transformers config cannot be trained in this layout. `role`: its section, as `actor`."""
    backend, fsdp = f"{role}.training_backend", f"{role}.training_backend=fsdp"
    if config.model_type not in FAMILIES:
        message = f"Megatron trains {', '.join(FAMILIES)} here, and this model is of the kind {config.model_type}"
        yield Problem(backend, message, value="megatron", hint=fsdp)
        return
    rotary = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rotary not in ROTARY:
        yield Problem(backend, f"the model has rotary positions of type {rotary}", value="megatron", hint=fsdp)
    if config.model_type != "qwen2" and getattr(config, "attention_bias", False):
        yield Problem(backend, "the output of the model's attention has a bias", value="megatron", hint=fsdp)
    for what, size in (
        ("attention heads", config.num_attention_heads),
        ("key and value heads", config.num_key_value_heads),
        ("channels of the feed-forward layer", config.intermediate_size),
    ):
        if size % parallel.tensor:
            message = f"tensor ranks have equal shares of the model's {size} {what}"
            allowed = f"a divisor of {size}"
            yield Problem(f"{role}.parallel.tensor", message, value=str(parallel.tensor), allowed=allowed)
            break
    if config.num_hidden_layers % parallel.pipeline:
        message = f"pipeline stages have equally many of the model's {config.num_hidden_layers} layers"
        allowed = f"a divisor of {config.num_hidden_layers}"
        yield Problem(f"{role}.parallel.pipeline", message, value=str(parallel.pipeline), allowed=allowed)
