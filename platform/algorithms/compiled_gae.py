"""Masked GAE as one compiled loop per row, for large batches on a CPU: every number is read once and written once.

Compiling takes about half a second per process, which smaller batches would not win back: gae.py decides. On other
devices, and for other types than float32 and float64, gae.py works in chunks of tensor operations.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

ROWS_AT_ONCE = 64  # per thread and piece of work: few enough that no thread waits long for the last one


def compiles(values: Tensor) -> bool:
    """Whether there is a compiled loop for such tensors."""
    return values.device.type == "cpu" and values.dtype in (torch.float32, torch.float64)


def compiled_gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float | Tensor
) -> tuple[Tensor, Tensor]:
    """As `gae` of gae.py with one episode per row; all tensors [B,T] on the CPU, `values` as `compiles` wants them."""
    numbers = values.numpy().dtype.type
    lambdas = np.broadcast_to(np.asarray(lam, dtype=numbers), len(values))
    inputs = [rewards.detach().to(values.dtype).numpy(), values.detach().numpy(), mask.numpy(), lambdas]
    estimated, returns = torch.empty_like(values), torch.empty_like(values)
    outputs = [estimated.numpy(), returns.numpy()]

    def scan(start: int) -> None:
        rows = slice(start, start + ROWS_AT_ONCE)
        _loop()(numbers(gamma), *(array[rows] for array in (*inputs, *outputs)))

    with ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="gae") as threads:
        list(threads.map(scan, range(0, len(values), ROWS_AT_ONCE)))
    return estimated, returns


@cache
def _loop() -> Callable[..., None]:
    import numba  # here, as most runs never need it

    # "contract" allows fused multiply-add, and nothing that would let NaN or the order of additions change.
    compiled: Callable[..., None] = numba.njit(nogil=True, fastmath={"contract"})(_scan_rows)
    return compiled


def _scan_rows(gamma: Any, rewards: Any, values: Any, mask: Any, lambdas: Any, estimated: Any, returns: Any) -> None:
    """Arrays [B,T] and [B], row by row from the end. Selects instead of branches: random masks are not predictable."""
    zero = gamma * 0
    for row in range(values.shape[0]):
        carry = gamma * lambdas[row]
        following = advantage = zero
        for t in range(values.shape[1] - 1, -1, -1):
            active, value = mask[row, t], values[row, t]
            candidate = rewards[row, t] + gamma * following - value + carry * advantage
            advantage = candidate if active else advantage
            following = value if active else following
            estimated[row, t] = candidate if active else zero
            returns[row, t] = candidate + value if active else zero
