"""Compiles loops over arrays with numba, for functions that are called often with few numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import numpy as np

# No "nnan" and "ninf": numbers that are not finite must stay so.
ANY_ORDER = frozenset({"contract", "reassoc", "nsz", "arcp"})
IN_ORDER = ANY_ORDER - {"reassoc"}
"""Keeps the order of additions, so equal rows give equal bits."""
Array = np.ndarray
Compiled = Callable[..., Any]


def compiled_loops(allowed: frozenset[str] = ANY_ORDER) -> Callable[[Callable[..., object]], Callable[[], Compiled]]:
    """Decorator: `function()` returns the compiled function, which compiles at its first call.

    allowed: LLVM's flags for the arithmetic of floats.
    """

    def decorated(function: Callable[..., object]) -> Callable[[], Compiled]:
        @cache
        @wraps(function)
        def compiled() -> Compiled:
            import numba  # here, as language models never need it

            from rl_platform.accel.stored_code import StoredCode

            loop = numba.njit(nogil=True, error_model="numpy", fastmath=set(allowed))(function)
            loop._cache = StoredCode(function)
            return loop  # type: ignore[no-any-return]

        return compiled

    return decorated
