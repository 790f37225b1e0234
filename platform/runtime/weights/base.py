"""Published weights on their way to another process, in buckets of bounded size with a checksum each.

For processes on its node the publisher copies the weights into memory that these read where it is (`shared_memory`).
For others it puts every bucket into the object store, once for all receivers, which copy bucket by bucket into tensors
of their own: neither side needs memory for more than a bucket or one tensor beside the weights. So it does for all if
`delta` is asked for: buckets are known by their content then, the publisher stores those that changed since its last
publication, and a receiver takes those that differ from what it has now. So one that missed a publication, was started
anew or wrote to its tensors gets what it lacks.

Not covered: tensors on an accelerator, which pass main memory (but: weight_group.py); weights of ranks that share them
(`publish_gathered`) go through the object store, as nobody knows yet who will ask for them.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from rl_platform.errors import WorkerError
from rl_platform.records import Weights
from rl_platform.runtime.cpu import in_threads, memory_threads
from rl_platform.runtime.weights.memory import BlockAddress, MemoryReader, MemoryWriter

if TYPE_CHECKING:
    from rl_platform.runtime.ray.transport import RayTransport

BUCKET = 32 * 2**20  # bytes: an object of the store costs as much as copying ten million of them
ROW = 4096  # bytes that are summed up together
CACHED = 256 * 2**10  # bytes: what a core has in its cache


@dataclass(frozen=True)
class WeightsToken:
    """Published weights on their way: whose they are, which of its publications, and their version.

    copies: the same weights elsewhere, as other ranks of a learner have published them. tensors: what there is to send
    to a process group, on `device` (see `WeightsOffer`); None: they are not offered to one. held: the host has the
    tensors; else only the object store has. node: see `shared_memory.node_name`.
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
    node: str = ""

    def at(self, host: str) -> WeightsToken | None:
        """The publication in the process of `host`, if there is one."""
        return next((token for token in (self, *self.copies) if token.host == host and token.held), None)


def merge_published(published: Sequence[Any]) -> Any:
    """What all ranks of a learner published, as one: those who share a process with any of them read it there."""
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


