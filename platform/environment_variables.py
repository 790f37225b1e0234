"""Environment variables of this process and of its children, changed for a while."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def changed_variables(values: Mapping[str, str | None]) -> Iterator[None]:
    """Sets these variables, or removes those that are None, until the block ends."""
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def inherited(*names: str) -> dict[str, str]:
    """Returns those of these variables that are set, for processes that do not inherit the environment of this one."""
    return {name: os.environ[name] for name in names if name in os.environ}


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
