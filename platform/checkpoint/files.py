"""Files of a checkpoint: hashed while they are written, synced before they count, compared when they are read again.

Not covered: what is in them and which of them belong together.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rl_platform.disk import sync

_HASH_IN_THREAD = 1 << 20  # bytes of one write from which hashing beside the disk write pays for the hand-over


@dataclass(frozen=True)
class Written:
    """What went into a file."""

    bytes: int
    sha256: str


class HashingWriter(io.IOBase):
    """A binary file that hashes and counts what passes. Large chunks are hashed while the disk writes them.

    `error`: what a write failed with; torch turns it into a RuntimeError about positions.
    """

    def __init__(self, file: Any, pool: ThreadPoolExecutor) -> None:
        self.file, self.pool = file, pool
        self.sha256, self.bytes = hashlib.sha256(), 0
        self.error: BaseException | None = None

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        try:
            if size < _HASH_IN_THREAD:
                self.sha256.update(data)
                self.file.write(data)
            else:
                hashing = self.pool.submit(self.sha256.update, data)
                try:
                    self.file.write(data)
                finally:
                    hashing.result()  # `data` is valid during this call only
        except BaseException as error:
            self.error = error
            raise
        self.bytes += size
        return size

    def tell(self) -> int:
        return self.bytes

    def fileno(self) -> int:
        return int(self.file.fileno())

    def flush(self) -> None:
        if not self.file.closed:
            self.file.flush()

    @property
    def written(self) -> Written:
        return Written(self.bytes, self.sha256.hexdigest())


def write_state(path: Path, state: Mapping[str, Any]) -> Written:
    """`state` as a file of `torch.save`, on the disk when this returns. Raises OSError if it does not get there."""
    with open(path, "wb") as file, ThreadPoolExecutor(1) as pool:
        writer = HashingWriter(file, pool)
        try:
            torch.save(state, writer)
        except RuntimeError:
            if writer.error is not None:
                raise writer.error from None
            raise
        sync(file)
    return writer.written


def damage(path: Path, name: str, expected: Written) -> str:
    """How file `name` in folder `path` differs from what was written; empty if it does not."""
    try:
        size = (path / name).stat().st_size
        if size != expected.bytes:
            return f"{name} has {size:,} bytes instead of {expected.bytes:,}"
        with open(path / name, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"{name}: {error.strerror}"
    return "" if digest == expected.sha256 else f"{name} does not match its SHA-256"
