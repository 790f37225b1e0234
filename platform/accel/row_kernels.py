"""The operations between the matrix products of generation and training as compiled loops: bfloat16, on a CPU.

One loop replaces up to eight operations of torch, which read and write every number in between. The residual stream,
sums and products are float32, as in training (`bfloat16_layers`); factors of matrix products are rounded once. A row is
computed by one thread in a fixed order, so its bits depend neither on the number of threads nor on the other rows.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache

import numpy as np
import torch
from numba import carray
from torch import Tensor

from rl_platform.accel.openmp_team import run_by_team
from rl_platform.accel.tensor_loops import BITS, FLOAT, address_of, at, power, rounded, taken, widened
from rl_platform.engines.rollout.decoder import RowOperations
from rl_platform.models.decoder_layers import RMSNormModule

FEW = 1 << 14  # numbers; waking a second thread takes longer than computing so many
LOG2_E = FLOAT(math.log2(math.e))


class _RowArguments(ctypes.Structure):
    """started: the counter of rows. Other int64 fields: sizes, and addresses of rows side by side in memory."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("started", "rows", "width", "count", "states", "more", "weight", "out")),
        ("epsilon", ctypes.c_double),
    )


class CompiledRows(RowOperations):
    """As `engines.rollout.decoder.RowOperations`, with a float32 residual stream and angles."""

    def residual(self, embedded: Tensor) -> Tensor:
        return embedded.float()

    def norm(self, states: Tensor, module: RMSNormModule, more: Tensor | None = None) -> Tensor:
        weight, epsilon = module.weight, module.variance_epsilon
        out = torch.empty_like(states, dtype=weight.dtype)
        assert states.dtype == torch.float32
        assert states.is_contiguous()
        assert weight.is_contiguous()
        assert more is None or more.is_contiguous()
        _run(
            "norm",
            states.numel(),
            rows=len(states),
            width=states.shape[-1],
            states=states.data_ptr(),
            more=0 if more is None else more.data_ptr(),
            weight=weight.data_ptr(),
            epsilon=epsilon,
            out=out.data_ptr(),
        )
        return out

    def rotate(self, heads: Tensor, count: int, cos: Tensor, sin: Tensor) -> Tensor:
        assert heads.is_contiguous()
        assert cos.dtype == sin.dtype == torch.float32
        assert cos.is_contiguous()
        assert sin.is_contiguous()
        rows, width, size = heads.shape
        _run(
            "rotate",
            rows * count * size,
            rows=rows,
            width=size,
            count=count,
            states=heads.data_ptr(),
            more=cos.data_ptr(),
            weight=sin.data_ptr(),
            out=width * size * heads.itemsize,
        )
        return heads

    def gated(self, gate_up: Tensor) -> Tensor:
        rows, width = gate_up.shape
        out = gate_up.new_empty(rows, width // 2)
        assert gate_up.is_contiguous()
        _run("gated", out.numel(), rows=rows, width=width // 2, states=gate_up.data_ptr(), out=out.data_ptr())
        return out


def norm_backward(gradient: Tensor, of_outputs: Tensor, states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Adds the gradient of the norm's inputs to `gradient` [N,H] in place; returns that of the weight [H].

    states, of_outputs [N,H] float32; `of_outputs` is overwritten. weight [H] bfloat16.
    """
    for tensor in (gradient, of_outputs, states):
        assert tensor.is_contiguous()
        assert tensor.dtype == torch.float32
    _run(
        "norm_backward",
        states.numel(),
        rows=len(states),
        width=states.shape[1],
        states=states.data_ptr(),
        more=of_outputs.data_ptr(),
        weight=weight.data_ptr(),
        epsilon=epsilon,
        out=gradient.data_ptr(),
    )
    return of_outputs.sum(dim=0)


def gated_backward(of_product: Tensor, gate_up: Tensor) -> Tensor:
    """of_product [N,I] is the gradient of silu(gate) up -> gradient [N,2I] of gate and up; all bfloat16."""
    out, (rows, width) = torch.empty_like(gate_up), of_product.shape
    assert gate_up.is_contiguous()
    assert of_product.is_contiguous()
    _run(
        "gated_backward",
        out.numel(),
        rows=rows,
        width=width,
        states=gate_up.data_ptr(),
        more=of_product.data_ptr(),
        out=out.data_ptr(),
    )
    return out


def _run(name: str, numbers: int, **arguments: float) -> None:
    call = _RowArguments(**arguments)
    threads = 1 if numbers < FEW else torch.get_num_threads()
    run_by_team(_address(name), ctypes.addressof(call), threads)


@cache
def _address(name: str) -> int:
    loops = {
        "norm": _norm,
        "norm_backward": _norm_backward,
        "rotate": _rotate,
        "gated": _gated,
        "gated_backward": _gated_backward,
    }
    return address_of(loops[name], _RowArguments)


def _norm(pointer: object) -> None:
    """states += more; out = states / sqrt(mean(states^2) + epsilon) * weight."""
    call = carray(pointer, 1)[0]
    rows, width = call.rows, call.width
    weight = carray(at(call.weight), width, BITS)
    row = taken(pointer)
    while row < rows:
        states = carray(at(call.states + 4 * row * width), width, FLOAT)
        out = carray(at(call.out + 2 * row * width), width, BITS)
        if call.more != 0:
            more = carray(at(call.more + 2 * row * width), width, BITS)
            for place in range(width):
                states[place] += widened(more[place])
        squares = FLOAT(0)
        for place in range(width):
            squares += states[place] * states[place]
        scale = FLOAT(1) / np.sqrt(squares / FLOAT(width) + FLOAT(call.epsilon))
        for place in range(width):
            out[place] = rounded(states[place] * scale * widened(weight[place]))
        row = taken(pointer)


def _norm_backward(pointer: object) -> None:
    """dx += r (w dy - z mean(w dy z)) and dy = dy z, with z = x r and r = 1 / sqrt(mean(x^2) + epsilon)."""
    call = carray(pointer, 1)[0]
    rows, width = call.rows, call.width
    weight = carray(at(call.weight), width, BITS)
    row = taken(pointer)
    while row < rows:
        states = carray(at(call.states + 4 * row * width), width, FLOAT)
        of_outputs = carray(at(call.more + 4 * row * width), width, FLOAT)
        gradient = carray(at(call.out + 4 * row * width), width, FLOAT)
        squares, inner = FLOAT(0), FLOAT(0)
        for place in range(width):
            squares += states[place] * states[place]
            inner += widened(weight[place]) * of_outputs[place] * states[place]
        scale = FLOAT(1) / np.sqrt(squares / FLOAT(width) + FLOAT(call.epsilon))
        mean = inner * scale / FLOAT(width)
        for place in range(width):
            scaled = states[place] * scale
            gradient[place] += scale * (widened(weight[place]) * of_outputs[place] - scaled * mean)
            of_outputs[place] *= scaled
        row = taken(pointer)


def _rotate(pointer: object) -> None:
    """x = x cos + (-x2, x1) sin for the first `count` heads of each row; `out`: bytes from row to row."""
    call = carray(pointer, 1)[0]
    size, half = call.width, call.width // 2
    row = taken(pointer)
    while row < call.rows:
        cos = carray(at(call.more + 4 * row * size), size, FLOAT)
        sin = carray(at(call.weight + 4 * row * size), size, FLOAT)  # its first half is negated
        for head in range(call.count):
            numbers = carray(at(call.states + row * call.out + 2 * head * size), size, BITS)
            for place in range(half):
                first, second = widened(numbers[place]), widened(numbers[half + place])
                low = first * cos[place] + second * sin[place]
                high = second * cos[half + place] + first * sin[half + place]
                numbers[place], numbers[half + place] = rounded(low), rounded(high)
        row = taken(pointer)


def _gated(pointer: object) -> None:
    """out = silu(gate) up, with silu(x) = x / (1 + e^-x)."""
    call = carray(pointer, 1)[0]
    width = call.width
    row = taken(pointer)
    while row < call.rows:
        gate = carray(at(call.states + 4 * row * width), width, BITS)
        up = carray(at(call.states + 4 * row * width + 2 * width), width, BITS)
        out = carray(at(call.out + 2 * row * width), width, BITS)
        for place in range(width):
            x = widened(gate[place])
            small = power(-abs(x) * LOG2_E)  # e^-|x|
            share = (FLOAT(1) if x >= FLOAT(0) else small) / (FLOAT(1) + small)
            out[place] = rounded(x * share * widened(up[place]))
        row = taken(pointer)


def _gated_backward(pointer: object) -> None:
    """d up = dp silu(x) and d x = dp up s (1 + x (1 - s)), with s = 1 / (1 + e^-x)."""
    call = carray(pointer, 1)[0]
    width = call.width
    row = taken(pointer)
    while row < call.rows:
        gate = carray(at(call.states + 4 * row * width), width, BITS)
        up = carray(at(call.states + 4 * row * width + 2 * width), width, BITS)
        of_product = carray(at(call.more + 2 * row * width), width, BITS)
        of_gate = carray(at(call.out + 4 * row * width), width, BITS)
        of_up = carray(at(call.out + 4 * row * width + 2 * width), width, BITS)
        for place in range(width):
            x, given = widened(gate[place]), widened(of_product[place])
            small = power(-abs(x) * LOG2_E)  # e^-|x|
            share = (FLOAT(1) if x >= FLOAT(0) else small) / (FLOAT(1) + small)
            of_up[place] = rounded(given * x * share)
            of_gate[place] = rounded(given * widened(up[place]) * share * (FLOAT(1) + x * (FLOAT(1) - share)))
        row = taken(pointer)
