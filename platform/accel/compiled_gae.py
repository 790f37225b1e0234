"""Masked GAE as one compiled loop per row, on a CPU, for float32 and float64. Every number is read and written once.

algorithms/gae.py selects it for large batches, which win back the time of compiling, and for embodied runs, which
compile other loops anyway.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from rl_platform.accel.compiling import Array, compiled_loops

ROWS_AT_ONCE = 64  # per thread and piece of work: few enough that no thread waits long for the last one


def compiles(values: Tensor) -> bool:
    """Returns whether there is a compiled loop for such tensors."""
    return values.device.type == "cpu" and values.dtype in (torch.float32, torch.float64)


def compiled_gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float | Tensor,
    ends: Tensor | None = None,
    end_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `gae` of algorithms/gae.py; all tensors [B,T] on the CPU, `values` of a type that `compiles` accepts."""
    # float64: 0.999 as float32 is off by 1e-8, which |V| of 10^4 turns into an error of each advantage
    lambdas = np.broadcast_to(np.asarray(lam, dtype=np.float64), len(values))
    estimated, returns = torch.empty_like(values), torch.empty_like(values)
    inputs = [rewards.detach().to(values.dtype), values.detach(), mask]
    arrays = [*(tensor.numpy() for tensor in inputs), lambdas, estimated.numpy(), returns.numpy()]
    if ends is not None and end_values is not None:
        arrays += [ends.numpy(), end_values.detach().to(values.dtype).numpy()]

    def scan(start: int) -> None:
        rows = slice(start, start + ROWS_AT_ONCE)
        _scan_rows()(np.float64(gamma), *(array[rows] for array in arrays))

    starts, count = range(0, len(values), ROWS_AT_ONCE), torch.get_num_threads()
    if min(count, len(starts)) == 1:
        list(map(scan, starts))
    else:
        with ThreadPoolExecutor(count, thread_name_prefix="gae") as threads:
            list(threads.map(scan, starts))
    return estimated, returns


# "contract" allows fused multiply-add, and nothing that would let NaN or the order of additions change
@compiled_loops(frozenset({"contract"}))
def _scan_rows(
    gamma: float,
    rewards: Array,
    values: Array,
    mask: Array,
    lambdas: Array,
    estimated: Array,
    returns: Array,
    ends: Array | None = None,
    end_values: Array | None = None,
) -> None:
    """Arrays [B,T], lambdas [B] -> estimated (advantages) and returns [B,T], row by row from the end.

    Selects instead of branches: random masks are not predictable.
    """
    zero = gamma * 0.0  # float64, like all carried numbers
    for row in range(values.shape[0]):
        carry = gamma * lambdas[row]
        following = advantage = zero
        for t in range(values.shape[1] - 1, -1, -1):
            if ends is not None:
                following = end_values[row, t] if ends[row, t] else following
                advantage = zero if ends[row, t] else advantage
            active, value = mask[row, t], values[row, t]
            candidate = rewards[row, t] + gamma * following - value + carry * advantage
            advantage = candidate if active else advantage
            following = value if active else following
            estimated[row, t] = candidate if active else zero
            returns[row, t] = candidate + value if active else zero
