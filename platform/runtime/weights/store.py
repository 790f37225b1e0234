"""Published weights in the object store, in buckets of bounded size with a checksum each.

The sender stores every bucket once for all receivers. A receiver copies bucket by bucket into tensors of its own, so
neither side needs memory for more than one bucket or one tensor beside the weights. With `delta` buckets are identified
by their content: the sender stores those that changed since its last publication. A receiver loads those that differ
from its own tensors, so it also gets what it missed before.

Weights that the ranks of a learner share go through the object store (`publish_gathered`), because their receivers are
not known when they are published; so do weights that stay readable while newer ones are published (`publish_now`).
Not covered: tensors on an accelerator, which are copied through main memory.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from rl_platform.records import Weights
from rl_platform.runtime.waits import caller
from rl_platform.runtime.weights import weight_transfer
from rl_platform.runtime.weights.weight_transfer import (
    Ask,
    TensorShape,
    TensorSlice,
    WeightsToken,
    bytes_of,
    checksum_of,
    copy_checked,
    damaged,
    empty,
    in_buckets,
    shapes_of,
)

if TYPE_CHECKING:
    from rl_platform.runtime.ray.transport import RayTransport


@dataclass(frozen=True)
class Bucket:
    """Pieces that lie together in the object store, in this order."""

    pieces: tuple[TensorSlice, ...]
    checksum: bytes
    reference: object


@dataclass(frozen=True)
class StoreManifest:
    """One publication: which tensors, and where in the object store their bytes are."""

    tensors: tuple[TensorShape, ...]
    buckets: tuple[Bucket, ...]


class StoreTransfer:
    """Both sides of the transfer in one process."""

    def __init__(self, transport: RayTransport) -> None:
        self._transport = transport
        self._last: dict[str, StoreManifest] = {}  # by rank: its publication before, if it has `delta`
        self._stored: dict[str, dict[int, StoreManifest]] = {}  # by rank and number: stored when they were published
        self._received: dict[tuple[str, str], dict[str, Tensor]] = {}

    def publish(self, token: WeightsToken, state: Mapping[str, Tensor], request: None = None) -> StoreManifest:
        manifest = publish(state, self._transport, self._last.pop(token.label, None))
        if token.delta:
            self._last[token.label] = manifest
        return manifest

    def publish_now(self, token: WeightsToken, state: Mapping[str, Tensor], readable: int) -> None:
        """Stores a state before anybody requests it. The `readable` newest publications of a rank stay readable."""
        before = self._before(token, readable)
        self._stored[token.label][token.number] = publish(state, self._transport, before)

    def publish_gathered(
        self, token: WeightsToken, gathered: Iterable[tuple[Sequence[str], Tensor]], readable: int = 1
    ) -> None:
        """The same of tensors that are there one after the other; no process keeps them."""
        before = self._before(token, readable)
        self._stored[token.label][token.number] = publish_gathered(gathered, self._transport, before)

    def _before(self, token: WeightsToken, readable: int) -> StoreManifest | None:
        """The last publication of the rank, with `delta`. Frees the oldest ones."""
        stored = self._stored.setdefault(token.label, {})
        last = next(reversed(stored.values()), None) if token.delta else None
        for number in list(stored)[: max(0, len(stored) - readable + 1)]:
            del stored[number]
        return last

    def stored(self, token: WeightsToken) -> StoreManifest | None:
        """The answer for weights that were stored when they were published."""
        return self._stored.get(token.label, {}).get(token.number)

    def receive(self, token: WeightsToken, ask: Ask) -> Weights:
        """A copy. With `delta` the next one is written over it."""
        key = caller(), token.label
        weights = receive(token, ask(None), self._transport, self._received.get(key) if token.delta else None)
        if token.delta:
            self._received[key] = dict(weights.state)
        return weights


def publish(state: Mapping[str, Tensor], store: RayTransport, before: StoreManifest | None) -> StoreManifest:
    """Puts the state into the object store. `before`: a publication whose buckets serve again where they are equal."""
    return _put(((tensor, state[tensor.name]) for tensor in shapes_of(state)), store, before)


def publish_gathered(
    gathered: Iterable[tuple[Sequence[str], Tensor]], store: RayTransport, before: StoreManifest | None
) -> StoreManifest:
    """The same of tensors that are there one after the other: there is room for one of them and a bucket."""

    def named() -> Iterator[tuple[TensorShape, Tensor]]:
        for (first, *others), tensor in gathered:
            shape = tuple(tensor.shape)
            yield TensorShape(first, tensor.dtype, shape, None), tensor
            for name in others:
                yield TensorShape(name, tensor.dtype, shape, first), tensor

    return _put(named(), store, before)


def _put(
    named: Iterable[tuple[TensorShape, Tensor]], store: RayTransport, before: StoreManifest | None
) -> StoreManifest:
    tensors: list[TensorShape] = []

    def flat() -> Iterator[tuple[str, np.ndarray]]:
        for shape, tensor in named:
            tensors.append(shape)
            if shape.same_as is None:
                yield shape.name, bytes_of(tensor)

    known = {bucket.pieces: bucket for bucket in before.buckets} if before is not None else {}
    buckets: list[Bucket] = []
    for pieces, parts in in_buckets(flat(), weight_transfer.BUCKET):
        checksum, old = checksum_of(parts), known.get(pieces)
        if old is None or old.checksum != checksum:
            old = Bucket(pieces, checksum, store.store([pickle.PickleBuffer(part) for part in parts]))
        buckets.append(old)
    return StoreManifest(tuple(tensors), tuple(buckets))


def receive(
    token: WeightsToken, manifest: StoreManifest, store: RayTransport, own: Mapping[str, Tensor] | None
) -> Weights:
    """The weights in tensors of the receiver's own. `own`: those of an earlier version on the CPU, to be written over.

    Raises WorkerError unless all of it arrived as it was sent; `own` is no version at all then.
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
            raise damaged(token)
        size, count = size + sum(part.nbytes for part in parts), count + 1
    return Weights(token.version, state, token.delta, bytes=size, buckets=count)
