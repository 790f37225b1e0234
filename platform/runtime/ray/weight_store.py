"""Published weights in Ray's object store, in buckets of bounded size with a checksum each.

The sender stores each bucket once for all receivers. A receiver copies the buckets into its own tensors, so each side
needs memory for one bucket or one tensor beside the weights. With `delta`, a sender stores only buckets that changed
since its last publication. A receiver loads the buckets that differ from its own tensors, also those of publications
that it skipped.

Sharded weights of a learner are stored when they are published (`publish_gathered`), because their receivers are not
determined yet. Weights that stay readable beside newer ones are stored too (`publish_now`). Tensors on an accelerator
are copied through main memory, on a GPU through one pinned bucket.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
import xxhash
from torch import Tensor

from rl_platform.errors import WorkerError
from rl_platform.records import Weights
from rl_platform.runtime.ray.serialization import Buffer
from rl_platform.runtime.waits import caller
from rl_platform.runtime.weights.weight_transfer import (
    Ask,
    TensorShape,
    bytes_of,
    checksum_of,
    empty,
    shapes_of,
    shapes_under,
)
from rl_platform.runtime.weights_token import WeightsToken

if TYPE_CHECKING:
    from rl_platform.runtime.ray.transport import RayTransport


BUCKET = 32 * 2**20  # bytes: an object of the store costs as much as copying ten million of them
CACHED = 256 * 2**10  # bytes: the size of a core's cache


@dataclass(frozen=True)
class TensorSlice:
    """Bytes `start` to `stop` of a tensor."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """Slices of tensors that are one object of the store, in this order."""

    pieces: tuple[TensorSlice, ...]
    checksum: bytes
    reference: object


@dataclass(frozen=True)
class StoreManifest:
    """The tensors of one publication, and the objects that hold their bytes."""

    tensors: tuple[TensorShape, ...]
    buckets: tuple[Bucket, ...]


class Bytes(Protocol):
    """The bytes of a tensor, which are read in order, slice by slice."""

    @property
    def size(self) -> int: ...

    def __getitem__(self, place: slice, /) -> np.ndarray: ...


class PinnedBucket:
    """A pinned buffer for the slices of one bucket that are on a GPU.

    A copy to pinned memory has the speed of the link. A whole tensor in new pageable memory takes several times as
    long, because each page is first allocated and filled with zeros.
    """

    def __init__(self) -> None:
        self._buffer: Tensor | None = None  # allocated at the first copy, as only GPUs need it
        self._used = 0

    def begin(self) -> None:
        """Begins the next bucket, which overwrites this one."""
        self._used = 0

    def copy(self, flat: Tensor) -> np.ndarray:
        """Returns a copy of bytes [n]. The copies of one bucket have at most `BUCKET` bytes together."""
        if self._buffer is None:
            self._buffer = torch.empty(BUCKET, dtype=torch.uint8, pin_memory=True)
        place = slice(self._used, self._used + len(flat))
        self._used = place.stop
        return self._buffer[place].copy_(flat).numpy()


class BytesOnGPU:
    """`Bytes` of a tensor on a GPU: a slice of them is copied to `bucket`."""

    def __init__(self, tensor: Tensor, bucket: PinnedBucket) -> None:
        self._flat, self._bucket = tensor.detach().contiguous().reshape(-1).view(torch.uint8), bucket
        self.size = len(self._flat)

    def __getitem__(self, place: slice, /) -> np.ndarray:
        return self._bucket.copy(self._flat[place])


class StoreTransfer:
    """The sender and the receiver of the transfer in one process."""

    def __init__(self, transport: RayTransport) -> None:
        self._transport = transport
        self._last: dict[str, StoreManifest] = {}  # by rank: its previous publication with `delta`
        self._stored: dict[
            str, dict[int, StoreManifest]
        ] = {}  # by rank and number: those that `publish_now` and `publish_gathered` stored
        self._received: dict[tuple[str, str], dict[str, Tensor]] = {}

    def publish(self, token: WeightsToken, state: Mapping[str, Tensor], request: None = None) -> StoreManifest:
        manifest = publish(state, self._transport, self._last.pop(token.label, None))
        if token.delta:
            self._last[token.label] = manifest
        return manifest

    def publish_now(self, token: WeightsToken, state: Mapping[str, Tensor], readable: int) -> None:
        """Stores a state without a request. The `readable` newest publications of a rank stay readable."""
        before = self._before(token, readable)
        self._stored[token.label][token.number] = publish(state, self._transport, before)

    def publish_gathered(
        self, token: WeightsToken, gathered: Iterable[tuple[Sequence[str], Tensor]], readable: int = 1
    ) -> None:
        """As `publish_now`, for (names, tensor) pairs that are gathered one at a time; no process keeps the tensors."""
        before = self._before(token, readable)
        self._stored[token.label][token.number] = publish_gathered(gathered, self._transport, before)

    def _before(self, token: WeightsToken, readable: int) -> StoreManifest | None:
        """Returns the rank's previous publication if it is reused (`delta`), and frees the oldest ones."""
        stored = self._stored.setdefault(token.label, {})
        last = next(reversed(stored.values()), None) if token.delta else None
        for number in list(stored)[: max(0, len(stored) - readable + 1)]:
            del stored[number]
        return last

    def stored(self, token: WeightsToken) -> StoreManifest | None:
        """Returns the manifest of weights that were stored when they were published; None for others."""
        return self._stored.get(token.label, {}).get(token.number)

    def receive(self, token: WeightsToken, ask: Ask) -> Weights:
        """Returns a copy of the weights. With `delta` the next call overwrites it."""
        key = caller(), token.label
        weights = receive(token, ask(None), self._transport, self._received.get(key) if token.delta else None)
        if token.delta:
            self._received[key] = dict(weights.state)
        return weights


