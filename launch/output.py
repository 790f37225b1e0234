"""The run's output folder: checks, its lock, its config files, and cleaning up after a failed start.

Not covered: metrics and checkpoints, which are written by `rl_platform.metrics` and `rl_platform.checkpoint.write`.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rl_platform.checkpoint.verify import Checkpoint
from rl_platform.config.differences import differences
from rl_platform.config.schema import Config
from rl_platform.disk import make_folder, no_space, private, sync, sync_folder
from rl_platform.errors import ConfigError, DataError, PlatformError, Problem, WorkerError
from rl_platform.launch.run_lock import LOCK, locked
from rl_platform.run_files import CONFIG

# An empty folder may have these: lost+found is in the root of a file system, the others are left by a killed start.
EMPTY = {LOCK, "lost+found", "config.tmp"}
STARTED = {
    CONFIG,
    "metrics.jsonl",
    "samples.jsonl",
    "evaluation.mp4",
    "evaluation.json",
    "evaluation-worst.mp4",
    "evaluation-worst.json",
    "tokens.jsonl",
    "trace.json",
    "stacks.txt",
    "wandb_id",
    "trackio_id",
    "tensorboard",
    "wandb",
    "checkpoints",
}
# errors of writes, which carry no file name
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE}
_EARLIER = re.compile(r"config-step-(\d+)\.yaml")


def output_path(config: Config) -> Path:
    """Returns the absolute path of the run's folder."""
    return Path(config.runner.output_dir).absolute()


class OutputFolder:
    """The locked folder of a run. new: it held no run before. kept: a failure leaves its files."""

    def __init__(self, path: Path, new: bool) -> None:
        self.path, self.new = path, new
        self.kept = not new
        self._earlier: str | None = None  # config.yaml of the earlier steps, until this launch has made a step
        self._stepped = False
        self._opened = path.stat()  # to notice that the folder was replaced

    def keep(self) -> None:
        """Keeps the files of the run from its first step on. Raises DataError if the folder was deleted or moved."""
        self.kept = self._stepped = True
        self._earlier = None
        try:
            moved = not os.path.samestat(self.path.stat(), self._opened)
        except FileNotFoundError:
            moved = True
        if moved:
            raise DataError(
                f"{self.path} was deleted or moved while the run wrote to it. Move it back and repeat the command, "
                "which resumes from the newest checkpoint"
            )

    def write_config(self, text: str, resumed: Checkpoint | None) -> list[str]:
        """Writes config.yaml. `resumed`: the checkpoint that the run continues from.

        If the config of the earlier steps differs, it is saved as config-step-N.yaml. Returns the differences as notes.
        """
        notes: list[str] = []
        if not self.new and not self._stepped and self._earlier is None:
            self._earlier = (self.path / CONFIG).read_text(encoding="utf-8", errors="surrogateescape")
        before = "" if resumed is None else _config_of(resumed)
        if resumed is not None and (notes := differences(before, text)):
            kept = self.path / f"config-step-{resumed.step}.yaml"
            if not kept.exists():
                _replace(kept, before)
            notes = [f"the config changed at step {resumed.step}; the earlier one is {kept.name}", *notes]
        _replace(self.path / CONFIG, text)
        return notes

    def restore_config(self) -> None:
        """Writes config.yaml as it was before a launch that was refused before its first step.

        The checkpoints of the folder are of that config, and `rl-platform export` and `--eval` read both.
        """
        if self._earlier is not None:
            _replace(self.path / CONFIG, self._earlier)

    def discard(self) -> None:
        """Removes the files of a launch that failed before its first step, unless the folder holds other files."""
        entries = {entry.name for entry in self.path.iterdir()}
        checkpoints = self.path / "checkpoints"
        if entries - STARTED - EMPTY or (checkpoints.is_dir() and any(checkpoints.iterdir())):
            return
        for name in entries & STARTED:
            place = self.path / name
            shutil.rmtree(place) if place.is_dir() else place.unlink()


@contextmanager
def output_folder(config: Config, resolved_yaml: str) -> Iterator[OutputFolder]:
    """Locks the run's folder during the block. A failure before the first step removes the files of this launch.

    Raises ConfigError if the folder cannot be made, FolderInUse if another run writes there, DataError if the disk
    fails.
    """
    path = output_path(config)
    made = not path.exists()
    lock = locked(path)
    try:
        make_folder(path, 0o700)  # an existing folder keeps its mode
        lock.__enter__()
    except OSError as error:
        if made:
            with suppress(OSError):  # removes an empty folder only
                path.rmdir()
        raise _cannot_be_made(path, error) from error
    try:
        folder = OutputFolder(path, not (path / CONFIG).exists())
        try:
            if folder.new:
                _replace(path / CONFIG, resolved_yaml)
        except OSError as error:
            raise _cannot_be_made(path, error) from error
        try:
            yield folder
        except BaseException as error:
            if isinstance(error, ConfigError | DataError):
                with suppress(OSError):
                    folder.restore_config()
            if not folder.kept:
                with suppress(OSError):
                    folder.discard()
            if (reason := _disk_failure(path, error)) is not None:
                raise reason from error
            raise
    finally:
        lock.__exit__(None, None, None)
        if made:
            with suppress(OSError):  # removes an empty folder only
                path.rmdir()


def _config_of(checkpoint: Checkpoint) -> str:
    """Returns the config that a checkpoint was written with; empty if it cannot be read."""
    folder = checkpoint.path.resolve().parent.parent
    try:
        later = ((int(match[1]), path) for path in folder.iterdir() if (match := _EARLIER.fullmatch(path.name)))
        candidates = sorted((step, path) for step, path in later if step >= checkpoint.step)
        return (candidates[0][1] if candidates else folder / CONFIG).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _replace(path: Path, text: str) -> None:
    """Writes a file as a whole or not at all; it is on the disk when this returns.

    A new file is the user's alone; one that is replaced passes on its mode.
    """
    part = path.with_suffix(".tmp")
    try:
        with private(part) as file:
            file.write(text)
            if path.exists():
                os.fchmod(file.fileno(), path.stat().st_mode & 0o777)
            sync(file)
        os.replace(part, path)
        sync_folder(path.parent)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise


def _cannot_be_made(path: Path, error: OSError) -> ConfigError | DataError:
    if (full := no_space(error, path)) is not None:
        return full
    message = f"cannot be made: {error.strerror}"
    return ConfigError([Problem("runner.output_dir", message, value=str(path))])


def _disk_failure(folder: Path, error: BaseException) -> DataError | None:
    """Returns the error to raise instead of `error` if the disk of the folder caused it."""
    cause = error.__cause__ if isinstance(error, WorkerError) else error
    if not isinstance(cause, OSError):
        return None if cause is None or isinstance(cause, PlatformError) else no_space(cause, folder)
    named = isinstance(cause.filename, str | os.PathLike) and Path(cause.filename).is_relative_to(folder)
    if not named and (cause.filename is not None or cause.errno not in DISK_ERRORS):
        return None
    reason = DataError(
        f"{cause.filename if named else folder} cannot be written or read: {cause.strerror}. Free space, check the "
        "disk or set runner.output_dir to another one"
    )
    for note in getattr(error, "__notes__", []):
        reason.add_note(note)
    return reason
