"""Reads the component names in the keys of `cluster.component_placement`.

The rules of the config, which read no inventory of machines, and the grammar of placements share it. Not covered:
whether a run has such a component, and where it is placed.
"""

from __future__ import annotations

from collections.abc import Iterable

from rl_platform.config.schema.cluster import COMPONENTS, PLACEMENT
from rl_platform.errors import Problem
from rl_platform.suggest import did_you_mean

SHOWN = 1_000  # characters of a text in messages


def read_names(keys: Iterable[str]) -> tuple[dict[str, tuple[str, ...]], list[Problem]]:
    """Returns the components of each key that are placed there first, and the problems of all names."""
    problems: list[Problem] = []
    placed_by: dict[str, str] = {}  # component -> its key
    names = {key: _components(key, placed_by, problems) for key in keys}
    if "actor" in placed_by and "actor_critic" in placed_by:
        message = "actor_critic and actor are two names of one component"
        value = f"actor is placed by {placed_by['actor']!r}"
        key, hint = f"{PLACEMENT}.{placed_by['actor_critic']}", "embodied: keep actor_critic; reasoning: keep actor"
        problems.append(Problem(key, message, value=value, allowed="one of the two", hint=hint))
    return names, problems


def problem_at(path: str, text: str, position: int, piece: str, message: str, allowed: str, hint: str) -> Problem:
    """Returns a problem with the whole text, the wrong piece and the position of its first character, from 1."""
    shown = text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
    value = f'"{shown}", character {position + 1}' + (f': "{piece[:SHOWN]}"' if piece else "")
    return Problem(key=path, message=message, value=value, allowed=allowed, hint=hint)


def _components(key: str, placed_by: dict[str, str], problems: list[Problem]) -> tuple[str, ...]:
    """Returns the component names of one key. `placed_by` and `problems` are extended."""
    components: list[str] = []
    position = 0
    for piece in key.split(","):
        name = piece.strip()
        message = hint = ""
        if not name:
            message, hint = "a component name is missing", "there is a comma too many" if key.strip() else ""
        elif name not in COMPONENTS:
            message, hint = f"no component is called {name!r}", did_you_mean(name, COMPONENTS)
            if set(words := name.split()) <= {*COMPONENTS}:
                hint = f"separate components by commas: {','.join(words)}"
            component, colon, resources = name.partition(":")
            if colon and component in COMPONENTS:
                hint = f"YAML needs a space after the colon, as in {component}: {resources or 0}"
        elif name in placed_by:
            again = "twice in this key" if placed_by[name] == key else f"by {placed_by[name]!r} too"
            message, hint = f"{name} is placed {again}", "place every component once"
        if message:
            start = position + (piece.index(name) if name else 0)
            problems.append(problem_at(f"{PLACEMENT}.{key}", key, start, name, message, ", ".join(COMPONENTS), hint))
        else:
            placed_by[name] = key
            components.append(name)
        position += len(piece) + 1
    return tuple(components)