def publish(state: Mapping[str, Tensor], store: RayTransport, before: StoreManifest | None) -> StoreManifest:
    """Puts the state into the object store. before: a publication whose equal buckets are reused."""
    return _put(((tensor, state[tensor.name]) for tensor in shapes_of(state)), store, before)


def publish_gathered(
    gathered: Iterable[tuple[Sequence[str], Tensor]], store: RayTransport, before: StoreManifest | None
) -> StoreManifest:
    """As `publish`, for tensors that are gathered one at a time: memory holds one of them and one bucket."""
    named = ((shape, tensor) for names, tensor in gathered for shape in shapes_under(names, tensor))
    return _put(named, store, before)


def _put(
    named: Iterable[tuple[TensorShape, Tensor]], store: RayTransport, before: StoreManifest | None
) -> StoreManifest:
    tensors: list[TensorShape] = []
    pinned = PinnedBucket()

    def flat() -> Iterator[tuple[str, Bytes]]:
        for shape, tensor in named:
            tensors.append(shape)
            if shape.same_as is None:
                yield shape.name, BytesOnGPU(tensor, pinned) if tensor.is_cuda else bytes_of(tensor)

    known = {bucket.pieces: bucket for bucket in before.buckets} if before is not None else {}
    buckets: list[Bucket] = []
    for pieces, parts in in_buckets(flat(), BUCKET):
        checksum, old = checksum_of(parts), known.get(pieces)
        if old is None or old.checksum != checksum:
            old = Bucket(pieces, checksum, store.store([pickle.PickleBuffer(part.data) for part in parts]))
        buckets.append(old)
        pinned.begin()
    return StoreManifest(tuple(tensors), tuple(buckets))


def receive(
    token: WeightsToken, manifest: StoreManifest, store: RayTransport, own: Mapping[str, Tensor] | None
) -> Weights:
    """Returns the weights in the receiver's own tensors. own: those of an earlier version on the CPU, to overwrite.

    Raises WorkerError for a damaged transfer; `own` is then incomplete.
    """
    keeps = own is not None and shapes_of(own) == manifest.tensors
    state = dict(own) if own is not None and keeps else empty(manifest.tensors)
    flat = {tensor.name: bytes_of(state[tensor.name]) for tensor in manifest.tensors}
    size = count = 0
    for bucket in manifest.buckets:
        parts = [flat[piece.name][piece.start : piece.stop] for piece in bucket.pieces]
        if token.delta and keeps and checksum_of(parts) == bucket.checksum:
            continue
        (sent,) = store.load([bucket.reference])
        if copy_checked(sent, parts) != bucket.checksum:
            message = f"weights version {token.version} of {token.label} arrived damaged: their checksum differs"
            raise WorkerError(message)
        size, count = size + sum(part.nbytes for part in parts), count + 1
    return Weights(token.version, state, token.delta, bytes=size, buckets=count)


def in_buckets(
    tensors: Iterable[tuple[str, Bytes]], room: int
) -> Iterator[tuple[tuple[TensorSlice, ...], list[np.ndarray]]]:
    """Yields the bytes of named tensors in order, `room` bytes in each bucket; takes one tensor at a time."""
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


def copy_checked(sent: Sequence[Buffer], parts: Sequence[np.ndarray]) -> bytes:
    """Copies buffers into `parts`; returns the checksum of the copies, which are read while they are in the cache."""
    hasher = xxhash.xxh3_128()
    for buffer, part in zip(sent, parts, strict=True):
        source = np.frombuffer(memoryview(buffer), np.uint8)
        if source.size != part.size:
            return b""
        for start in range(0, part.size, CACHED):
            here = slice(start, start + CACHED)
            part[here] = source[here]
            hasher.update(part[here].data)
    return hasher.digest()
