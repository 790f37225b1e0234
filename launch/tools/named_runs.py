"""Runs that the arguments of a verb name."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from rl_platform.errors import ConfigError, Problem
from rl_platform.run_files import METRICS

MOST_NAMED = 8  # runs of a folder that a hint lists


def run_path(text: str) -> Path:
    """Returns the path that `text` names; for `latest` the newest run in runs/, if there is one."""
    from rl_platform.launch.saved.saved_run import LATEST, RUNS

    files = list(RUNS.glob(f"*/{METRICS}")) if text == LATEST else []
    return max(files, key=lambda file: file.stat().st_mtime).parent if files else Path(text)


def check_runs(runs: Sequence[Path], file: str = METRICS, reason: str = "") -> None:
    """Raises ConfigError with all paths that are neither a folder with `file` nor such a file, and with the runs that
    are named more than once.

    reason: why a run may have no such file.
    """
    if problems := [*_repeated(runs, file), *(problem for run in runs for problem in _problems(run, file, reason))]:
        raise ConfigError(problems)


def _repeated(runs: Sequence[Path], file: str) -> Iterator[Problem]:
    """Yields a problem for each run that is named more than once, by whatever paths: it would count twice."""
    real = (os.path.realpath(run.parent if run.name == file else run) for run in runs if run.exists())
    for path, count in Counter(real).items():
        if count > 1:
            hint = "name it once: a median, mean or group would count it more than once"
            yield Problem("RUN", "the run is named more than once", value=path, hint=hint)


def _problems(run: Path, file: str, reason: str) -> Iterator[Problem]:
    allowed, hint = f"the output folder of a run, its {file}, or latest (in runs/)", ""
    if (run / file).exists() or (run.is_file() and run.suffix == Path(file).suffix):
        return
    if run.is_file():
        message = "is a file of another kind"
    elif not run.exists():
        from rl_platform.launch.saved.saved_run import similar_folder

        message, hint = "no such folder", similar_folder(run)
    elif inside := sorted(str(path.parent) for path in run.glob(f"*/{file}")):
        message, hint = "holds runs, and is none", f"name {shlex.join(inside[:MOST_NAMED])}"
        hint += f" or one of {len(inside) - MOST_NAMED} more" if len(inside) > MOST_NAMED else ""
    else:
        message, hint = f"has no {file}", reason
    yield Problem("RUN", message, value=str(run), allowed=allowed, hint=hint)
