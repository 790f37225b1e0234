"""Whether a run can write to its output folder."""

from __future__ import annotations

import os
from collections.abc import Iterator

from rl_platform.config.schema import Config
from rl_platform.errors import Problem
from rl_platform.launch.output import EMPTY, output_path
from rl_platform.run_files import CONFIG


def output_problems(config: Config) -> Iterator[Problem]:
    """Yields the reasons why a run cannot write to its folder."""
    folder, key = output_path(config), "runner.output_dir"
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        yield Problem(key, f"{existing} is a file", value=str(folder), hint="name another folder")
    elif not os.access(existing, os.R_OK | os.W_OK | os.X_OK):
        yield Problem(key, f"{existing} is not writable", value=str(folder), hint="name another folder")
    elif existing == folder and (folder / CONFIG).is_file():
        if config.runner.resume == "never":
            hint = "runner.resume=auto resumes it; or name another folder"
            yield Problem(key, "already contains a run, and runner.resume is never", value=str(folder), hint=hint)
    elif existing == folder and {entry.name for entry in folder.iterdir()} - EMPTY:
        message = "is not empty and contains no run of this platform"
        yield Problem(key, message, value=str(folder), hint="name another folder")
