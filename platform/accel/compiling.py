"""Compiles loops over arrays with numba, for functions that are called often with few numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

# No "nnan" and "ninf": numbers that are not finite must stay so.
ANY_ORDER = frozenset({"contract", "reassoc", "nsz", "arcp"})
IN_ORDER = ANY_ORDER - {"reassoc"}
"""Keeps the order of additions, so equal rows give equal bits."""


def compiled_loops(function: Callable[..., Any], allowed: frozenset[str] = ANY_ORDER) -> Callable[..., Any]:
    """Returns the function, which compiles at its first call and is cached on disk if the folder is writable.

    allowed: LLVM's flags for the arithmetic of floats.
    """
    import numba  # here, as language models never need it

    made = partial(numba.njit, nogil=True, error_model="numpy", fastmath=set(allowed))
    compiled: Callable[..., Any]
    try:
        compiled = made(cache=True)(function)
    except RuntimeError:  # no folder for the cache is writable
        compiled = made()(function)
    return compiled
