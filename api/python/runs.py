"""A run in Python: its folder and its metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_platform.errors import ConfigError, Problem
from rl_platform.metrics import iter_metrics
from rl_platform.python.arguments import folder_of
from rl_platform.suggest import nearest

if TYPE_CHECKING:
    import pandas


class Metrics(Mapping[str, np.ndarray]):
    """The metrics of a run by name, each an array [S] with one number per step, NaN where a step has none.

    `step` holds the numbers of the steps.
    """

    def __init__(self, path: Path) -> None:
        """Reads a metrics.jsonl. Raises DataError if there is none or it is damaged."""
        rows = list(iter_metrics(path))
        names = dict.fromkeys(name for row in rows for name in row)
        self._columns = {name: np.array([row.get(name, np.nan) for row in rows]) for name in names}

    def __getitem__(self, name: str) -> np.ndarray:
        if name in self._columns:
            return self._columns[name]
        close = nearest(str(name), self._columns)
        raise KeyError(f"no metric {name!r}" + (f"; did you mean {close!r}?" if close else ""))

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __repr__(self) -> str:
        return f"Metrics of {len(self.get('step', ()))} steps: {', '.join(self)}"

    def to_pandas(self) -> pandas.DataFrame:
        """Returns a table with a row per step. Needs the package pandas."""
        import pandas

        return pandas.DataFrame(self._columns)


@dataclass(frozen=True)
class Run:
    """The folder of a run.

    exit_reason: `max_steps`, `max_epochs`, `callback NAME`, or `already finished` if the run had ended before and
    nothing was trained; None for a run of `load_run`.
    """

    folder: Path
    exit_reason: str | None = None
    env: Any = field(default=None, repr=False)  # the function that made its environments, if there was one

    def __fspath__(self) -> str:
        """Returns the folder: `rl.load_policy(run)` and others read it."""
        return str(self.folder)

    @cached_property
    def metrics(self) -> Metrics:
        """The metrics so far, read once. Raises DataError if the file is missing or damaged."""
        return Metrics(self.folder / "metrics.jsonl")


def load_run(folder: str | PathLike[str]) -> Run:
    """Returns the run in a folder, which may still be going on. Raises ConfigError if the folder holds none."""
    path = Path(folder_of(folder)).expanduser().absolute()
    if not (path / "config.yaml").is_file():
        message = "holds no run" if path.is_dir() else "there is no such folder"
        siblings = [entry.name for entry in path.parent.iterdir() if entry.is_dir()] if path.parent.is_dir() else []
        close = None if path.is_dir() else nearest(path.name, siblings)
        hint = f"did you mean {path.with_name(close)}?" if close else ""
        allowed = "the folder of a run, its runner.output_dir"
        raise ConfigError([Problem("folder", message, value=str(folder), allowed=allowed, hint=hint)])
    return Run(path)
