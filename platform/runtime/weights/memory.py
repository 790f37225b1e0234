"""Memory that one process writes and others on its node read where it lies.

It is anonymous (memfd): nothing lies on disk or in /dev/shm, and it is gone with the last process that has it. A reader
opens it through /proc, so it must see the writer's process and be its user. Who uses what it read has a lock on the
block, and a writer writes where nobody has one; the kernel lets go for a process that dies.

Not covered: other systems than Linux, memory of accelerators.
"""

from __future__ import annotations

import fcntl
import functools
import mmap
import os
import sys
import threading
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

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
        """Whether nobody reads it; then nobody can, until `show`."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def show(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)


class MemoryWriter:
    """The blocks of one who writes again and again: two, if each is read until the next one is there."""

    def __init__(self) -> None:
        self._name = uuid.uuid4().hex
        self._blocks: list[MemoryBlock] = []

    @contextmanager
    def block(self, size: int) -> Iterator[MemoryBlock]:
        """Memory that nobody reads; never that of the last time, which somebody may be about to read."""
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
    """What this process reads of others."""

    def __init__(self) -> None:
        self._mapped: dict[str, tuple[BlockAddress, mmap.mmap]] = {}
        self._mapping = threading.Lock()

    def read(self, place: BlockAddress, anew: bool = False) -> np.ndarray:
        """[size] uint8, as it lies there. It stays as it is while an array or tensor over it lives.

        Who writes to it changes pages of this process's own, which stay in place of what the writer puts there later:
        `anew` does without them. Raises OSError if it cannot be reached, or something else is there by now.
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
