"""A file system of its own that is soon full."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Makes the folder a file system of `size`, as 16k or 1m. Skips the test where mounting is not allowed."""
    folder.mkdir()
    if os.geteuid() != 0 or os.system(f"mount -t tmpfs -o size={size} tmpfs {folder} 2>/dev/null") != 0:
        pytest.skip("mounting a small disk is not allowed here")
    try:
        yield folder
    finally:
        os.system(f"umount {folder}")
