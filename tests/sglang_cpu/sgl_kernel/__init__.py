"""The function of sgl-kernel that a plain engine calls on a CPU, and the pinning of the memory that routes go to.

Every process that imports SGLang imports this package before it starts others.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from forks import fork_processes
from torch import Tensor

if not torch.cuda.is_available():
    if os.environ.get("START_METHOD") != "spawn":
        fork_processes()
    torch.cuda.cudart = lambda: SimpleNamespace(cudaHostRegister=lambda *_: 0)


def assign_req_to_token_pool_cpu(
    requests: Tensor, table: Tensor, starts: Tensor, ends: Tensor, locations: Tensor, _width: int
) -> None:
    """table[r, start:end] = the next (end - start) of `locations`, for each request r in turn."""
    taken = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[request, start:end] = locations[taken : taken + end - start].to(table.dtype)
        taken += end - start


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is not there on a CPU")

    missing.__name__ = name
    return missing
