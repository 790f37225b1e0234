"""Compiles loops over arrays with numba, for functions that are called often with few numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar

import numpy as np

# No "nnan" and "ninf": numbers that are not finite must stay so.
ANY_ORDER = frozenset({"contract", "reassoc", "nsz", "arcp"})
IN_ORDER = ANY_ORDER - {"reassoc"}
"""Keeps the order of additions, so equal rows give equal bits."""
Array = np.ndarray
Compiled = Callable[..., Any]
Code = TypeVar("Code")


def compiled_loops(
    allowed: frozenset[str] = ANY_ORDER,
) -> Callable[[Callable[..., object]], Callable[[], Compiled]]:
    """Decorator: `function()` returns the compiled function, which compiles at its first call.

    allowed: LLVM's flags for the arithmetic of floats.
    """

    def decorated(function: Callable[..., object]) -> Callable[[], Compiled]:
        @cache
        @wraps(function)
        def compiled() -> Compiled:
            import numba  # here, as language models never need it

            return cached(numba.njit, function, nogil=True, error_model="numpy", fastmath=set(allowed))

        return compiled

    return decorated


def cached(
    compiler: Callable[..., Callable[[Callable[..., object]], Code]], function: Callable[..., object], **options: object
) -> Code:
    """Returns `compiler(**options)(function)`, cached on disk if the folder is writable."""
    try:
        return compiler(cache=True, **options)(function)
    except RuntimeError:  # no folder for the cache is writable
        return compiler(**options)(function)
