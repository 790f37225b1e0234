"""Matrix products of bfloat16 factors on a CPU, with float32 sums that can be added to a result.

torch's own products of bfloat16 round their results to bfloat16. MKL, which torch's x86 builds contain, has a product
with float32 results; other builds round. Without AMX that product is as slow as one of float32 factors. With
AVX512-BF16 torch's own is twice as fast (AMD Zen 4: 190 GFLOP/s a core, benchmarks/products.py), so `dot_kernel`
computes there what it covers, and torch the other products but logits. On a processor with AVX2 only, torch's own has
9 GFLOP/s and MKL's 64.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from rl_platform.accel import dot_kernel

HALF = torch.bfloat16
_ROW_MAJOR, _PLAIN, _TRANSPOSED = 101, 111, 112  # of the CBLAS interface


def product(left: Tensor, right: Tensor, out: Tensor, *, add: bool = False, exact: bool = False) -> Tensor:
    """Writes left @ right to `out` [M,N] float32, or adds it; returns `out`.

    left [M,K], right [K,N]: bfloat16; either may be a transposed view. exact: not rounded where that takes longer.
    """
    if not left.numel():  # as of a micro-batch without actions; the kernels read at least one vector
        return out if add else out.zero_()
    if not _has_amx() and dot_kernel.covers(left, right.t(), out):
        return dot_kernel.dot(left, right.t(), out, add=add)
    gemm = _gemm() if exact or not _torch_is_faster() else None
    if gemm is None:
        rounded = left @ right
        return out.add_(rounded) if add else out.copy_(rounded)
    (rows, inner), columns = left.shape, right.shape[1]
    gemm(
        _ROW_MAJOR,
        *(_PLAIN if factor.stride(1) == 1 else _TRANSPOSED for factor in (left, right)),
        *(ctypes.c_int(size) for size in (rows, columns, inner)),
        ctypes.c_float(1.0),
        *_address(left),
        *_address(right),
        ctypes.c_float(1.0 if add else 0.0),
        *_address(out),
    )
    return out


def rounded(left: Tensor, right: Tensor) -> Tensor:
    """Returns left @ right [M,N], rounded to bfloat16. left [M,K], right [K,N]: bfloat16."""
    if _torch_is_faster() or _has_amx():
        return left @ right
    return product(left, right, torch.empty(len(left), right.shape[1])).to(HALF)


class Float32Outputs:
    """A linear layer without bias, of bfloat16 weights and inputs, with float32 outputs."""

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer  # updates may replace its weight

    def __call__(self, states: Tensor) -> Tensor:
        """[N,inputs] -> [N,outputs]."""
        weight = self.layer.weight.detach()
        return product(states, weight.t(), torch.empty(len(states), len(weight)), exact=True)


@cache
def _has_amx() -> bool:
    return bool(torch.cpu._is_amx_tile_supported())


@cache
def _torch_is_faster() -> bool:
    """Returns whether torch's product is faster than MKL's."""
    return bool(torch.cpu._is_avx512_bf16_supported()) and not _has_amx()


def _address(matrix: Tensor) -> tuple[ctypes.c_void_p, ctypes.c_int]:
    """Returns address and leading dimension."""
    down, across = matrix.stride()
    assert 1 in (down, across), "one dimension must be contiguous"
    return ctypes.c_void_p(matrix.data_ptr()), ctypes.c_int(max(down, across, 1))


@cache
def _gemm() -> Callable[..., object] | None:
    """Returns MKL's `cblas_gemm_bf16bf16f32` in torch's library; None: this build has none."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        gemm: Callable[..., object] = library.cblas_gemm_bf16bf16f32
    except (OSError, AttributeError):
        return None
    return gemm
