"""Writing checkpoints that survive kills, full disks and flipped bits.

A checkpoint is staged under a hidden name, synced and renamed, so a folder with its final name is complete. Files are
hashed while they are written, and verified before older checkpoints are deleted.

Not covered: what belongs into a part, and what is in a folder of shards. One run per folder.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, BinaryIO, cast

import torch

from rl_platform.checkpoint.fingerprints import fingerprint_difference
from rl_platform.checkpoint.verify import (
    FORMAT,
    Checkpoint,
    UnknownFormat,
    Written,
    folder_name,
    seal,
)
from rl_platform.disk import make_folder, size_text, sync, sync_folder
from rl_platform.errors import CheckpointError
from rl_platform.run_files import MANIFEST, STEP_FOLDER

Buffer = bytes | bytearray | memoryview

_HASH_IN_THREAD = 1 << 20  # bytes of one write from which hashing in another thread, beside the disk write, saves time
_PART_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_CONTAINERS = (list, tuple, torch.Size)
_SCALARS = (str, int, float, bool, bytes, type(None))

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shards:
    """A part that several processes write, each its own files.

    bytes: approximate size of all files together. write: makes the processes write and sync their files in a folder
    that all of them see; returns size and hash by file name. It raises CheckpointError if a process cannot write.
    """

    bytes: int
    write: Callable[[Path], Mapping[str, Written]]


Part = Mapping[str, object] | Shards


class CheckpointStore:
    """The checkpoints of one run: `folder` keeps the newest `keep` good ones.

    `fingerprint` describes the model that the parts belong to, one fact per line. A checkpoint with another fingerprint
    is refused, and the message has the lines that differ. Opening the store removes the remains of killed saves.
    """

    def __init__(self, folder: str | Path, keep: int, fingerprint: str = "") -> None:
        self.folder = Path(folder)
        self.keep = keep
        self.fingerprint = fingerprint
        self._damaged: set[int] = set()
        try:
            make_folder(self.folder)
            self._sweep()
        except OSError as error:
            raise CheckpointError(f"{self.folder} cannot be used: {error.strerror}. Check the disk") from error

    def steps(self) -> list[int]:
        """Returns the steps that have a checkpoint folder, ascending, verified or not.

        Raises CheckpointError if they cannot be listed.
        """
        try:
            matches = [STEP_FOLDER.fullmatch(entry.name) for entry in self.folder.iterdir()]
        except OSError as error:
            raise CheckpointError(f"{self.folder} cannot be read: {error.strerror}. Check the disk") from error
        return sorted(int(match[1]) for match in matches if match)

    def latest(self) -> Checkpoint | None:
        """Returns the newest checkpoint that verifies; None if there is no checkpoint.

        Damaged ones are skipped with a warning.
        Raises CheckpointError if the newest good one belongs to another model or to another version of the platform.
        Also raises it if every one is damaged or cannot be read, because a silent new start would lose them.
        """
        damages: list[str] = []
        for step in reversed(self.steps()):
            try:
                checkpoint = Checkpoint.open(self.folder / folder_name(step))
            except UnknownFormat:
                raise
            except CheckpointError as error:
                self._damaged.add(step)
                damages.append(str(error))
                continue
            for damage in damages:
                log.warning("%s. Falling back to an older checkpoint.", damage)
            return self._of_this_model(checkpoint)
        if damages:
            raise CheckpointError(
                f"no checkpoint in {self.folder} can be used, and nothing was changed:\n    "
                + "\n    ".join(damages)
                + "\nRepair the disk or copy a good checkpoint back. To start at step 0, name another "
                "runner.output_dir or remove these folders"
            )
        return None

    def open(self, path: str | Path) -> Checkpoint:
        """Returns the checkpoint at `path`. Raises CheckpointError if it is damaged or belongs to another model."""
        return self._of_this_model(Checkpoint.open(path))

    def save(self, step: int, parts: Mapping[str, Part]) -> Checkpoint:
        """Writes all parts of `step`, verifies them, then deletes older checkpoints beyond `keep`.

        Checkpoints of later steps are deleted too: a run that saves step n after them has gone back and left them.
        Raises TypeError for a value that could not be loaded again, CheckpointError if the disk is full or failing; the
        checkpoints from before are then intact.
        """
        size = _bytes_of(parts)
        final = self.folder / folder_name(step)
        try:
            self.require_space(size, 1)
            self._write(final, step, parts)
            self._damaged.discard(step)
            checkpoint = Checkpoint.open(final)
            self._retain(step)
        except BaseException as error:
            with suppress(OSError):  # ranks may still write where files are deleted: the next start sweeps the rest
                self._sweep()
            if isinstance(error, OSError | CheckpointError):
                raise CheckpointError(self._failure(step, error)) from error
            raise
        return checkpoint

    def set_aside(self, after: int) -> list[int]:
        """Hides checkpoints of steps later than `after`, which the run has left; returns their steps.

        The next save deletes them. Until then `latest` does not find them, so a run that is killed before its next
        checkpoint resumes from where it went back to.
        """
        later = [step for step in self.steps() if step > after]
        for step in later:
            aside = self.folder / f".left-{folder_name(step)}"
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(self.folder / folder_name(step), aside)
        sync_folder(self.folder)
        return later

    def require_space(self, estimate: int, times: int = 2) -> None:
        """Raises CheckpointError unless the disk has room for `times` checkpoints of `estimate` bytes.

        A run needs two: an old checkpoint is deleted after the new one is complete.
        """
        free, needed = shutil.disk_usage(self.folder).free, times * estimate
        if free < needed:
            raise CheckpointError(
                f"not enough disk space for checkpoints in {self.folder}: one takes about {size_text(estimate)}, "
                f"{'twice that is required, ' if times == 2 else ''}{size_text(free)} are free. Free "
                f"{size_text(needed - free)} more or set runner.output_dir to another disk. Existing checkpoints are "
                "untouched"
            )

    def _write(self, final: Path, step: int, parts: Mapping[str, Part]) -> None:
        """Writes the checkpoint in a hidden folder, syncs it and renames it to `final`."""
        stage = self.folder / f".tmp-{final.name}"
        os.mkdir(stage)
        files: dict[str, Written] = {}
        places = {name: name if isinstance(part, Shards) else f"{name}.pt" for name, part in parts.items()}
        for name, part in parts.items():
            if isinstance(part, Shards):
                files |= _write_shards(stage / name, part)
            else:
                files[places[name]] = write_state(stage / places[name], part)
        body = {
            "format": FORMAT,
            "step": step,
            "fingerprint": self.fingerprint,
            "parts": places,
            "files": {name: asdict(written) for name, written in files.items()},
        }
        with open(stage / MANIFEST, "wb") as file:
            file.write(seal(body))
            sync(file)
        sync_folder(stage)
        if final.exists():  # the sweep puts it back if the second rename is never reached
            os.rename(final, self.folder / f".old-{final.name}")
        os.rename(stage, final)
        sync_folder(self.folder)
        shutil.rmtree(self.folder / f".old-{final.name}", ignore_errors=True)

    def _sweep(self) -> None:
        """Removes the remains of killed saves; a checkpoint that was not yet replaced gets its name back."""
        for entry in list(self.folder.iterdir()):
            if entry.name.startswith(".old-step-"):
                final = self.folder / entry.name.removeprefix(".old-")
                if not final.exists():
                    os.rename(entry, final)
                    continue
            if entry.name.startswith((".tmp-step-", ".old-step-")):
                shutil.rmtree(entry)

    def _retain(self, newest: int) -> None:
        """Deletes all but the newest `keep` good checkpoints up to step `newest`."""
        good = [step for step in self.steps() if step <= newest and step not in self._damaged]
        for step in set(self.steps()) - set(good[-self.keep :]):
            # Renamed first: a delete that is killed half-way must not leave a folder that looks like a checkpoint.
            doomed = self.folder / f".tmp-{folder_name(step)}"
            os.rename(self.folder / folder_name(step), doomed)
            shutil.rmtree(doomed)
        for left in self.folder.glob(".left-step-*"):
            shutil.rmtree(left)

    def _of_this_model(self, checkpoint: Checkpoint) -> Checkpoint:
        """Returns the checkpoint. Raises CheckpointError with the facts that differ if it belongs to another model."""
        if difference := fingerprint_difference(checkpoint.fingerprint, self.fingerprint):
            theirs, ours = difference
            raise CheckpointError(
                f"checkpoint {checkpoint.path} belongs to another model: it has {theirs}, this run {ours}. "
                "Use the config it was written with, or another runner.output_dir"
            )
        return checkpoint

    def _failure(self, step: int, error: OSError | CheckpointError) -> str:
        """Returns the message of a save that failed with `error`."""
        try:
            steps = ", ".join(map(str, self.steps())) or "none"
        except CheckpointError:
            steps = "the folder cannot be read"
        return (
            f"checkpoint of step {step} could not be written to {self.folder}: {error}. Free space, check the disk or "
            "set runner.output_dir to another one. "
            f"Steps still on disk: {steps}"
        )


class HashingWriter(io.IOBase):
    """A binary file that hashes and counts what is written. Large chunks are hashed while the disk writes them.

    `error`: that of a failed write, because torch replaces it by a RuntimeError about positions.
    """

    def __init__(self, file: BinaryIO, pool: ThreadPoolExecutor) -> None:
        self.file, self.pool = file, pool
        self.sha256, self.bytes = hashlib.sha256(), 0
        self.error: BaseException | None = None

    def write(self, data: Buffer) -> int:
        size = memoryview(data).nbytes
        try:
            if size < _HASH_IN_THREAD:
                self.sha256.update(data)
                self.file.write(data)
            else:
                hashing = self.pool.submit(self.sha256.update, data)
                try:
                    self.file.write(data)
                finally:
                    hashing.result()  # `data` is valid during this call only
        except BaseException as error:
            self.error = error
            raise
        self.bytes += size
        return size

    def tell(self) -> int:
        return self.bytes

    def fileno(self) -> int:
        return int(self.file.fileno())

    def flush(self) -> None:
        if not self.file.closed:
            self.file.flush()

    @property
    def written(self) -> Written:
        return Written(self.bytes, self.sha256.hexdigest())


def write_state(path: Path, state: Mapping[str, object]) -> Written:
    """Writes `state` with `torch.save` and syncs it to the disk. Raises OSError if the disk fails."""
    with open(path, "wb") as file, ThreadPoolExecutor(1) as pool:
        writer = HashingWriter(file, pool)
        try:
            torch.save(state, cast("IO[bytes]", writer))
        except RuntimeError:
            if writer.error is not None:
                raise writer.error from None
            raise
        sync(file)
    return writer.written


def _write_shards(folder: Path, shards: Shards) -> dict[str, Written]:
    """Returns size and hash of each file, by its path in the checkpoint."""
    os.mkdir(folder)
    written = shards.write(folder)
    if missing := sorted(file for file in written if not (folder / file).exists()):
        raise CheckpointError(f"{missing[0]} was written on another node: all nodes must share the output folder")
    sync_folder(folder)
    return {f"{folder.name}/{file}": hashed for file, hashed in written.items()}


def _bytes_of(parts: Mapping[str, Part]) -> int:
    """Returns the approximate bytes of the parts on disk.

    Raises ValueError and TypeError for names and values that could not be loaded again."""
    storages: dict[int, int] = {}
    for name, part in parts.items():
        if not _PART_NAME.fullmatch(name):
            raise ValueError(f"part {name!r}: use letters, digits, '_', '-' and '.'")
        if not isinstance(part, Shards):
            _measure(part, name, storages)
    return sum(storages.values()) + sum(part.bytes for part in parts.values() if isinstance(part, Shards))


def _measure(value: object, where: str, storages: dict[int, int]) -> None:
    """Adds the bytes of each distinct tensor storage under `value`. Raises TypeError if `weights_only` refuses it."""
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    elif isinstance(value, dict) and type(value) in (dict, OrderedDict):
        for key, item in value.items():
            if type(key) not in _SCALARS:
                raise TypeError(f"checkpoint part {where}: key {key!r} is a {type(key).__name__}, not a plain value")
            _measure(item, f"{where}.{key}", storages)
    elif isinstance(value, Collection) and type(value) in _CONTAINERS:
        for index, item in enumerate(value):
            _measure(item, f"{where}[{index}]", storages)
    elif type(value) not in _SCALARS:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise TypeError(f"checkpoint part {where}: {kind} cannot be saved; use tensors, dicts, lists and plain values")
