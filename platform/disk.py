"""Writes that survive a power loss, reads of files that users name, and the folder of cached files.

Devices and FIFOs are not read: reading them may block or never end.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from rl_platform.errors import DataError


def cache_folder() -> Path:
    """Returns the folder of converted models: $RL_PLATFORM_CACHE, else one in the user's cache folder."""
    if named := os.environ.get("RL_PLATFORM_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rl_platform"


def size_text(count: int) -> str:
    """Returns a number of bytes as text, as 1.50 GB."""
    return f"{count / 1e9:,.2f} GB" if count >= 1e8 else f"{count / 1e6:,.2f} MB"


def no_space(error: BaseException, path: str | Path) -> DataError | None:
    """Returns the error of a full disk, None if `error` has another cause. path: "" if unknown.

    Safetensors raises an error of its own, which has the reason as text only.
    """
    if isinstance(error, OSError):
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    else:
        full = "No space left on device" in str(error)
    if not full:
        return None
    if not path:
        return DataError("a file cannot be written: No space left on device. Free space on the disk")
    place = next(each for each in (Path(path).absolute(), *Path(path).absolute().parents) if each.exists())
    left = size_text(shutil.disk_usage(place).free)
    return DataError(
        f"{path} cannot be written: No space left on device. Free space, as {left} are left, or name another disk"
    )


def sync(file: IO[str] | IO[bytes]) -> None:
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


def make_folder(folder: Path, mode: int = 0o777) -> None:
    """Makes a folder with a mode, and those above it, and returns when their names are on the disk."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(mode, parents=True, exist_ok=True)
    for made in missing:
        sync_folder(made.parent)


def link(source: str, target: str) -> None:
    """Makes a hard link to a file that does not change; a copy where the file system has none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yields an empty hidden folder, which takes the place of `folder` if the block ends without an error."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    stage, old = (folder.with_name(f".{kind}-{folder.name}") for kind in ("tmp", "old"))
    shutil.rmtree(stage, ignore_errors=True)  # of a killed process
    stage.mkdir()
    try:
        yield stage
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.rename(folder, old)
        os.rename(stage, folder)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def check_unedited(path: Path, text: str) -> None:
    """Raises FileExistsError if `path` is anything but a file with this text: the user may have edited it."""
    if os.path.lexists(path) and (not path.is_file() or read_regular(path) != text.encode()):
        raise FileExistsError(errno.EEXIST, "it exists and has another content")


def private(path: Path) -> IO[str]:
    """Opens a new text file that only the user can read from its beginning on; a file at `path` is replaced."""
    path.unlink(missing_ok=True)
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8")


def read_regular(path: str | Path, most: int | None = None) -> bytes:
    """Returns the contents of a regular file.

    Raises OSError if the file cannot be read or reading would block (some files in /proc), and ValueError for devices,
    FIFOs and files of more than `most` bytes.
    """
    kind = os.stat(path).st_mode
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):  # opening a FIFO may block for ever
        raise ValueError("it is no regular file")
    with open(path, "rb", opener=_open_without_waiting) as file:
        raw: bytes | None = file.read(-1 if most is None else most + 1)
    if raw is None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    if most is not None and len(raw) > most:
        raise ValueError(f"it is larger than {most} bytes")
    return raw


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
