"""A part of a checkpoint that several processes write, each its own files.

Not covered: what is in these files, see `engines/training/state_files.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rl_platform.checkpoint.verify import Written
from rl_platform.disk import sync_folder
from rl_platform.errors import CheckpointError


@dataclass(frozen=True)
class Shards:
    """A part that several processes write, each its own files.

    bytes: about how much they write together. write: they write into the folder, which all of them see, and sync; the
    result is what was written, by file name. Raises CheckpointError if one of them cannot.
    """

    bytes: int
    write: Callable[[Path], Mapping[str, Written]]


def write_shards(stage: Path, name: str, shards: Shards) -> dict[str, Written]:
    folder = stage / name
    os.mkdir(folder)
    written = shards.write(folder)
    if missing := sorted(file for file in written if not (folder / file).exists()):
        raise CheckpointError(f"{missing[0]} was written elsewhere: every node must see the same output folder")
    sync_folder(folder)
    return {f"{name}/{file}": hashed for file, hashed in written.items()}
