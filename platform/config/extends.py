"""Reads a config file together with the one it extends: `extends: ../ppo_tiny.yaml`, from the file's own folder.

What the file writes comes first. Sections are merged key by key, everything else is replaced, and so is
`cluster.component_placement` as a whole: beside other keys, those of the extended file would place components twice.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from rl_platform.config.source import YamlReader
from rl_platform.config.suggest import nearest
from rl_platform.errors import ConfigError, Problem

EXTENDS = "extends"
_REPLACED = ("cluster.component_placement",)


class Source(NamedTuple):
    """What stands in one file and those it extends; `where` maps every key to the `file:line` it comes from.

    tree: no mapping if the file holds none; None if one of the files cannot be read.
    """

    tree: Any
    where: dict[str, str]
    problems: list[Problem]


def read_config(path: str | Path, extending: tuple[Path, ...] = ()) -> Source:
    """The file at `path`; `extending` are the files that led here. Raises ConfigError if there is no such text."""
    reader = YamlReader(str(path))
    tree = reader.read(_text_of(path))
    if not isinstance(tree, dict) or EXTENDS not in tree:
        return Source(tree, reader.where, reader.problems)
    name, place = tree.pop(EXTENDS), reader.where.pop(EXTENDS)
    below, where, problems = _read_base(path, name, place, (*extending, Path(path).resolve()))
    if below is not None:
        _merge(below, where, tree, "")
    return Source(below, where | reader.where, problems + reader.problems)


def _read_base(path: str | Path, name: Any, place: str, files: tuple[Path, ...]) -> Source:
    """The file called `name` at `place`, a mapping or None."""
    if not isinstance(name, str) or not name:
        return _unread("names no file", place, repr(name), "as extends: ../ppo_tiny.yaml")
    file = os.path.normpath(Path(path).parent / name)
    if Path(file).resolve() in files:
        circle = " -> ".join(found.name for found in (*files, Path(file)))
        return _unread(f"the files extend each other in a circle: {circle}", place, name)
    try:
        found = read_config(file, files)
    except ConfigError as error:
        return _unread(f"{error.problems[0].message}: {file}", place, name)
    if isinstance(found.tree, dict) or found.problems:
        return found
    return _unread(f"{file} holds no mapping", place, name)


def _unread(message: str, place: str, value: str, hint: str = "") -> Source:
    return Source(None, {}, [Problem(EXTENDS, message, place, value, hint=hint)])


def _merge(below: dict[str, Any], where: dict[str, str], above: dict[str, Any], path: str) -> None:
    """Lays `above`, whose keys lie under `path`, over `below`; `where` forgets what is replaced. Both in place."""
    for name, value in above.items():
        key = f"{path}.{name}" if path else name
        if isinstance(value, dict) and isinstance(below.get(name), dict) and key not in _REPLACED:
            _merge(below[name], where, value, key)
            continue
        below[name] = value
        for stale in [known for known in where if known.startswith((f"{key}.", f"{key}["))]:
            del where[stale]


def _text_of(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        hint = _file_near(Path(path)) if isinstance(error, FileNotFoundError) else ""
        raise ConfigError([Problem("config", f"the file cannot be read: {reason}", str(path), hint=hint)]) from error


def _file_near(path: Path) -> str:
    """Which config of the same folder was probably meant."""
    found = nearest(path.stem, {file.stem for file in path.parent.glob("*.yaml")})
    return f"did you mean {path.with_name(f'{found}.yaml')}?" if found else ""
