"""Loops over arrays that numba compiles: for what is called often with few numbers, too few for tensor operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

# No "nnan" and "ninf": what is not finite must stay so.
ANY_ORDER = frozenset({"contract", "reassoc", "nsz", "arcp"})
IN_ORDER = ANY_ORDER - {"reassoc"}
"""Sums are added up as they are written, so equal rows give equal bits."""


def compiled_loops(function: Callable[..., Any], allowed: frozenset[str] = ANY_ORDER) -> Callable[..., Any]:
    """The function, compiled at its first call and kept on disk where that can be written. `allowed`: what may change
    in the arithmetic of floats."""
    import numba  # here, as language models never need it

    made = partial(numba.njit, nogil=True, error_model="numpy", fastmath=set(allowed))
    compiled: Callable[..., Any]
    try:
        compiled = made(cache=True)(function)
    except RuntimeError:  # no folder to keep it in can be written
        compiled = made()(function)
    return compiled
