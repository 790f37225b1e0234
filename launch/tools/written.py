"""Files that a verb writes where its option `--output` says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rl_platform.errors import ConfigError, Problem


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Makes the folder of a file that the block writes. Raises ConfigError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except (OSError, ValueError) as error:  # ValueError: of a format that matplotlib does not write
        message = f"cannot be written: {getattr(error, 'strerror', None) or error}"
        raise ConfigError([Problem("--output", message, value=str(path), hint="name another place")]) from error
