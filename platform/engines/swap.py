"""Tensors that leave their device for host memory and come back to the same place.

A tensor's storage on the device is emptied, not the tensor replaced: parameters, their views, optimizer state and what
a sharding library keeps of them stay the objects they are. Where the device is a CPU, the copy and the freed memory are
of the same kind: everything happens as on a GPU, and nothing is saved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_platform.tracing import recorder


@dataclass
class _HostCopy:
    """A storage of the device and what it held, as bytes; its size now is 0, or as it was."""

    storage: torch.UntypedStorage
    host: Tensor


class Swap:
    """`tensors`: those that are on `device`, asked for at every departure, since optimizers make their state late;
    those on other devices stay. `constant`: they never change, so one copy is enough.

    Tensors may share storages, and DTensors stand for this rank's part.
    """

    def __init__(
        self, tensors: Callable[[], Iterable[Tensor]], device: torch.device, *, constant: bool = False
    ) -> None:
        self._tensors, self._device, self._constant = tensors, device, constant
        self._kept: dict[int, _HostCopy] = {}
        self.away = False

    def leave(self) -> None:
        """Copy to host memory and free the device's; while away, does nothing."""
        if self.away:
            return
        before, self._kept = self._kept, {}
        for tensor in self._tensors():
            storage = _own_storage(tensor, self._device)
            if storage is None or storage.nbytes() == 0 or storage._cdata in self._kept:
                continue
            known = before.get(storage._cdata)
            kept = known or _HostCopy(storage, self._host_buffer(storage.nbytes()))
            self._kept[storage._cdata] = kept
            if known is None or not self._constant:
                kept.host.copy_(_as_bytes(storage), non_blocking=True)
        self._wait()
        for kept in self._kept.values():
            kept.storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # else other processes of the GPU would gain nothing
        self.away = True

    def enter(self) -> None:
        """Back to the device, as a span of the timeline; while there, does nothing. The host's memory is kept."""
        if not self.away:
            return
        began = time.monotonic()
        for kept in self._kept.values():
            kept.storage.resize_(len(kept.host))
            _as_bytes(kept.storage).copy_(kept.host, non_blocking=True)
        self._wait()
        self.away = False
        recorder.add("call", "onload", began)

    def _host_buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def storages(tensors: Iterable[Tensor], device: torch.device) -> dict[int, torch.UntypedStorage]:
    """The storages behind these tensors on `device`, each once; those of tensors that left have 0 bytes."""
    candidates = (storage_of(tensor, device) for tensor in tensors)
    return {storage._cdata: storage for storage in candidates if storage is not None}


def storage_of(tensor: Tensor, device: torch.device) -> torch.UntypedStorage | None:
    """The storage behind a tensor, None if it is on a device of another kind."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.untyped_storage() if local.device.type == device.type else None


def _own_storage(tensor: Tensor, device: torch.device) -> torch.UntypedStorage | None:
    """The same, of memory that can be freed: a tensor on a mapped file or a received message gets a storage first."""
    storage = storage_of(tensor, device)
    if storage is not None and not storage.resizable():
        assert not hasattr(tensor, "to_local"), "shards are made on memory of their own"
        tensor.data = tensor.data.clone()
        storage = tensor.untyped_storage()
    return storage


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
