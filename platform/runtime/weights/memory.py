"""Published weights in memory that one process writes and others on its node read where it lies.

It is anonymous (memfd): nothing lies on disk or in /dev/shm, and it is gone with the last process that has it. A reader
opens it through /proc, so it must see the writer's process and be its user. A reader holds a lock on the
block while it uses it, and a writer writes to blocks without a lock. The kernel releases the locks of a dead process.

Not covered: other systems than Linux, memory of accelerators.
"""

from __future__ import annotations

import fcntl
import functools
import logging
import mmap
import os
import sys
import threading
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rl_platform.records import Weights
from rl_platform.runtime.cpu import in_threads, memory_threads
from rl_platform.runtime.weights import base
from rl_platform.runtime.weights.base import (
    Ask,
    TensorShape,
    WeightsToken,
    bytes_of,
    checksum_of,
    copy_checked,
    damaged,
    in_buckets,
    shapes_of,
)

logger = logging.getLogger(__name__)

MAPPED_BLOCKS = (
    2  # blocks of a writer that stay mapped although nothing of them is in use: mapping takes longer than copying
)


@functools.cache
def node_name() -> str:
    """The same for all processes that can see each other in /proc; empty where memory cannot be shared like this."""
    if sys.platform != "linux":
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


@dataclass(frozen=True)
class BlockAddress:
    """Where a block is: `path` in /proc, while it has this `name`."""

    path: str
    name: str
    writer: str
    size: int


