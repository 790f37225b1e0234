"""Paths of a user that the operating system refuses, as a problem of the key, option or argument that names them.

Reading or writing a file raises OSError anywhere in the platform, and so does `Path.exists()` for a name that is too
long or a folder that may not be entered. Not covered: missing files, whose checks say what belongs there, and disks
that fail or are full.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rl_platform.disk import no_space
from rl_platform.errors import ConfigError, Problem, WorkerError, shortened

HINTS = {
    errno.ENAMETOOLONG: "a shorter path: most systems allow 255 bytes for a name and 4096 for a path",
    errno.EACCES: "name a path that you may use, or change the rights of its folders",
    errno.EPERM: "name a path that you may use, or change the rights of its folders",
    errno.EROFS: "name a path on a file system that can be written to",
    errno.ENOTDIR: "name another path: a part of this one is a file",
    errno.EISDIR: "name a file",
    errno.ELOOP: "name another path: its symbolic links lead back to themselves",
}
"""Error numbers that depend on the path alone, and what to do."""

OUTPUTS = ("--output", "-o")  # options that name what a command writes

Named = Iterable[tuple[str, str]]
"""Keys, options or arguments, and the values that they have."""


@contextmanager
def named_paths(named: Callable[[], Named]) -> Iterator[None]:
    """Turns the OSError of a path that `named` holds into ConfigError, that of a full disk into DataError."""
    try:
        yield
    except (OSError, WorkerError) as error:
        cause = error.__cause__ if isinstance(error, WorkerError) else error
        written = getattr(cause, "filename", None) or next((value for key, value in named() if key in OUTPUTS), "")
        if cause is not None and (full := no_space(cause, written)) is not None:
            for note in getattr(error, "__notes__", []):
                full.add_note(note)
            raise full from error
        problem = refused_path(cause, named()) if isinstance(cause, OSError) else None
        if problem is None:
            raise
        raise ConfigError([problem]) from error


def refused_path(error: OSError, named: Named, where: Callable[[str], str] = lambda key: "") -> Problem | None:
    """Returns the problem of the key whose value names the path of `error`, or a folder above it. None without.

    where: the place of a key in a file.
    """
    if error.errno not in HINTS or not isinstance(error.filename, str):
        return None
    near = [(nearness, key, value) for key, value in named if value and (nearness := _nearness(value, error.filename))]
    if not near:
        return None
    _, key, value = max(near)
    at = "" if _absolute(error.filename) == _absolute(value) else f": {shortened(error.filename)}"
    return Problem(
        key,
        f"this path cannot be used: {error.strerror}{at}",
        where=where(key),
        value=shortened(value),
        hint=HINTS[error.errno],
    )


def _nearness(value: str, refused: str) -> int:
    """Returns how many folders of `refused` the value names; 0 if it is another path."""
    named, path = _absolute(value), _absolute(refused)
    if path == named or path.startswith(f"{named}{os.sep}"):
        return len(named)
    above_here = f"{os.getcwd()}{os.sep}".startswith(f"{path}{os.sep}")
    if named.startswith(f"{path}{os.sep}") and not above_here:  # a folder to be made inside
        return len(path)
    return len(value) if len(value) > 200 and value in refused else 0  # in a folder of the platform


def _absolute(value: str) -> str:
    """Returns the absolute path of a value: of the file in path/to/file.py:Name, else of the whole."""
    return os.path.abspath(os.path.expanduser(re.sub(r"(\.py):\w+$", r"\1", value)))
