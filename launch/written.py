"""Files that a verb writes where its option `--output` says: as a whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rl_platform.disk import no_space
from rl_platform.errors import ConfigError, Problem

PICTURES = (".png", ".svg", ".pdf", ".jpg")


@contextmanager
def replacing_file(path: Path) -> Iterator[Path]:
    """Yields an empty hidden file with the ending of `path`; it takes its place if the block ends without an error."""
    stage = path.with_name(f".tmp-{path.name}")
    try:
        stage.write_bytes(b"")  # a folder that cannot be written to fails here
        yield stage
        os.replace(stage, path)
    finally:
        stage.unlink(missing_ok=True)


@contextmanager
def writing(path: Path, endings: Sequence[str], option: str = "--output") -> Iterator[Path]:
    """Yields an empty file beside `path`, which becomes `path` if the block ends without an error.

    option: names the path on the command line. Folders that are missing are made. Raises ConfigError if `path` cannot
    be written, see `check_output`, and DataError if the disk is full.
    """
    check_output(path, endings, option)
    missing = [folder for folder in path.parents if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing_file(path) as stage:
            yield stage
    except OSError as error:
        if (full := no_space(error, path)) is not None:
            raise full from error
        message = f"cannot be written: {error.strerror or error}"
        raise ConfigError([Problem(option, message, value=str(path), hint="name another place")]) from error
    finally:
        with suppress(OSError):  # of folders that hold the file
            for folder in missing:
                folder.rmdir()


def check_output(path: Path, endings: Sequence[str], option: str = "--output") -> None:
    """Raises ConfigError for a folder, for a place inside a file, and for a name without one of the endings.

    endings: as `.png`; hints have the first one.
    """
    value, allowed = str(path), f"*{', *'.join(endings)}"
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if path.is_dir():
        problem = Problem(option, "is a folder", value=value, allowed=allowed)
    elif not above.is_dir():
        problem = Problem(option, f"{above} is a file", value=value, hint="name another place")
    elif path.suffix not in endings:
        hint = f"did you mean {path.with_suffix(endings[0])}?"
        problem = Problem(option, "has the wrong ending", value=value, allowed=allowed, hint=hint)
    else:
        return
    raise ConfigError([problem])
