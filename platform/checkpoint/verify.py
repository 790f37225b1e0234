"""Reading a checkpoint: nothing is used before every byte of it was verified.

A checkpoint is a folder `step-00000040` with a file (`env.pt`) or a folder of shards (`actor/`) for each part and a
`manifest.json`. The manifest holds the size and SHA-256 of each file, the step and the caller's fingerprint, and is
sealed by a SHA-256 of its own. A person who can write the folder can seal a manifest, so its values are not trusted:
names stay inside the folder, and files are loaded as tensors and plain values only. Loading runs no code from them.

Not covered: what is in a folder of shards; values that hold a pickle as bytes, see
`envs/embodied/saved_states/env_state.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from rl_platform.errors import CheckpointError, shortened
from rl_platform.records import StateDict
from rl_platform.run_files import MANIFEST, STEP_FOLDER

FORMAT = 2
_FILE_NAME = re.compile(r"(?!\.{1,2}(/|$))[\w.-]{1,200}(/(?!\.{1,2}$)[\w.-]{1,200})?", re.ASCII)
_ENTRY = {"bytes": int, "sha256": str}


class UnknownFormat(CheckpointError):
    """An undamaged checkpoint of another version of the platform."""


@dataclass(frozen=True)
class Written:
    """Size and hash of a written file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint. parts: name -> file or folder of shards inside `path`."""

    path: Path
    step: int
    fingerprint: str
    parts: Mapping[str, str]

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Verifies every file of the checkpoint folder `path`. Raises CheckpointError naming each damaged file."""
        path = Path(path)
        checkpoint, expected = _read_manifest(path)
        named = STEP_FOLDER.fullmatch(path.resolve().name)
        if named is None or int(named[1]) != checkpoint.step:
            raise CheckpointError(
                f"checkpoint {path}: {MANIFEST} was written for step {checkpoint.step}, the folder has another name. "
                f"Checkpoints were swapped or renamed; the right name is {folder_name(checkpoint.step)}"
            )
        with ThreadPoolExecutor() as pool:  # hashing releases the interpreter lock: several files at once
            damages = list(filter(None, pool.map(lambda name: damage(path, name, expected[name]), expected)))
        if damages:
            raise CheckpointError(f"checkpoint {path} is damaged: " + "; ".join(damages))
        return checkpoint

    def load(self, part: str, map_location: str | torch.device = "cpu") -> StateDict:
        """Returns the part as it was saved, with tensors on `map_location`.

        Raises CheckpointError if it is missing or unreadable.
        """
        file = self.file(part)
        try:
            state: StateDict = torch.load(file, map_location=map_location, weights_only=True)
        except Exception as error:  # of any type, as torch parses the file
            raise CheckpointError(f"checkpoint file {file} cannot be read: {_first_line(error)}") from error
        if not isinstance(state, dict):
            raise CheckpointError(f"checkpoint file {file} holds {type(state).__name__}, not values by name")
        return state

    def file(self, part: str) -> Path:
        """Returns the file of a part, or its folder of shards. Raises CheckpointError if it is missing."""
        if part not in self.parts:
            raise CheckpointError(f"checkpoint {self.path} has no part {part!r}; it holds: {', '.join(self.parts)}")
        return self.path / self.parts[part]


def damage(path: Path, name: str, expected: Written) -> str:
    """Returns how file `name` in folder `path` differs from what was written; empty if it does not."""
    try:
        if not Path(os.path.realpath(path / name)).is_relative_to(os.path.realpath(path)):
            return f"{name} is a link out of the checkpoint"
        size = (path / name).stat().st_size
        if size != expected.bytes:
            return f"{name} has {size:,} bytes instead of {expected.bytes:,}"
        with open(path / name, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return f"{name}: {error.strerror}"
    return "" if digest == expected.sha256 else f"{name} does not match its SHA-256"


def _read_manifest(path: Path) -> tuple[Checkpoint, dict[str, Written]]:
    """Returns the checkpoint and its files, which are not verified yet."""
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
        sealed = seal(body) == raw  # compares every byte, so the manifest itself cannot be damaged unnoticed
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        sealed = False
    if not sealed:
        raise CheckpointError(f"checkpoint {path} is damaged: {MANIFEST} does not match its own SHA-256")
    if body.get("format") != FORMAT:
        raise UnknownFormat(
            f"checkpoint {path} has format {body.get('format')!s:.20} and this version of the platform reads format "
            f"{FORMAT}. Finish the run with the version that wrote it, or start a new one in another runner.output_dir"
        )
    if wrong := next(_mistyped(body), ""):
        raise CheckpointError(f"checkpoint {path}: {MANIFEST} was not written by this platform: {wrong}")
    files = {name: Written(**entry) for name, entry in body["files"].items()}
    return Checkpoint(path, body["step"], body["fingerprint"], body["parts"]), files


def _mistyped(body: StateDict) -> Iterator[str]:
    """Yields the values of a manifest that have a wrong type or name no file; the seal does not check that."""
    for key, kind in (("step", int), ("fingerprint", str), ("parts", dict), ("files", dict)):
        if type(body.get(key)) is not kind:
            yield f"{key} is {_shown(body.get(key))}"
            return
    for name, entry in body["files"].items():
        if not _FILE_NAME.fullmatch(name):
            yield f"the file {_shown(name)} is not inside the checkpoint"
        if not isinstance(entry, dict) or {key: type(value) for key, value in entry.items()} != _ENTRY:
            yield f"{_shown(name)} has no size and SHA-256: {_shown(entry)}"
    places = {*body["files"], *(name.partition("/")[0] for name in body["files"] if "/" in name)}
    for part, place in body["parts"].items():
        if not isinstance(place, str) or place not in places:
            yield f"part {_shown(part)} is {_shown(place)}, which is none of its files"


def _shown(value: object) -> str:
    return shortened(json.dumps(value))


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def seal(body: Mapping[str, object]) -> bytes:
    """Returns the text of a manifest: `body` and its SHA-256."""
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({**body, "sha256": digest}, sort_keys=True, indent=1).encode()


def folder_name(step: int) -> str:
    """Returns the name of the folder of a step's checkpoint."""
    return f"step-{step:08d}"
