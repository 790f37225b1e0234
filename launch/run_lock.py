"""The lock of a run's output folder: one run at a time writes there.

The lock is the kernel's lock on the file `lock`, which ends with the process that holds it, however that process ends.
Child processes do not inherit it. The file names the holder and is removed with the lock. Locks of some shared file
systems do not reach other machines. A file that names another machine, or this one before it was restarted, therefore
counts as held while its holder touches it. A Slurm job that was requeued takes over the lock of its earlier start at
once. Reading a run needs no lock; `is_running` returns whether one is held. Not covered: two runs within one process.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import platform
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import psutil

from rl_platform.errors import FolderInUse

LOCK = "lock"
BEAT_S = 5.0  # the holder touches the file this often
PATIENCE_S = 90.0  # longer than file systems cache the time of a file (NFS: up to 60 s)

_own: set[tuple[int, int]] = set()  # the lock files of this process

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock. boot: identifies the start of its machine; a lock does not outlive it.

    slurm_job: the Slurm job of the process, empty without one; slurm_starts: how often Slurm had requeued it.
    """

    host: str
    boot: str
    pid: int
    started: str
    slurm_job: str = ""
    slurm_starts: int = 0

    @classmethod
    def this_process(cls) -> Holder:
        """Returns the holder that this process is."""
        started = datetime.fromtimestamp(psutil.Process().create_time()).astimezone()
        job, starts = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_RESTART_COUNT", "")
        count = int(starts) if starts.isdecimal() else 0  # Slurm sets it from the first requeue on
        return cls(platform.node(), _boot(), os.getpid(), started.isoformat(timespec="seconds"), job, count)

    def __str__(self) -> str:
        job = f", Slurm job {self.slurm_job}" if self.slurm_job else ""
        return f"process {self.pid} on {self.host}, started {self.started}{job}"

    def was_requeued(self) -> bool:
        """Returns whether the holder is an earlier start of this process's Slurm job.

        Slurm ends one start of a job before it begins the next.
        """
        own = Holder.this_process()
        return self.slurm_job == own.slurm_job != "" and self.slurm_starts < own.slurm_starts


@contextmanager
def locked(folder: Path, key: str = "runner.output_dir") -> Iterator[None]:
    """Holds the lock of `folder` during the block. key: of the config or the command line, which names the folder.

    Raises FolderInUse if another run holds it, OSError if the file cannot be written.
    """
    path = folder / LOCK
    descriptor = _acquired(path, key)
    own = _identity(os.fstat(descriptor))
    _own.add(own)
    stop = threading.Event()
    beat = threading.Thread(target=_touch, args=(descriptor, stop), name="run lock", daemon=True)
    beat.start()
    try:
        yield
    finally:
        stop.set()
        beat.join()
        with suppress(OSError):
            if _names(path, descriptor):
                path.unlink()
        os.close(descriptor)
        _own.discard(own)


def is_running(folder: Path) -> bool:
    """Returns whether a run holds the lock of `folder`.

    A lock of this machine since its start ends with its process. Any other counts until its holder has not touched it
    for `PATIENCE_S`.
    """
    path = folder / LOCK
    try:
        status = path.stat()
        if _identity(status) in _own:  # closing a descriptor of the file here would release the lock
            return True
        with open(path, "rb") as file:
            held = _is_locked(file.fileno())
            holder = _holder(file.fileno())
    except OSError:
        return False
    ended = held is False and holder is not None and holder.boot == _boot()
    return bool(held) or (not ended and time.time() - status.st_mtime < PATIENCE_S)


def _is_locked(descriptor: int) -> bool | None:
    """Returns whether another process holds the kernel's lock on a file; None if the system or the file system does
    not report it. Takes no lock itself: a run that starts at this moment would be refused."""
    if sys.platform != "linux":
        return None
    layout = "hhqqi"  # struct flock: type, whence, start, length, process
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, struct.pack(layout, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except OSError:
        return None
    kind: int = struct.unpack(layout, answer)[0]
    return kind != fcntl.F_UNLCK


def _acquired(path: Path, key: str) -> int:
    """Returns a descriptor with the lock. Closing another descriptor of the file would release the kernel's lock."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(descriptor, path, key)
            if _names(path, descriptor):
                _sign(descriptor, path)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # the previous holder has removed this file


def _sign(descriptor: int, path: Path) -> None:
    """Writes this process into the locked file, which is removed if the disk is full."""
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(asdict(Holder.this_process())).encode(), 0)
    except OSError:
        with suppress(OSError):
            path.unlink()
        raise


def _lock(descriptor: int, path: Path, key: str) -> None:
    """Takes the kernel's lock. Raises FolderInUse if another process holds the folder."""
    locks = True  # whether this file system supports locks
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            holder = _holder(descriptor)
            if holder is None or not holder.was_requeued():
                raise FolderInUse(_refusal(key, path, holder)) from None
            log.warning("%s names %s before it was requeued: this run continues", path, holder)
            # a file server may keep the lock of a node that is gone; `_acquired` makes a new file
            path.unlink(missing_ok=True)
            return
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        locks = False
    holder = _holder(descriptor)
    if holder is None or (locks and holder.boot == _boot()) or holder.was_requeued():
        return
    log.warning("%s names %s: waiting %.0f s for a sign of life of that run", path, holder, PATIENCE_S)
    if _is_touched(path, PATIENCE_S):
        raise FolderInUse(_refusal(key, path, holder))
    log.warning("%s was not touched for %.0f s: that run counts as dead, and this one continues", path, PATIENCE_S)


def _refusal(key: str, path: Path, holder: Holder | None) -> str:
    return (
        f"{key} {path.parent} is in use by another run: {holder or 'a process that is just starting'}. "
        f"Nothing was changed. Wait for its end, stop it, or name another {key}"
    )


def _holder(descriptor: int) -> Holder | None:
    """Returns the process that the file names; None for an empty file or one damaged by a power loss."""
    try:
        return Holder(**json.loads(os.pread(descriptor, 4096, 0)))
    except (ValueError, TypeError):
        return None


def _is_touched(path: Path, seconds: float) -> bool:
    """Returns whether the file is touched within this number of seconds, without opening it (see `_acquired`)."""
    until = time.monotonic() + seconds
    before = path.stat().st_mtime_ns
    while time.monotonic() < until:
        time.sleep(min(1.0, seconds / 10))
        try:
            if path.stat().st_mtime_ns != before:
                return True
        except FileNotFoundError:  # that run has ended and removed its lock
            return False
    return False


def _touch(descriptor: int, stop: threading.Event) -> None:
    while not stop.wait(BEAT_S):
        with suppress(OSError):
            os.utime(descriptor)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _names(path: Path, descriptor: int) -> bool:
    """Returns whether `path` is the file that is open as `descriptor`."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _boot() -> str:
    """Returns the identifier of the start of this machine: kernel locks hold until the next one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return f"{platform.node()} {psutil.boot_time():.0f}"
