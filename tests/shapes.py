"""Checks the shapes of tensors in the signatures of `rl_platform.algorithms` and `rl_platform.records` at each call.

The modules import these names for type checkers only, so a run does not load it. Here they are built-in names.
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
    from rl_platform.algorithms import shapes

    for module, names in ((jaxtyping, ("Bool", "Float", "Int", "Shaped")), (shapes, shapes.__all__)):
        for name in names:
            setattr(builtins, name, getattr(module, name))
    jaxtyping.install_import_hook(["rl_platform.algorithms", "rl_platform.records"], "shapes.check")


@contextmanager
def unchecked_shapes() -> Iterator[None]:
    """For tests that pass what the signatures forbid."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
