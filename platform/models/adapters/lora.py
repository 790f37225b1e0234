"""Low-rank adapters (Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021) with peft.

A targeted matrix W [out,in] computes W x + alpha / rank * B A x. A [rank,in] and B [out,rank] are trained, W is frozen.
B starts at zero, so new adapters change no output. peft is optional: the extra `lora` installs it.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from rl_platform.config.schema.models import Lora
from rl_platform.errors import ConfigError, Problem
from rl_platform.models.adapters.targets import unknown_targets

ADAPTER = "default"  # peft's name of the set of adapters; part of its parameter names
BASE = ".base_layer."  # inserted by peft into the names of a targeted matrix


def not_installed(key: str) -> Problem | None:
    """Returns a problem if peft is missing; None if it is installed. `key`: the section, such as actor.lora."""
    if importlib.util.find_spec("peft") is not None:
        return None
    hint = "pip install 'rl-platform[lora]'"
    return Problem(key, "adapters are those of peft, which is not installed", hint=hint)


def linear_names(backbone: nn.Module) -> set[str]:
    """Returns the last names of the linear layers of the backbone, which adapters can target."""
    return {name.rpartition(".")[2] for name, module in backbone.named_modules() if isinstance(module, nn.Linear)}


def adapter_parameters(backbone: nn.Module, lora: Lora) -> int:
    """Returns the number of parameters of this model's adapters."""
    matrices = ((name.rpartition(".")[2], module) for name, module in backbone.named_modules())
    return sum(
        lora.rank * (module.in_features + module.out_features)
        for name, module in matrices
        if isinstance(module, nn.Linear) and name in lora.target_modules
    )


def add_adapters(backbone: nn.Module, lora: Lora, seed: int, key: str) -> None:
    """Freezes the backbone and adds adapters to its targets. The matrices A depend on `seed` only.

    Raises ConfigError if peft is missing or a target is no linear layer of this model.
    """
    if (missing := not_installed(key)) is not None:
        raise ConfigError([missing])
    if problems := [*unknown_targets(linear_names(backbone), lora, key)]:
        raise ConfigError(problems)
    from peft import LoraConfig, inject_adapter_in_model

    options = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.target_modules), bias="none")
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers deprecates a name that peft uses
        torch.manual_seed(seed)
        # Given the model itself, peft would turn the targets of some families into adapters of their experts.
        inject_adapter_in_model(options, backbone.requires_grad_(False).layers, ADAPTER)


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Disables the adapters of `model` within the block."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    assert layers, "a model without adapters"
    # enable_adapters() would also change requires_grad, which FSDP reads only once
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def merged(weights: dict[str, Tensor], lora: Lora) -> dict[str, Tensor]:
    """Returns the weights of an equal model without adapters: W + alpha / rank * B A; other weights are unchanged."""
    parts = merged_parts((((name,), tensor) for name, tensor in weights.items()), lora)
    return {name: tensor for (name,), tensor in parts}


@torch.no_grad()
def merged_parts(parts: Iterable[tuple[Sequence[str], Tensor]], lora: Lora) -> Iterator[tuple[Sequence[str], Tensor]]:
    """Yields the (names, weights) of an equal model without adapters. Holds one matrix W until its adapters come."""
    waiting: dict[str, dict[str, Tensor]] = {}  # by layer
    for names, tensor in parts:
        layer, matrix = _of_adapter(names[0])
        if not matrix:
            yield [name.replace(BASE, ".") for name in names], tensor
            continue
        matrices = waiting.setdefault(layer, {})
        matrices[matrix] = tensor
        if len(matrices) == 3:
            del waiting[layer]
            yield [f"{layer}.weight"], matrices["W"] + (matrices["B"] @ matrices["A"]) * (lora.alpha / lora.rank)
    assert not waiting, f"a matrix or an adapter is missing of {', '.join(waiting)}"


def _of_adapter(name: str) -> tuple[str, str]:
    """Returns the layer, and W, A or B for a matrix of a layer with adapters; else ""."""
    for end, matrix in ((f"{BASE}weight", "W"), *((f".lora_{part}.{ADAPTER}.weight", part) for part in "AB")):
        if name.endswith(end):
            return name.removesuffix(end), matrix
    return name, ""
