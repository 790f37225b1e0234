"""Checks before the start which models the Megatron backend can train in which layout."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rl_platform.config.schema.models import Parallel
from rl_platform.errors import Problem

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
ROTARY = ("default", "linear", "llama3")  # types with fixed frequencies


def transformer_engine_installed() -> bool:
    return importlib.util.find_spec("transformer_engine") is not None


def transformer_engine_fails() -> str | None:
    """Returns the error of importing Transformer Engine; None if it succeeds.

    The import runs in another process, because a failed import would leave partly initialised modules here. It takes
    seconds.
    """
    command = [sys.executable, "-c", "import transformer_engine.pytorch"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    said = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
    return said[-1] if ended.returncode else None


def uses_transformer_engine(kernels: str, *, on_gpu: bool) -> bool:
    """Whether layers are Transformer Engine's, which needs a GPU, or torch's. `kernels`: as of `actor.kernels`."""
    return kernels == "transformer_engine" or (kernels == "auto" and on_gpu and transformer_engine_installed())


def unfit(config: PretrainedConfig, parallel: Parallel, role: str) -> Iterator[Problem]:
    """Yields the problems of a model with this transformers config in this layout. `role`: its section, as `actor`."""
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
    experts = config.model_type == "qwen3_moe"
    yield from uneven(
        parallel,
        role,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        intermediate=config.intermediate_size,
        layers=config.num_hidden_layers,
        experts=config.num_experts if experts else 0,
    )
    yield from _unfit_experts(config, parallel, role, experts=experts)


def uneven(
    parallel: Parallel, role: str, *, heads: int, kv_heads: int, intermediate: int, layers: int, experts: int
) -> Iterator[Problem]:
    """Yields a problem for each size of a model that the layout does not divide equally. `experts`: 0 for none."""
    shared = [("attention heads", heads), ("key and value heads", kv_heads)]
    if not experts:  # tensor ranks do not split experts
        shared.append(("channels of the feed-forward layer", intermediate))
    for what, size in shared:
        if size % parallel.tensor:
            message = f"tensor ranks have equal shares of the model's {size} {what}"
            allowed = f"a divisor of {size}"
            yield Problem(f"{role}.parallel.tensor", message, value=str(parallel.tensor), allowed=allowed)
            break
    parts = parallel.pipeline * parallel.virtual_pipeline
    if layers % parallel.pipeline:
        message = f"pipeline stages have equally many of the model's {layers} layers"
        allowed = f"a divisor of {layers}"
        yield Problem(f"{role}.parallel.pipeline", message, value=str(parallel.pipeline), allowed=allowed)
    elif layers % parts:
        message = f"{parallel.pipeline} stages of {parallel.virtual_pipeline} parts have equally many layers in each"
        allowed = f"a divisor of {layers // parallel.pipeline}, the layers of a stage"
        key = f"{role}.parallel.virtual_pipeline"
        yield Problem(key, message, value=str(parallel.virtual_pipeline), allowed=allowed)
    if experts and experts % parallel.expert:
        message = f"expert ranks have equally many of the model's {experts} experts"
        key, allowed = f"{role}.parallel.expert", f"a divisor of {experts}"
        yield Problem(key, message, value=str(parallel.expert), allowed=allowed)


def _unfit_experts(config: PretrainedConfig, parallel: Parallel, role: str, *, experts: bool) -> Iterator[Problem]:
    key = f"{role}.parallel.expert"
    if not experts:
        if parallel.expert > 1:
            message = f"expert ranks share the experts of a model, and a {config.model_type} model has none"
            yield Problem(key, message, value=str(parallel.expert), hint=f"{key}=1")
        return
    if config.mlp_only_layers or config.decoder_sparse_step != 1:
        message = (
            "Megatron supports mixtures of experts only if all layers have experts, and this model has layers without"
        )
        yield Problem(f"{role}.training_backend", message, value="megatron", hint=f"{role}.training_backend=fsdp")
    if parallel.tensor > 1 and not parallel.sequence:
        message = "tensor ranks would all route the same tokens to the experts"
        hint = f"{role}.parallel.sequence=true: each routes its share of them"
        yield Problem(f"{role}.parallel.sequence", message, value="false", hint=hint)