@dataclass(frozen=True)
class TensorSlice:
    """Bytes `start` to `stop` of a tensor."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """Pieces that lie together in the object store, in this order."""

    pieces: tuple[TensorSlice, ...]
    checksum: bytes
    reference: Any


@dataclass(frozen=True)
class StoreManifest:
    """One publication: which tensors, and where in the object store their bytes are."""

    tensors: tuple[TensorShape, ...]
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True)
class MemoryManifest:
    """One publication in memory of this node, the tensors as `_places` has them; a checksum for every `share` bytes."""

    tensors: tuple[TensorShape, ...]
    memory: BlockAddress
    share: int
    checksums: tuple[bytes, ...]


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
                yield shape.name, _bytes_of(tensor)

    known = {bucket.pieces: bucket for bucket in before.buckets} if before is not None else {}
    buckets: list[Bucket] = []
    for pieces, parts in _buckets(flat(), BUCKET):
        found, old = _checksum(parts), known.get(pieces)
        if old is None or old.checksum != found:
            old = Bucket(pieces, found, store.store([pickle.PickleBuffer(part) for part in parts]))
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
    flat = {tensor.name: _bytes_of(state[tensor.name]) for tensor in manifest.tensors}
    size = count = 0
    for bucket in manifest.buckets:
        parts = [flat[piece.name][piece.start : piece.stop] for piece in bucket.pieces]
        if token.delta and keeps and _checksum(parts) == bucket.checksum:
            continue
        (sent,) = store.load([bucket.reference])
        if _copied(sent, parts) != bucket.checksum:
            raise _damaged(token)
        size, count = size + sum(part.nbytes for part in parts), count + 1
    return Weights(token.version, state, token.delta, bytes=size, buckets=count)


def show(state: Mapping[str, Tensor], writer: MemoryWriter) -> MemoryManifest:
    """Copies the state into memory that processes of this node read: until two publications later, or as long as they
    use it."""
    tensors = shapes_of(state)
    places = _places(tensors)
    size = sum(place.stop - place.start for place in places.values())
    share = BUCKET  # of tensors on a GPU, which are copied twice
    if all(tensor.device.type == "cpu" for tensor in state.values()):
        share = max(BUCKET, -(-size // memory_threads()))
    with writer.block(size) as block:

        def copied(work: tuple[int, list[np.ndarray]]) -> bytes:
            start, parts = work
            ends = accumulate((part.size for part in parts), initial=start)
            return _copied(parts, [block.memory[begin:end] for begin, end in pairwise(ends)])

        buckets = enumerate(_buckets(((name, _bytes_of(state[name])) for name in places), share))
        checksums = in_threads(copied, ((number * share, parts) for number, (_, parts) in buckets))
    return MemoryManifest(tensors, block.place, share, tuple(checksums))


def read(token: WeightsToken, shown: MemoryManifest, reader: MemoryReader) -> Weights:
    """The weights where they lie in this node's memory, which is kept as long as one of their tensors lives.

    Raises OSError if this process cannot reach it, WorkerError if they are not what was published.
    """
    for anew in (False, True):  # it is none of the publisher's faults if somebody here wrote to earlier weights
        memory = reader.read(shown.memory, anew)
        shares = [memory[start : start + shown.share] for start in range(0, memory.size, shown.share)]
        if tuple(in_threads(lambda share: _checksum([share]), shares)) == shown.checksums:
            break
    else:
        raise _damaged(token)
    whole, places, state = torch.from_numpy(memory), _places(shown.tensors), dict[str, Tensor]()
    for tensor in shown.tensors:
        place = places[tensor.same_as or tensor.name]
        known = state.get(str(tensor.same_as))
        state[tensor.name] = whole[place].view(tensor.dtype).view(tensor.shape) if known is None else known
    return Weights(token.version, state, bytes=memory.size, buckets=len(shares))


def _places(tensors: Sequence[TensorShape]) -> dict[str, slice]:
    """Where the bytes of distinct tensors are in one piece of memory, without gaps: each begins at a multiple of the
    size of its items, as those of the larger ones come first."""
    distinct = [tensor for tensor in tensors if tensor.same_as is None]
    ordered = sorted(distinct, key=lambda tensor: -tensor.dtype.itemsize)
    ends = accumulate((tensor.nbytes for tensor in ordered), initial=0)
    return {tensor.name: slice(start, stop) for tensor, (start, stop) in zip(ordered, pairwise(ends), strict=True)}


def _damaged(token: WeightsToken) -> WorkerError:
    return WorkerError(f"weights version {token.version} of {token.label} arrived damaged: their checksum differs")


def shapes_of(state: Mapping[str, Tensor]) -> tuple[TensorShape, ...]:
    first: dict[Any, str] = {}
    found = []
    for name, tensor in state.items():
        shape = tuple(tensor.shape)
        place = (tensor.data_ptr(), tensor.dtype, shape, tensor.stride(), tensor.device) if tensor.numel() else name
        same_as = first.setdefault(place, name)
        found.append(TensorShape(name, tensor.dtype, shape, None if same_as == name else same_as))
    return tuple(found)


def empty(tensors: Sequence[TensorShape], device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """A state of these tensors, whatever their content."""
    state: dict[str, Tensor] = {}
    for tensor in tensors:
        known = state.get(str(tensor.same_as))
        state[tensor.name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=device) if known is None else known
    return state


def _buckets(
    tensors: Iterable[tuple[str, np.ndarray]], room: int
) -> Iterator[tuple[tuple[TensorSlice, ...], list[np.ndarray]]]:
    """The bytes of named tensors in order, `room` in each bucket; a tensor is asked for when its turn comes."""
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


def _bytes_of(tensor: Tensor) -> np.ndarray:
    """[bytes] uint8, over the tensor's memory if that is contiguous and on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def checksum(tensor: Tensor) -> bytes:
    """Of a contiguous tensor's bytes. On a GPU it is that of sums over rows and columns of them, which are taken there:
    bringing all of it here would take longer than sending it."""
    return _checksum([_bytes_of(tensor)] if tensor.device.type == "cpu" else _sums(tensor))


def _sums(tensor: Tensor) -> list[np.ndarray]:
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    whole = flat.numel() // ROW * ROW
    table = flat[:whole].view(-1, ROW)
    return [_bytes_of(part) for part in (table.sum(0), table.sum(1), flat[whole:])]


def _copied(sent: Sequence[Any], parts: Sequence[np.ndarray]) -> bytes:
    """Copies buffers into `parts`; the checksum of what is there then, read while it is still in the cache."""
    found = xxhash.xxh3_128()
    for buffer, part in zip(sent, parts, strict=True):
        source = np.frombuffer(buffer, np.uint8)
        if source.size != part.size:
            return b""
        for start in range(0, part.size, CACHED):
            here = slice(start, start + CACHED)
            part[here] = source[here]
            found.update(part[here])
    return found.digest()


def _checksum(parts: Sequence[np.ndarray]) -> bytes:
    """128 bits of XXH3, at the speed of memory; equal sums mean equal bytes, up to a chance of 1 in 10^38."""
    found = xxhash.xxh3_128()
    for part in parts:
        found.update(part)
    return found.digest()
