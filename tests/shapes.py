"""Checks the shapes of tensors in the signatures of `rl_platform.algorithms` and `rl_platform.records`.

In each test, the first `FIRST` calls of a function are checked and one in `EVERY` of the others: a check takes longer
than most of these functions. The modules import the names of shapes for type checkers only, so a run does not load
them. Here they are built-in names. Needs jaxtyping and beartype (pip install -e '.[test]').
"""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype

FIRST, EVERY = 5, 40
check = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is accepted where a float is expected
_calls: dict[Callable[..., Any], int] = {}  # of each function, in this test


def new_test() -> None:
    _calls.clear()


def _at_times(checking: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def call(*given: Any, **named: Any) -> Any:
        count = _calls[call] = _calls.get(call, 0) + 1
        return (checking if count <= FIRST or count % EVERY == 0 else plain)(*given, **named)

    return call


def _jaxtyped(*, typechecker: Any, checked: Any = jaxtyping.jaxtyped) -> Callable[[Any], Any]:
    """As `jaxtyping.jaxtyped`, which `checked` is, of functions and data classes."""

    def decorate(what: Any) -> Any:
        if not isinstance(what, type):
            return _at_times(checked(what, typechecker=typechecker), what)
        plain = what.__init__  # type: ignore[misc]
        if checked(what, typechecker=typechecker).__init__ is not plain:
            what.__init__ = _at_times(what.__init__, plain)  # type: ignore[misc]
        return what

    return decorate


def check_shapes() -> None:
    """To be called before the modules are imported."""
    from rl_platform.algorithms import shapes

    jaxtyping.jaxtyped = _jaxtyped  # the import hook writes calls of it into the modules
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
