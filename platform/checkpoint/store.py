"""Checkpoints that survive kills, full disks and flipped bits.

A checkpoint is a folder `step-00000040` with a file (`env.pt`) or a folder of shards (`actor/`) for each part and a
`manifest.json` that holds size and SHA-256 of each file, the step and the caller's fingerprint, and is itself sealed by
a SHA-256. It is staged under a hidden name, synced and renamed, so a folder with its final name is complete; everything
is verified again before it is read. Files hold tensors and plain values only, so loading never runs code from them.

Not covered: what belongs into a part, and what is in a folder of shards. One run per folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from rl_platform.checkpoint.files import Written, damage, write_state
from rl_platform.disk import sync, sync_folder
from rl_platform.errors import CheckpointError

FORMAT = 2  # 1: the state of a learner was one file
MANIFEST = "manifest.json"
_STEP_FOLDER = re.compile(r"step-(\d{8,})")
_PART_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_CONTAINERS = (list, tuple, torch.Size)
_SCALARS = (str, int, float, bool, bytes, type(None))

log = logging.getLogger(__name__)


class UnknownFormat(CheckpointError):
    """A good checkpoint, of another version of the platform."""


@dataclass(frozen=True)
class Shards:
    """A part that several processes write, each its own files.

    bytes: about how much they write together. write: they write into the folder, which all of them see, and sync; the
    result is what was written, by file name. Raises CheckpointError if one of them cannot.
    """

    bytes: int
    write: Callable[[Path], Mapping[str, Written]]


Part = Mapping[str, Any] | Shards


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint. `parts` maps names to what holds them inside `path`: a file, or a folder of shards."""

    path: Path
    step: int
    fingerprint: str
    parts: Mapping[str, str]

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Verify every file of the checkpoint folder `path`. Raises CheckpointError naming each damaged file."""
        path = Path(path)
        manifest = _read_manifest(path)
        named = _STEP_FOLDER.fullmatch(path.resolve().name)
        if named is None or int(named[1]) != manifest["step"]:
            raise CheckpointError(
                f"checkpoint {path}: {MANIFEST} was written for step {manifest['step']}, the folder has another name. "
                f"Checkpoints were swapped or renamed; the right name is {_folder_name(manifest['step'])}"
            )
        with ThreadPoolExecutor() as pool:  # hashing releases the interpreter lock: several files at once
            expected = {name: Written(**entry) for name, entry in manifest["files"].items()}
            damages = list(filter(None, pool.map(lambda name: damage(path, name, expected[name]), expected)))
        if damages:
            raise CheckpointError(f"checkpoint {path} is damaged: " + "; ".join(damages))
        return cls(path, manifest["step"], manifest["fingerprint"], manifest["parts"])

    def load(self, part: str, map_location: str | torch.device = "cpu") -> dict[str, Any]:
        """The part as it was saved, tensors on `map_location`. CheckpointError if it is missing or unreadable."""
        file = self.file(part)
        try:
            state: dict[str, Any] = torch.load(file, map_location=map_location, weights_only=True)
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"checkpoint file {file} cannot be read: {error}") from error
        return state

    def file(self, part: str) -> Path:
        """The file of a part, or its folder of shards. CheckpointError if it is missing."""
        if part not in self.parts:
            raise CheckpointError(f"checkpoint {self.path} has no part {part!r}; it holds: {', '.join(self.parts)}")
        return self.path / self.parts[part]


class CheckpointStore:
    """The checkpoints of one run: `folder` keeps the newest `keep` good ones.

    `fingerprint` says what the parts belong to, a line for each fact (model shapes, say); a checkpoint with another one
    is refused and the differing lines are shown. Opening the store sweeps what killed saves left behind.
    """

    def __init__(self, folder: str | Path, keep: int, fingerprint: str = "") -> None:
        self.folder = Path(folder)
        self.keep = keep
        self.fingerprint = fingerprint
        self._damaged: set[int] = set()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
        except OSError as error:
            raise CheckpointError(f"{self.folder} cannot be used: {error.strerror}. Check the disk") from error

    def steps(self) -> list[int]:
        """Steps with a checkpoint folder, ascending, verified or not. CheckpointError if they cannot be listed."""
        try:
            found = [_STEP_FOLDER.fullmatch(entry.name) for entry in self.folder.iterdir()]
        except OSError as error:
            raise CheckpointError(f"{self.folder} cannot be read: {error.strerror}. Check the disk") from error
        return sorted(int(match[1]) for match in found if match)

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint that verifies, None if there is no checkpoint. Damaged ones are skipped with a warning.

        Raises CheckpointError if the newest good one belongs to another model or to another version of the platform,
        and if every one is damaged or cannot be read: starting over silently would lose them.
        """
        damages: list[str] = []
        for step in reversed(self.steps()):
            try:
                checkpoint = Checkpoint.open(self.folder / _folder_name(step))
            except UnknownFormat:
                raise
            except CheckpointError as error:
                self._damaged.add(step)
                damages.append(str(error))
                continue
            for found in damages:
                log.warning("%s. Falling back to an older checkpoint.", found)
            return self._own(checkpoint)
        if damages:
            raise CheckpointError(
                f"no checkpoint in {self.folder} can be used, and nothing was changed:\n    "
                + "\n    ".join(damages)
                + "\nRepair the disk or copy a good checkpoint back. To start at step 0, name another "
                "runner.output_dir or remove these folders"
            )
        return None

    def open(self, path: str | Path) -> Checkpoint:
        """The checkpoint at an explicit path. Raises CheckpointError if it is damaged or belongs to another model."""
        return self._own(Checkpoint.open(path))

    def save(self, step: int, parts: Mapping[str, Part]) -> Checkpoint:
        """Write all parts of `step`, verify them, then delete older checkpoints beyond `keep`.

        Checkpoints of later steps are deleted too: a run that saves step n after them has gone back and left them.
        Raises TypeError for a value that could not be loaded again, CheckpointError if the disk is full or failing; the
        checkpoints from before are then intact.
        """
        size = _bytes_of(parts)
        final = self.folder / _folder_name(step)
        try:
            self._require(size, 1)
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
            aside = self.folder / f".left-{_folder_name(step)}"
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(self.folder / _folder_name(step), aside)
        sync_folder(self.folder)
        return later

    def require_space(self, estimate: int) -> None:
        """Raise CheckpointError unless twice `estimate` (bytes of one checkpoint) are free where the store lies: an old
        one goes when the new one is complete."""
        self._require(estimate, 2)

    def _require(self, estimate: int, times: int) -> None:
        free, needed = shutil.disk_usage(self.folder).free, times * estimate
        if free < needed:
            raise CheckpointError(
                f"not enough disk space for checkpoints in {self.folder}: one takes about {_size(estimate)}, "
                f"{'twice that is required, ' if times == 2 else ''}{_size(free)} are free. Free "
                f"{_size(needed - free)} more or set runner.output_dir to another disk. Existing checkpoints are "
                "untouched"
            )

    def _write(self, final: Path, step: int, parts: Mapping[str, Part]) -> None:
        stage = self.folder / f".tmp-{final.name}"
        os.mkdir(stage)
        files: dict[str, Written] = {}
        places = {name: name if isinstance(part, Shards) else f"{name}.pt" for name, part in parts.items()}
        for name, part in parts.items():
            if isinstance(part, Shards):
                files |= _write_shards(stage, name, part)
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
            file.write(_seal(body))
            sync(file)
        sync_folder(stage)
        if final.exists():  # the sweep puts it back if the second rename is never reached
            os.rename(final, self.folder / f".old-{final.name}")
        os.rename(stage, final)
        sync_folder(self.folder)
        shutil.rmtree(self.folder / f".old-{final.name}", ignore_errors=True)

    def _sweep(self) -> None:
        for entry in list(self.folder.iterdir()):
            if entry.name.startswith(".old-step-"):
                final = self.folder / entry.name.removeprefix(".old-")
                if not final.exists():
                    os.rename(entry, final)
                    continue
            if entry.name.startswith((".tmp-step-", ".old-step-")):
                shutil.rmtree(entry)

    def _retain(self, newest: int) -> None:
        good = [step for step in self.steps() if step <= newest and step not in self._damaged]
        for step in set(self.steps()) - set(good[-self.keep :]):
            # Renamed first: a delete that is killed half-way must not leave a folder that looks like a checkpoint.
            doomed = self.folder / f".tmp-{_folder_name(step)}"
            os.rename(self.folder / _folder_name(step), doomed)
            shutil.rmtree(doomed)
        for left in self.folder.glob(".left-step-*"):
            shutil.rmtree(left)

    def _own(self, checkpoint: Checkpoint) -> Checkpoint:
        if checkpoint.fingerprint != self.fingerprint:
            theirs, ours = checkpoint.fingerprint.splitlines(), self.fingerprint.splitlines()
            raise CheckpointError(
                f"checkpoint {checkpoint.path} belongs to another model: "
                f"it has {'; '.join(line for line in theirs if line not in ours) or 'nothing more'}, "
                f"this run {'; '.join(line for line in ours if line not in theirs) or 'nothing more'}. "
                "Use the config it was written with, or another runner.output_dir"
            )
        return checkpoint

    def _failure(self, step: int, error: OSError | CheckpointError) -> str:
        try:
            steps = ", ".join(map(str, self.steps())) or "none"
        except CheckpointError:
            steps = "the folder cannot be read"
        return (
            f"checkpoint of step {step} could not be written to {self.folder}: {error}. Free space, check the disk or "
            "set runner.output_dir to another one. "
            f"Steps still on disk: {steps}"
        )


