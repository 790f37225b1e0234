"""Files that start a run on a cluster: the Slurm script and the manifest of KubeRay."""

from __future__ import annotations

from pathlib import Path

from rl_platform.disk import check_unedited, private
from rl_platform.errors import ConfigError, Problem


def write_job(path: Path, text: str) -> Path:
    """Writes a file that only the user can read, because overrides may hold secrets; returns its path.

    Raises ConfigError if it cannot be written, or exists with another content.
    """
    try:
        check_unedited(path, text)
        with private(path) as file:
            file.write(text)
    except OSError as error:
        problem = f"cannot be written: {error.strerror}"
        hint = "remove it, rename it, or name the run anew: runner.experiment_name=NAME"
        raise ConfigError([Problem(str(path), problem, hint=hint)]) from error
    return path
