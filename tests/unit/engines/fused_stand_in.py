"""Transformer Engine's modules as Megatron's wrappers call them, in plain torch and without a GPU. No test by itself.

What is Transformer Engine's own here: the names of parameters, which of them exist, how tensor ranks share them and
which marks say so, and what a module does with the ranks. What it is not: its kernels, their precision and their speed.

`main(rank, folder)` is one of two gloo processes that train with it; see megatron_ranks.py.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from script_modules import module_of
from torch import Tensor, nn

VERSION = "2.9.0"  # one that Megatron-Core 0.16 asks for; below, other arguments are passed


class Linear(nn.Module):
    """`parallel_mode` column: ranks share outputs, row: inputs. Without a bias `bias` is no parameter."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        sequence_parallel: bool,
        tp_group: Any,
        tp_size: int,
        init_method: Any,
        bias: bool,
        return_bias: bool,
        parallel_mode: str,
        params_dtype: torch.dtype,
        device: torch.device,
        get_rng_state_tracker: Any,
        fuse_wgrad_accumulation: bool,
        rng_tracker_name: str | None = None,
    ) -> None:
        super().__init__()
        assert not fuse_wgrad_accumulation, "it needs an extension of Megatron's own"
        self.tp_group, self.parallel_mode = tp_group, parallel_mode
        self.return_bias = return_bias
        self.sequence_parallel = sequence_parallel and tp_size > 1
        column = parallel_mode == "column"
        shape = (out_features // tp_size, in_features) if column else (out_features, in_features // tp_size)
        self.weight = nn.Parameter(torch.empty(shape, dtype=params_dtype, device=device))
        with get_rng_state_tracker().fork():
            init_method(self.weight)
        _mark(self.weight, 0 if column else 1)
        if bias:
            self.bias = nn.Parameter(torch.zeros(shape[0], dtype=params_dtype, device=device))
            if column:
                _mark(self.bias, 0)
        else:
            self.bias = torch.empty(0, dtype=params_dtype, device=device)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        from megatron.core import tensor_parallel

        if self.parallel_mode == "column":
            if self.sequence_parallel:
                inp = tensor_parallel.gather_from_sequence_parallel_region(inp, group=self.tp_group)
            else:
                inp = tensor_parallel.copy_to_tensor_model_parallel_region(inp, self.tp_group)
        applied = self.bias if len(self.bias) and not self.return_bias else None
        out = F.linear(inp, self.weight, applied)
        if self.parallel_mode == "row" and self.sequence_parallel:
            out = tensor_parallel.reduce_scatter_to_sequence_parallel_region(out, group=self.tp_group)
        elif self.parallel_mode == "row":
            out = tensor_parallel.reduce_from_tensor_model_parallel_region(out, self.tp_group)
        return (out, self.bias) if self.return_bias else out


class LayerNormLinear(Linear):
    """Normalises its input first, with a weight of its own."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float,
        normalization: str,
        zero_centered_gamma: bool,
        return_layernorm_output: bool,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, **options)
        assert normalization == "RMSNorm"
        assert not zero_centered_gamma
        assert not return_layernorm_output
        self.eps = eps
        self.layer_norm_weight = nn.Parameter(torch.ones(in_features, dtype=options["params_dtype"]))
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel
        self.layer_norm_bias = None

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        normal = F.rms_norm(inp, self.layer_norm_weight.shape, self.layer_norm_weight, self.eps)
        return super().forward(normal, is_first_microbatch)


class RMSNorm(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        eps: float,
        *,
        sequence_parallel: bool,
        zero_centered_gamma: bool,
        params_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        assert not zero_centered_gamma
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=params_dtype, device=device))
        self.weight.sequence_parallel = sequence_parallel

    def forward(self, inp: Tensor) -> Tensor:
        return F.rms_norm(inp, self.weight.shape, self.weight, self.eps)


class NotUsed(nn.Module):
    """What Megatron names, and nothing here may build: attention, optimizers, kernels for routing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise AssertionError("this part of Transformer Engine is not used")


def install() -> None:
    """Before Megatron is imported: it asks once whether Transformer Engine is there."""
    assert not any(name.startswith("megatron") for name in sys.modules)
    used = {"Linear": Linear, "LayerNormLinear": LayerNormLinear, "RMSNorm": RMSNorm}
    names = ("DotProductAttention", "GroupedLinear", "LayerNorm", "LayerNormMLP")
    root = _module("transformer_engine", __version__=VERSION)
    root.pytorch = _module("transformer_engine.pytorch", **used, **dict.fromkeys(names, NotUsed))
    inside: dict[str, tuple[str, ...]] = {
        "fp8": ("FP8GlobalStateManager", "fp8_autocast"),
        "distributed": ("CudaRNGStatesTracker", "activation_recompute_forward", "checkpoint"),
        "ops": ("Sequential", "FusibleOperation"),
        "optimizers": ("FusedAdam", "FusedSGD"),
        "router": ("fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss", "fused_topk_with_score_function"),
        "cpu_offload": (),
        "tensor": ("QuantizedTensor",),
    }
    for name, parts in inside.items():
        made = _module(f"transformer_engine.pytorch.{name}", **{part: type(part, (NotUsed,), {}) for part in parts})
        setattr(root.pytorch, name, made)
    root.pytorch.cpu_offload.get_cpu_offload_context = _no_offload
    root.common = _module("transformer_engine.common")
    root.common.recipe = _module("transformer_engine.common.recipe", DelayedScaling=NotUsed)


def _no_offload(enabled: bool, *_: Any) -> tuple[Any, None]:
    assert not enabled
    return nullcontext(), None


def _module(name: str, **content: Any) -> Any:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    module.__dict__.update(content)
    sys.modules[name] = module
    return module


def _mark(parameter: nn.Parameter, dimension: int) -> None:
    parameter.tensor_model_parallel = True
    parameter.partition_dim, parameter.partition_stride = dimension, 1


@cache
def megatron_ranks() -> Any:
    return module_of(Path(__file__).with_name("megatron_ranks.py"))


def preload() -> None:
    """What both ranks import, before they are forked; the stand-in first."""
    install()
    megatron_ranks().import_for("fused")


def main(rank: int, folder: Path) -> None:
    megatron_ranks().main(rank, folder, "fused")