def _write_shards(stage: Path, name: str, shards: Shards) -> dict[str, Written]:
    folder = stage / name
    os.mkdir(folder)
    written = shards.write(folder)
    if missing := sorted(file for file in written if not (folder / file).exists()):
        raise CheckpointError(f"{missing[0]} was written elsewhere: every node must see the same output folder")
    sync_folder(folder)
    return {f"{name}/{file}": found for file, found in written.items()}


def _bytes_of(parts: Mapping[str, Part]) -> int:
    """What the parts take on disk, about. ValueError, TypeError for names and values that could not be loaded again."""
    storages: dict[int, int] = {}
    for name, part in parts.items():
        if not _PART_NAME.fullmatch(name):
            raise ValueError(f"part {name!r}: use letters, digits, '_', '-' and '.'")
        if not isinstance(part, Shards):
            _measure(part, name, storages)
    return sum(storages.values()) + sum(part.bytes for part in parts.values() if isinstance(part, Shards))


def _measure(value: Any, where: str, storages: dict[int, int]) -> None:
    """Add the bytes of each distinct tensor storage under `value`; TypeError for what `weights_only` would not load."""
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    elif type(value) in (dict, OrderedDict):
        for key, item in value.items():
            if type(key) not in _SCALARS:
                raise TypeError(f"checkpoint part {where}: key {key!r} is a {type(key).__name__}, not a plain value")
            _measure(item, f"{where}.{key}", storages)
    elif type(value) in _CONTAINERS:
        for index, item in enumerate(value):
            _measure(item, f"{where}[{index}]", storages)
    elif type(value) not in _SCALARS:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise TypeError(f"checkpoint part {where}: {kind} cannot be saved; use tensors, dicts, lists and plain values")


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    try:
        raw = file.read_bytes()
    except OSError as error:
        inside = sorted(entry.name for entry in path.glob("step-*")) if path.is_dir() else []
        hint = f"; name one of its checkpoints: {', '.join(inside)}" if inside else ""
        raise CheckpointError(f"checkpoint {path}: {MANIFEST} cannot be read: {error.strerror}{hint}") from error
    try:
        body = json.loads(raw)
        body.pop("sha256")
        sealed = _seal(body) == raw  # compares every byte, so the manifest itself cannot be damaged unnoticed
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        sealed = False
    if not sealed:
        raise CheckpointError(f"checkpoint {path} is damaged: {MANIFEST} does not match its own SHA-256")
    if body["format"] != FORMAT:
        raise UnknownFormat(
            f"checkpoint {path} has format {body['format']} and this version of the platform reads format {FORMAT}. "
            "Finish the run with the version that wrote it, or start a new one in another runner.output_dir"
        )
    return dict(body)


def _seal(body: Mapping[str, Any]) -> bytes:
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({**body, "sha256": digest}, sort_keys=True, indent=1).encode()


def _folder_name(step: int) -> str:
    return f"step-{step:08d}"


def _size(count: int) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e8 else f"{count / 1e6:,.2f} MB"
