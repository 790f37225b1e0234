"""Checks the shapes of tensors in the signatures of `rl_platform.algorithms` and `rl_platform.records` at each call.

The modules import jaxtyping's names for type checkers only, so a run does not load it. Here they are built-in names.
Needs jaxtyping and beartype (pip install -e '.[test]').
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from contextlib import contextmanager

import jaxtyping
from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is accepted where a float is expected


def check_shapes() -> None:
    """To be called before the modules are imported."""
    for name in ("Bool", "Float", "Int", "Shaped"):
        setattr(builtins, name, getattr(jaxtyping, name))
    jaxtyping.install_import_hook(["rl_platform.algorithms", "rl_platform.records"], "shapes.check")


@contextmanager
def unchecked_shapes() -> Iterator[None]:
    """For tests that pass what the signatures forbid."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
