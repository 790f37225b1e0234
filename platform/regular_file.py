"""Reading files that users name: what is no regular file may never end, or make its reader wait."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def read_regular(path: str | Path, most: int | None = None) -> bytes:
    """The contents. Raises OSError where there are none or reading would wait, as with some files of /proc, and
    ValueError for devices, FIFOs and files of more than `most` bytes."""
    kind = os.stat(path).st_mode
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):  # opening a FIFO may wait for ever
        raise ValueError("it is no regular file")
    with open(path, "rb", opener=_open_without_waiting, buffering=0) as file:
        if most is None:
            return file.read()
        raw = b""
        while len(raw) <= most and (part := file.read(most + 1 - len(raw))):
            raw += part
    if len(raw) > most:
        raise ValueError(f"it is larger than {most} bytes")
    return raw


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
