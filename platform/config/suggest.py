"""Suggests the known name that is closest in spelling to a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The name closest in spelling, None if none is close. Case and `-` for `_` do not count as differences."""
    by_folded = {_fold(candidate): candidate for candidate in names}
    matches = difflib.get_close_matches(_fold(name), by_folded, n=1, cutoff=0.6)
    return by_folded[matches[0]] if matches else None


def _fold(name: str) -> str:
    return name.lower().replace("-", "_")
