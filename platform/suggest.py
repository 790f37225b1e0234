"""Suggests the known name that is closest in spelling to a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

ALIKE = 0.7  # share of equal characters, among the keys of a section: eval_step does not mean max_steps
SURE = 0.8  # among all keys: dropout does not mean rollout


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Returns the name closest in spelling, None if none is close. Case and `-` for `_` do not count as differences."""
    by_folded = {_fold(candidate): candidate for candidate in names}
    matches = difflib.get_close_matches(_fold(name), by_folded, n=1, cutoff=cutoff)
    return by_folded[matches[0]] if matches else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns `did you mean critic?` for the nearest known name, or an empty text."""
    near = nearest(name, known)
    return f"did you mean {near}?" if near else ""


def _fold(name: str) -> str:
    return name.lower().replace("-", "_")
