"""Reads a config file together with the one it extends: `extends: ../ppo_tiny.yaml`, from the file's own folder.

How the keys of the files are merged is in `layers.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from rl_platform.config.layers import Layers
from rl_platform.config.python_values import DICT, as_yaml
from rl_platform.config.source import Tree, YamlReader
from rl_platform.disk import read_regular
from rl_platform.errors import ConfigError, Problem
from rl_platform.extras import find
from rl_platform.text_files import NotUTF8, text_of

EXPLANATIONS = "rl_platform.config.explanations"  # an extra
EXTENDS = "extends"
MAX_BYTES = 200_000  # of a file: PyYAML reads some hundred thousand per second
MAX_FILES = 32  # that extend each other


def read_config(source: str | os.PathLike[str] | Mapping[str, object]) -> Layers:
    """Returns the layers of a file, or of a dict, and of the files it extends. A dict names them from the working
    folder.

    Raises ConfigError for an empty name, and if one of the files holds no mapping.
    """
    if isinstance(source, str) and not source.strip():
        message, hint = "the name of the file is empty", "a variable of the shell may be unset"
        raise ConfigError([Problem("config", message, value=repr(source), hint=hint)])
    path: str | Path = DICT if isinstance(source, Mapping) else Path(source)
    text, problems = as_yaml(source) if isinstance(source, Mapping) else (None, [])
    files: list[tuple[Tree, dict[str, str]]] = []
    opened: list[Path] = []
    place, name = "", str(path)  # the line and the value of the `extends` that leads to the next file
    while True:
        tree, where = _read(path, place, name, problems, text)
        opened.append(Path(os.path.realpath(path)))
        files.append((tree, where))
        if EXTENDS not in tree:
            break
        name, place = tree.pop(EXTENDS), where.pop(EXTENDS)
        path, text = _base(path, name, place, opened, problems), None
    layers = Layers(problems=problems)
    for tree, where in reversed(files):
        layers.add(tree, where)
    return layers


def _read(
    path: str | Path, place: str, name: str, problems: list[Problem], text: str | None
) -> tuple[Tree, dict[str, str]]:
    """Returns the mapping in a file and the lines of its keys. `place` is the line that names the file, "" for the
    first.

    text: of a dict, which is no file.
    """
    reader = YamlReader(str(path), numbered=text is None)
    try:
        tree = reader.read(_text_of(path) if text is None else text)
    except ConfigError as error:
        if place:
            first = error.problems[0]
            problems.append(_broken(f"{first.message}: {first.where}", place, name, first.hint))
            raise ConfigError(problems) from error
        raise
    problems += reader.problems
    if isinstance(tree, dict):
        return tree, reader.where
    if not reader.problems:
        problems.append(_broken(f"{path} holds no mapping", place, name) if place else _no_mapping(path, tree))
    raise ConfigError(problems)


def _base(path: str | Path, name: object, place: str, opened: list[Path], problems: list[Problem]) -> str:
    """Returns the path of the file called `name` in the file at `path`. Raises ConfigError for a name that cannot be
    one."""
    message = hint = ""
    if not isinstance(name, str) or not name:
        message, name, hint = "names no file", repr(name), "as extends: ../ppo_tiny.yaml"
    elif len(opened) == MAX_FILES:
        message = f"more than {MAX_FILES} files extend each other"
    else:
        file = os.path.normpath(Path(path).parent / name)
        if (real := Path(os.path.realpath(file))) not in opened:
            return file
        circle = " -> ".join(base.name for base in (*opened, real))
        message = f"the files extend each other in a circle: {circle}"
    raise ConfigError([*problems, _broken(message, place, str(name), hint)])


def _broken(message: str, place: str, value: str, hint: str = "") -> Problem:
    return Problem(EXTENDS, message, where=place, value=value, hint=hint)


def _no_mapping(path: str | Path, tree: object) -> Problem:
    message = "the file is empty" if tree is None else "the file contains no mapping"
    return Problem("config", message, where=str(path), hint="it needs at least the sections runner and cluster")


def _text_of(path: str | Path) -> str:
    try:
        return text_of(read_regular(path, MAX_BYTES), path)
    except NotUTF8 as error:
        problem = Problem("config", str(error), where=f"{path}:{error.line}", hint=error.hint)
        raise ConfigError([problem]) from error
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        hint = ""
        with suppress(OSError):  # of a path that the operating system refuses
            hint = find(EXPLANATIONS, "near_files.config_near", lambda _: "")(Path(path))
        raise ConfigError(
            [Problem("config", f"the file cannot be read: {reason}", where=str(path), hint=hint)]
        ) from error