class MemoryBlock:
    """`size` bytes, `memory` [size] uint8, undefined at first."""

    def __init__(self, writer: str, size: int) -> None:
        name = f"rl-platform-{uuid.uuid4().hex}"
        self._descriptor = os.memfd_create(name)
        weakref.finalize(self, os.close, self._descriptor).atexit = False
        os.ftruncate(self._descriptor, max(size, 1))
        self.memory = np.frombuffer(mmap.mmap(self._descriptor, max(size, 1)), np.uint8, size)
        self.place = BlockAddress(f"/proc/{os.getpid()}/fd/{self._descriptor}", name, writer, size)

    def claim(self) -> bool:
        """Locks the block against readers until `show`; False if one reads it."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def show(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)


class MemoryWriter:
    """The blocks of one writer: two, if each block is read until the next one is written."""

    def __init__(self) -> None:
        self._name = uuid.uuid4().hex
        self._blocks: list[MemoryBlock] = []

    @contextmanager
    def block(self, size: int) -> Iterator[MemoryBlock]:
        """Memory without a reader; never the last block, which may be about to be read."""
        free = [block for block in self._blocks[:-1] if block.claim()]
        block = next((block for block in free if block.place.size == size), None)
        if block is None:
            block = MemoryBlock(self._name, size)
            block.claim()
        self._blocks = [*(other for other in self._blocks if other not in free), block]
        try:
            yield block
        finally:
            block.show()


class MemoryReader:
    """The blocks of other processes that this process reads."""

    def __init__(self) -> None:
        self._mapped: dict[str, tuple[BlockAddress, mmap.mmap]] = {}
        self._mapping = threading.Lock()

    def read(self, place: BlockAddress, anew: bool = False) -> np.ndarray:
        """[size] uint8, as it lies there. It stays as it is while an array or tensor over it lives.

        A write changes private pages of this process, which hide what the writer writes later; `anew` maps the block
        without them. Raises OSError if it cannot be reached, or something else is there by now.
        """
        if anew:
            with self._mapping:
                self._mapped.pop(place.name, None)
        descriptor = self._opened(place)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            memory = np.frombuffer(self._map(place), np.uint8, place.size)
        except BaseException:
            os.close(descriptor)
            raise
        weakref.finalize(memory, os.close, descriptor).atexit = False
        return memory

    def _opened(self, place: BlockAddress) -> int:
        descriptor = os.open(place.path, os.O_RDONLY)
        if place.name not in os.readlink(f"/proc/self/fd/{descriptor}"):
            os.close(descriptor)
            raise FileNotFoundError(f"{place.path} is not {place.name}")
        return descriptor

    def _map(self, place: BlockAddress) -> mmap.mmap:
        with self._mapping:
            if place.name not in self._mapped:
                same = [known.name for known, _ in self._mapped.values() if known.writer == place.writer]
                for name in same[: len(same) + 1 - MAPPED_BLOCKS]:
                    del self._mapped[name]  # its memory goes when nothing of it is in use
                descriptor = self._opened(place)  # one of its own: a mapping keeps it open, and with it a lock on it
                try:
                    memory = mmap.mmap(descriptor, max(place.size, 1), access=mmap.ACCESS_COPY)
                finally:
                    os.close(descriptor)
                self._mapped[place.name] = place, memory
            return self._mapped[place.name][1]


@dataclass(frozen=True)
class MemoryManifest:
    """One publication in memory of this node, tensors where `places_of` puts them, checksums of every `share` bytes."""

    tensors: tuple[TensorShape, ...]
    memory: BlockAddress
    share: int
    checksums: tuple[bytes, ...]


class MemoryTransfer:
    """Both sides of the transfer in one process."""

    def __init__(self) -> None:
        self._writers: dict[str, MemoryWriter] = {}  # by rank
        self._reader = MemoryReader()
        self._unreadable: set[str] = set()  # hosts whose memory this process may not read

    def publish(self, token: WeightsToken, state: Mapping[str, Tensor], request: None = None) -> MemoryManifest:
        return copy_to_memory(state, self._writers.setdefault(token.label, MemoryWriter()))

    def receive(self, token: WeightsToken, ask: Ask) -> Weights | None:
        """The weights where they lie. None if the sender has no copy, is on another node or its memory cannot be read,
        and with `delta`."""
        near = token.node == node_name() != "" and token.host not in self._unreadable
        if not near or not token.held or token.delta:
            return None
        manifest = ask(None)
        try:
            return read_from_memory(token, manifest, self._reader)
        except OSError as error:
            logger.warning("weights of %s take a slower way than memory, which cannot be read: %s", token.label, error)
            self._unreadable.add(token.host)
            return None


def copy_to_memory(state: Mapping[str, Tensor], writer: MemoryWriter) -> MemoryManifest:
    """Copies the state into memory that processes of this node read: until two publications later, or as long as they
    use it."""
    tensors = shapes_of(state)
    places = places_of(tensors)
    size = sum(place.stop - place.start for place in places.values())
    share = base.BUCKET  # of tensors on a GPU, which are copied twice
    if all(tensor.device.type == "cpu" for tensor in state.values()):
        share = max(base.BUCKET, -(-size // memory_threads()))
    with writer.block(size) as block:

        def copied(work: tuple[int, list[np.ndarray]]) -> bytes:
            start, parts = work
            ends = accumulate((part.size for part in parts), initial=start)
            return copy_checked(parts, [block.memory[begin:end] for begin, end in pairwise(ends)])

        buckets = enumerate(in_buckets(((name, bytes_of(state[name])) for name in places), share))
        checksums = in_threads(copied, ((number * share, parts) for number, (_, parts) in buckets))
    return MemoryManifest(tensors, block.place, share, tuple(checksums))


def read_from_memory(token: WeightsToken, shown: MemoryManifest, reader: MemoryReader) -> Weights:
    """The weights in this node's shared memory, which stays mapped as long as one of their tensors lives.

    Raises OSError if this process cannot reach it, WorkerError if they are not what was published.
    """
    for anew in (False, True):  # a component here may have written to earlier weights
        memory = reader.read(shown.memory, anew)
        shares = [memory[start : start + shown.share] for start in range(0, memory.size, shown.share)]
        if tuple(in_threads(lambda share: checksum_of([share]), shares)) == shown.checksums:
            break
    else:
        raise damaged(token)
    whole, places, state = torch.from_numpy(memory), places_of(shown.tensors), dict[str, Tensor]()
    for tensor in shown.tensors:
        place = places[tensor.same_as or tensor.name]
        known = state.get(str(tensor.same_as))
        state[tensor.name] = whole[place].view(tensor.dtype).view(tensor.shape) if known is None else known
    return Weights(token.version, state, bytes=memory.size, buckets=len(shares))


def places_of(tensors: Sequence[TensorShape]) -> dict[str, slice]:
    """Where the bytes of distinct tensors are in one piece of memory, without gaps: each begins at a multiple of the
    size of its items, as those of the larger ones come first."""
    distinct = [tensor for tensor in tensors if tensor.same_as is None]
    ordered = sorted(distinct, key=lambda tensor: -tensor.dtype.itemsize)
    ends = accumulate((tensor.nbytes for tensor in ordered), initial=0)
    return {tensor.name: slice(start, stop) for tensor, (start, stop) in zip(ordered, pairwise(ends), strict=True)}
