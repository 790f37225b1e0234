"""Weights in memory that another process reads: written in buckets, handed over as handles, not as bytes."""

from __future__ import annotations

import io
import threading
from collections.abc import Mapping
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing
from torch import Tensor

BUCKET = 256 * 2**20  # bytes
_sharing = threading.Lock()


class SharedWeights:
    """Room for one set of weights, made at the first `write` and used again."""

    def __init__(self) -> None:
        self._views: list[dict[str, Tensor]] = []

    def write(self, state: Mapping[str, Tensor], copies: int) -> list[list[bytes]]:
        """Per bucket, `copies` times the handles of [(name, tensor)]: every process that reads takes one of them.

        Tensors on a CPU are copied into shared memory; those on a GPU are handed over as they are, by CUDA IPC.
        """
        on_host = {name: tensor.detach() for name, tensor in state.items() if tensor.device.type == "cpu"}
        if on_host and not self._views:
            self._views = [_views(bucket) for bucket in buckets(on_host)]
        for views in self._views:
            for name, view in views.items():
                view.copy_(on_host[name])
        elsewhere = [(name, tensor.detach()) for name, tensor in state.items() if name not in on_host]
        parts = [list(views.items()) for views in self._views] + ([elsewhere] if elsewhere else [])
        return [[_handles(part) for _ in range(copies)] for part in parts]


def buckets(state: Mapping[str, Tensor], limit: int = BUCKET) -> list[dict[str, Tensor]]:
    """The tensors in order, parted where `limit` bytes would be exceeded; a larger tensor has a bucket to itself."""
    parted: list[dict[str, Tensor]] = []
    filled = limit
    for name, tensor in state.items():
        if filled + tensor.nbytes > limit:
            parted.append({})
            filled = 0
        parted[-1][name] = tensor
        filled += tensor.nbytes
    return parted


def _views(bucket: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors alike, in one piece of shared memory; each begins at a multiple of 64 bytes."""
    starts, end = {}, 0
    for name, tensor in bucket.items():
        starts[name], end = end, end + -(-tensor.nbytes // 64) * 64
    with _by_name():
        memory = torch.empty(end, dtype=torch.uint8).share_memory_()
    return {
        name: memory[start : start + bucket[name].nbytes].view(bucket[name].dtype).view(bucket[name].shape)
        for name, start in starts.items()
    }


def _handles(tensors: list[tuple[str, Tensor]]) -> bytes:
    buffer = io.BytesIO()
    with _by_name():
        ForkingPickler(buffer).dump(tensors)
    return buffer.getvalue()


class _by_name:
    """Shared memory with names: torch's file descriptors reach only processes that multiprocessing started."""

    def __enter__(self) -> None:
        _sharing.acquire()
        self._before = torch.multiprocessing.get_sharing_strategy()
        torch.multiprocessing.set_sharing_strategy("file_system")

    def __exit__(self, *_: object) -> None:
        torch.multiprocessing.set_sharing_strategy(self._before)
        _sharing.release()
