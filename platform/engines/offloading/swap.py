"""Swaps tensors between their device and host memory.

Swapping out resizes a tensor's storage to 0 and keeps the tensor object, so that views, optimizer state and references
held by a sharding library stay valid. On a CPU the same steps run, but save no memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_platform.tracing import recorder

SMALLEST_PINNED = 2**20  # bytes: a smaller buffer may be rounded up


@dataclass
class _HostCopy:
    """A device storage, of its full size or of size 0, and a copy of its bytes in host memory, in parts."""

    storage: torch.UntypedStorage
    host: list[Tensor]

    @property
    def sizes(self) -> list[int]:
        return [len(part) for part in self.host]


class Swap:
    """Moves tensors on `device` to host memory and back.

    `tensors` is called at every `leave`, because optimizers create their state late; tensors on other devices stay.
    `constant`: the values never change, so they are copied once. `unneeded`: tensors whose values are not used after
    their return; their memory is freed and allocated again without a copy. Tensors may share storages; of a DTensor
    this rank's part is moved.
    """

    def __init__(
        self,
        tensors: Callable[[], Iterable[Tensor]],
        device: torch.device,
        *,
        constant: bool = False,
        unneeded: Callable[[], Iterable[Tensor]] = tuple,
    ) -> None:
        self._tensors, self._device, self._constant, self._unneeded = tensors, device, constant, unneeded
        self._copies: dict[int, _HostCopy] = {}
        self._freed: list[tuple[torch.UntypedStorage, int]] = []
        self.away = False

    def leave(self) -> None:
        """Copies the tensors to host memory and frees the device's. Does nothing if they are away."""
        if self.away:
            return
        before, self._copies = self._copies, {}
        for tensor in self._tensors():
            storage = _own_storage(tensor, self._device)
            if storage is None or storage.nbytes() == 0 or storage._cdata in self._copies:
                continue
            known = before.get(storage._cdata)
            copy = known or _HostCopy(storage, self._host_buffers(storage.nbytes()))
            self._copies[storage._cdata] = copy
            if known is None or not self._constant:
                for part, values in zip(copy.host, torch.split(_as_bytes(storage), copy.sizes), strict=True):
                    part.copy_(values, non_blocking=True)
        self._wait()
        freed = storages(self._unneeded(), self._device).values()
        self._freed = [(storage, storage.nbytes()) for storage in freed if storage._cdata not in self._copies]
        for storage in (*(copy.storage for copy in self._copies.values()), *(storage for storage, _ in self._freed)):
            storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # else the memory stays reserved for this process
        self.away = True

    def enter(self) -> None:
        """Copies the tensors back to the device, as a span of the trace. Does nothing if they are there.

        The host copies stay allocated for the next `leave`.
        """
        if not self.away:
            return
        began = time.monotonic()
        for storage, size in self._freed:
            storage.resize_(size)
        for copy in self._copies.values():
            copy.storage.resize_(sum(copy.sizes))
            for part, values in zip(copy.host, torch.split(_as_bytes(copy.storage), copy.sizes), strict=True):
                values.copy_(part, non_blocking=True)
        self._wait()
        self.away = False
        recorder.add("call", "onload", began)

    def _host_buffers(self, size: int) -> list[Tensor]:
        pinned = self._device.type == "cuda"
        return [torch.empty(part, dtype=torch.uint8, pin_memory=pinned) for part in pinned_sizes(size)]

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def pinned_sizes(size: int) -> list[int]:
    """Returns sizes of buffers that together hold `size` bytes: powers of two, and a rest.

    torch rounds the size of a pinned buffer up to a power of two, so a single buffer might waste half of its memory.

    >>> [size // 2**20 for size in pinned_sizes(11 * 2**20 + 5)]
    [8, 2, 1, 0]
    """
    sizes = []
    while size >= SMALLEST_PINNED:
        sizes.append(1 << (size.bit_length() - 1))
        size -= sizes[-1]
    return [*sizes, size] if size else sizes


def storages(tensors: Iterable[Tensor], device: torch.device) -> dict[int, torch.UntypedStorage]:
    """Returns the distinct storages of these tensors on `device`, by address; 0 bytes if they are swapped out."""
    candidates = (storage_of(tensor, device) for tensor in tensors)
    return {storage._cdata: storage for storage in candidates if storage is not None}


def storage_of(tensor: Tensor, device: torch.device) -> torch.UntypedStorage | None:
    """Returns the storage of a tensor; None if it is on another type of device."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.untyped_storage() if local.device.type == device.type else None


def _own_storage(tensor: Tensor, device: torch.device) -> torch.UntypedStorage | None:
    """As `storage_of`, but resizable: a tensor in a mapped file or a received message is first copied."""
    storage = storage_of(tensor, device)
    if storage is not None and not storage.resizable():
        assert not hasattr(tensor, "to_local"), "the storage of a shard is resizable"
        tensor.data = tensor.data.clone()
        storage = tensor.untyped_storage()
    return storage


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
