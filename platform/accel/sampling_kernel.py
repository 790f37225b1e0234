"""Sampling from logits as one compiled loop: float32 or bfloat16, on a CPU, without filters.

A row is read three times while it is in a core's cache. The passes compute the largest logit, the weights' sums over
blocks of BLOCK tokens, and the token within the selected block. No probabilities are stored. One thread computes a row.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from numba import carray
from torch import Tensor

from rl_platform.accel.compiling import Array
from rl_platform.accel.openmp_team import run_by_team
from rl_platform.accel.tensor_loops import (
    FLOAT,
    STORED_AS,
    address_of,
    at,
    from_ordered,
    inlined,
    ordered,
    power,
    taken,
    widened,
)
from rl_platform.records import SamplingParams

BLOCK = 64  # tokens


class _SamplingArguments(ctypes.Structure):
    """started: the counter of rows. Other int64 fields: sizes and addresses. factor: of logits, 0: the largest one."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("started", "rows", "width", "row", "logits", "uniform")),
        *((name, ctypes.c_int64) for name in ("tokens", "log_probs")),
        ("factor", ctypes.c_double),
    )


def compiled_sample(logits: Tensor, uniform: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """As `engines.rollout.sampling.sample`; `sampling` must have neither top-k nor top-p."""
    assert logits.stride(1) == 1
    assert uniform.is_contiguous()
    rows, width = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64)
    log_probs = torch.empty(rows, dtype=torch.float32)
    call = _SamplingArguments(
        rows=rows,
        width=width,
        row=logits.stride(0) * logits.itemsize,
        logits=logits.data_ptr(),
        uniform=uniform.data_ptr(),
        tokens=tokens.data_ptr(),
        log_probs=log_probs.data_ptr(),
        factor=1 / sampling.temperature if sampling.temperature else 0.0,
    )
    run_by_team(_address(logits.dtype), ctypes.addressof(call), torch.get_num_threads())
    return tokens, log_probs


@cache
def _address(dtype: torch.dtype) -> int:
    return address_of(_loop(STORED_AS[dtype]), _SamplingArguments)


@inlined
def _weight(logit: float, top: float, factor: float) -> float:
    """2^((logit - top) factor); 0 below 2^-126."""
    exponent = (widened(logit) - top) * factor
    return FLOAT(0) if exponent < FLOAT(-126) else power(exponent)


@inlined
def _block_sums(logits: Array, top: float, factor: float, sums: Array) -> float:
    """logits [V] -> sums [blocks] of the weights, and their total."""
    total = 0.0
    for block in range(len(sums)):
        begin, weights = block * BLOCK, FLOAT(0)
        for token in range(begin, min(begin + BLOCK, len(logits))):
            weights += _weight(logits[token], top, factor)
        sums[block] = weights
        total += np.float64(weights)
    return total


def _loop(stored_as: type[np.generic]) -> Callable[[object], None]:
    """Returns what each thread runs, with the type of the logits as a constant."""

    def sample(pointer: object) -> None:
        call = carray(pointer, 1)[0]
        width = call.width
        uniform = carray(at(call.uniform), call.rows, np.float64)
        tokens = carray(at(call.tokens), call.rows, np.int64)
        log_probs = carray(at(call.log_probs), call.rows, FLOAT)
        sums = np.empty((width + BLOCK - 1) // BLOCK, FLOAT)
        scale = 1.0 if call.factor == 0.0 else call.factor
        factor = FLOAT(scale * math.log2(math.e))
        row = taken(pointer)
        while row < call.rows:
            logits = carray(at(call.logits + row * call.row), width, stored_as)
            highest = ordered(widened(logits[0]))
            for token in range(width):
                highest = max(highest, ordered(widened(logits[token])))
            top = from_ordered(highest)
            total = _block_sums(logits, top, factor, sums)
            chosen = width - 1  # of NaN, for which no comparison holds
            if call.factor == 0.0:
                for token in range(width - 1, -1, -1):
                    chosen = token if widened(logits[token]) == top else chosen
            else:
                # inverse transform: the first token whose cumulative weight exceeds the threshold
                threshold, block, before, start = uniform[row] * total, len(sums) - 1, 0.0, 0.0
                for number in range(len(sums)):
                    if sums[number] > FLOAT(0):
                        block, start = number, before
                        before += np.float64(sums[number])
                        if before > threshold:
                            break
                for token in range(block * BLOCK, min(block * BLOCK + BLOCK, width)):
                    weight = _weight(logits[token], top, factor)
                    if weight > FLOAT(0):
                        chosen = token
                        start += np.float64(weight)
                        if start > threshold:
                            break
            tokens[row] = chosen
            log_probs[row] = FLOAT(np.float64(widened(logits[chosen]) - top) * scale - np.log(total))
            row = taken(pointer)

    return sample
