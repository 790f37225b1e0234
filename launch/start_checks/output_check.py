"""Whether a folder can be written to, and whether a run can write to its output folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from rl_platform.config.schema import Config
from rl_platform.errors import Problem
from rl_platform.launch.output import EMPTY, output_path
from rl_platform.run_files import CONFIG


def unwritable(folder: Path) -> str:
    """Returns why nothing can be written to a folder, which may be missing; empty if something can."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        return f"{existing} is a file"
    return "" if os.access(existing, os.R_OK | os.W_OK | os.X_OK) else f"{existing} is not writable"


def output_problems(config: Config) -> Iterator[Problem]:
    """Yields the reasons why a run cannot write to its folder."""
    folder, key = output_path(config), "runner.output_dir"
    if reason := unwritable(folder):
        yield Problem(key, reason, value=str(folder), hint="name another folder")
    elif (folder / CONFIG).is_file():
        if config.runner.resume == "never":
            hint = "runner.resume=auto resumes it; or name another folder"
            yield Problem(key, "already contains a run, and runner.resume is never", value=str(folder), hint=hint)
    elif folder.is_dir() and {entry.name for entry in folder.iterdir()} - EMPTY:
        message = "is not empty and contains no run of this platform"
        yield Problem(key, message, value=str(folder), hint="name another folder")
