"""Published weights on their way to another process: what the transfers have in common.

A rank of a learner publishes weights; within its process they are passed by reference. For other processes there are
two transfers behind one interface: the object store (`store`) and a process group (`group`). `publications` chooses.
Both compare checksums, except groups with SGLang's processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import xxhash
from torch import Tensor

from rl_platform.errors import WorkerError
from rl_platform.records import Weights

BUCKET = 32 * 2**20  # bytes: an object of the store costs as much as copying ten million of them
ROW = 4096  # bytes that are summed up together
CACHED = 256 * 2**10  # bytes: what a core has in its cache

Ask = Callable[[object], Any]  # sends a request to the process of the sender; returns the answer of its transfer
Received = TypeVar("Received", covariant=True)


@dataclass(frozen=True)
class WeightsToken:
    """Published weights on their way: whose they are, which of its publications, and their version.

    copies: the same weights as other ranks of a learner have published them. tensors: those that can be sent
    to a process group, on `device` (see `WeightsOffer`); None: they are not offered to one. held: the host has the
    tensors; else only the object store has. receivers: how many get the token at the same time, and join one group.
    """

    host: str
    label: str
    number: int
    version: int
    delta: bool
    copies: tuple[WeightsToken, ...] = ()
    tensors: tuple[TensorShape, ...] | None = None
    device: str = "cpu"
    held: bool = True
    receivers: int = 1

    def at(self, host: str) -> WeightsToken | None:
        """The publication in the process of `host`, if there is one."""
        return next((token for token in (self, *self.copies) if token.host == host and token.held), None)


class WeightTransfer(Protocol[Received]):
    """One way of published weights from the process of their rank into another process.

    `publish` runs at the sender, between two calls of the rank. `receive` runs at the receiver.
    """

    def publish(self, token: WeightsToken, state: Mapping[str, Tensor], request: Any) -> object:
        """Makes the state available to the receiver that sent `request`; returns the answer to it."""

    def receive(self, token: WeightsToken, ask: Ask) -> Received | None:
        """The weights; None if this transfer does not reach the sender. `ask(request)` returns what `publish` does.

        Raises WorkerError unless all of it arrived as it was sent.
        """


def merge_published(published: Sequence[Weights | WeightsToken]) -> Weights | WeightsToken:
    """One token for the publications of all ranks of a learner: a receiver reads from the rank in its own process."""
    first = published[0]
    copies = tuple(token for token in published[1:] if token.held) if isinstance(first, WeightsToken) else ()
    return replace(first, copies=copies) if isinstance(first, WeightsToken) else first


@dataclass(frozen=True)
class TensorShape:
    """A tensor of the state; `same_as`: the name of an earlier one that it shares its memory with."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    same_as: str | None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def shapes_of(state: Mapping[str, Tensor]) -> tuple[TensorShape, ...]:
    first: dict[Hashable, str] = {}
    shapes = []
    for name, tensor in state.items():
        shape = tuple(tensor.shape)
        place = (tensor.data_ptr(), tensor.dtype, shape, tensor.stride(), tensor.device) if tensor.numel() else name
        same_as = first.setdefault(place, name)
        shapes.append(TensorShape(name, tensor.dtype, shape, None if same_as == name else same_as))
    return tuple(shapes)


def empty(tensors: Sequence[TensorShape], device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """A state of these tensors, whatever their content."""
    state: dict[str, Tensor] = {}
    for tensor in tensors:
        known = state.get(str(tensor.same_as))
        state[tensor.name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=device) if known is None else known
    return state


def damaged(token: WeightsToken) -> WorkerError:
    return WorkerError(f"weights version {token.version} of {token.label} arrived damaged: their checksum differs")


@dataclass(frozen=True)
class TensorSlice:
    """Bytes `start` to `stop` of a tensor."""

    name: str
    start: int
    stop: int


def in_buckets(
    tensors: Iterable[tuple[str, np.ndarray]], room: int
) -> Iterator[tuple[tuple[TensorSlice, ...], list[np.ndarray]]]:
    """The bytes of named tensors in order, `room` in each bucket; tensors are produced one at a time."""
    pieces: list[TensorSlice] = []
    parts: list[np.ndarray] = []
    size = 0
    for name, flat in tensors:
        start = 0
        while start < flat.size:
            stop = min(flat.size, start + room - size)
            pieces.append(TensorSlice(name, start, stop))
            parts.append(flat[start:stop])
            start, size = stop, size + stop - start
            if size == room:
                yield tuple(pieces), parts
                pieces, parts, size = [], [], 0
    if pieces:
        yield tuple(pieces), parts


def bytes_of(tensor: Tensor) -> np.ndarray:
    """[bytes] uint8, over the tensor's memory if that is contiguous and on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def checksum(tensor: Tensor) -> bytes:
    """Of a contiguous tensor's bytes. On a GPU it is that of sums over rows and columns of them, which are taken there:
    bringing all of it here would take longer than sending it."""
    return checksum_of([bytes_of(tensor)] if tensor.device.type == "cpu" else _sums(tensor))


def _sums(tensor: Tensor) -> list[np.ndarray]:
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    whole = flat.numel() // ROW * ROW
    table = flat[:whole].view(-1, ROW)
    return [bytes_of(part) for part in (table.sum(0), table.sum(1), flat[whole:])]


def copy_checked(sent: Sequence[object], parts: Sequence[np.ndarray]) -> bytes:
    """Copies buffers into `parts`; the checksum of what is there then, read while it is still in the cache."""
    hasher = xxhash.xxh3_128()
    for buffer, part in zip(sent, parts, strict=True):
        source = np.frombuffer(buffer, np.uint8)
        if source.size != part.size:
            return b""
        for start in range(0, part.size, CACHED):
            here = slice(start, start + CACHED)
            part[here] = source[here]
            hasher.update(part[here])
    return hasher.digest()


def checksum_of(parts: Sequence[np.ndarray]) -> bytes:
    """128 bits of XXH3, at the speed of memory; equal sums mean equal bytes, up to a chance of 1 in 10^38."""
    hasher = xxhash.xxh3_128()
    for part in parts:
        hasher.update(part)
    return hasher.digest()
