"""Checks before the start which models the Megatron backend can train in which layout."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rl_platform.config.schema.models import Parallel
from rl_platform.engines.training.megatron.mixture import FAMILIES as MIXTURES
from rl_platform.engines.training.megatron.mixture import Mixture
from rl_platform.errors import Problem

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", *MIXTURES)
ROTARY = ("default", "linear", "llama3")  # types with fixed frequencies


def transformer_engine_installed() -> bool:
    """Returns whether the package Transformer Engine is installed, without importing it."""
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
    """Returns whether layers are Transformer Engine's, which needs a GPU, or torch's. `kernels`: as of
    `actor.kernels`."""
    return kernels == "transformer_engine" or (kernels == "auto" and on_gpu and transformer_engine_installed())


def is_latent(config: PretrainedConfig) -> bool:
    """Returns whether a transformers config describes multi-head latent attention."""
    return getattr(config, "kv_lora_rank", None) is not None


def unfit(config: PretrainedConfig, parallel: Parallel, role: str, kernels: str = "auto") -> Iterator[Problem]:
    """Yields the problems of a model with this transformers config in this layout.

    `role`: its section, such as actor. `kernels`: as of `actor.kernels`.
    """
    backend, fsdp = f"{role}.training_backend", f"{role}.training_backend=fsdp"
    if config.model_type not in FAMILIES:
        message = f"Megatron trains {', '.join(FAMILIES)} here, and this model is of the kind {config.model_type}"
        yield Problem(backend, message, value="megatron", hint=fsdp)
        return
    for obstacle in _obstacles(config):
        yield Problem(backend, obstacle, value="megatron", hint=fsdp)
    if is_latent(config) and kernels == "transformer_engine":
        message = "latent attention has Megatron's own layers here"
        yield Problem(f"{role}.kernels", message, value=kernels, hint=f"{role}.kernels=torch")
    mixture = Mixture.of(config)
    widths = [config.intermediate_size] if mixture is None or not all(mixture.layers) else []
    if mixture is not None and mixture.shared_width is not None:
        widths.append(mixture.shared_width)
    yield from uneven(
        parallel,
        role,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        widths=widths,
        layers=config.num_hidden_layers,
        experts=mixture.experts if mixture else 0,
    )
    yield from _unfit_experts(config, parallel, role, experts=mixture is not None)


def _obstacles(config: PretrainedConfig) -> Iterator[str]:
    """Yields what a model of a supported family has that this backend does not compute."""
    rotary = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rotary not in (*ROTARY, *(("yarn",) if is_latent(config) else ())):
        yield f"the model has rotary positions of type {rotary}"
    if not getattr(config, "rope_interleave", True):
        yield "the model's rotary positions are not interleaved"
    if config.model_type != "qwen2" and getattr(config, "attention_bias", False):
        yield "the output of the model's attention has a bias"
    if getattr(config, "mlp_bias", False):
        yield "the model's feed-forward layers have biases"
    if (activation := getattr(config, "hidden_act", "silu")) != "silu":
        yield f"the model's feed-forward layers have the activation {activation}"


def uneven(
    parallel: Parallel, role: str, *, heads: int, kv_heads: int, widths: Sequence[int], layers: int, experts: int
) -> Iterator[Problem]:
    """Yields a problem for each size of a model that the layout does not divide equally.

    `widths`: inner widths of the feed-forward layers that tensor ranks split, which are not those of experts.
    `experts`: 0 for none.
    """
    shared = [("attention heads", heads), ("key and value heads", kv_heads)]
    shared += [("channels of the feed-forward layer", width) for width in widths]
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
    if parallel.tensor > 1 and not parallel.sequence:
        message = "tensor ranks would all route the same tokens to the experts"
        hint = f"{role}.parallel.sequence=true: each routes its share of them"
        yield Problem(f"{role}.parallel.sequence", message, value="false", hint=hint)
