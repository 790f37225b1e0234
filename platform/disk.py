"""Writes that survive a power loss."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def sync(file: Any) -> None:
    """Returns when everything written to the open file is on the disk. Raises OSError if it does not get there."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Returns when the names of the folder's entries are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
