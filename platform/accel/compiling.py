"""Compiles loops over arrays with numba, for functions that are called often with few numbers.

Machine code is stored in the folder of cached files, so another clone and another installation of the same version
compile nothing. numba's own cache is beside the source, and does not notice changes of the modules that a loop uses.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rl_platform.disk import cache_folder

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
    _use_cache_folder()
    try:
        return compiler(cache=True, **options)(function)
    except RuntimeError:  # no folder for the cache is writable
        return compiler(**options)(function)


@cache
def _use_cache_folder() -> None:
    """Makes numba store the loops of this package in `cache_folder`, unless NUMBA_CACHE_DIR names another one.

    numba's index of a loop has its type, the processor's name and features, and the versions of Python and numba.
    """
    from numba.core import caching

    class CacheFolder(caching.UserProvidedCacheLocator):  # type: ignore[misc]
        def __init__(self, function: Callable[..., object], file: str) -> None:
            self._py_file, self._lineno = file, function.__code__.co_firstlineno
            self.stamp = sources_of(function.__module__)
            self._cache_path = str(cache_folder() / "loops" / f"{Path(file).stem}-{self.stamp[:16]}")

        def get_source_stamp(self) -> str:
            return self.stamp

        @classmethod
        def from_function(cls, function: Callable[..., object], file: str) -> CacheFolder | None:
            own = function.__module__.startswith(f"{__package__}.")
            return super(caching.UserProvidedCacheLocator, cls).from_function(function, file) if own else None

    caching.CacheImpl._locator_classes.insert(1, CacheFolder)  # after the folder of NUMBA_CACHE_DIR


def sources_of(module: str) -> str:
    """Returns the digest of the sources of a module of this package and of those that it imports functions from."""
    modules, new = set[str](), {module}
    while new:
        modules |= new
        values = [value for name in new for value in vars(sys.modules[name]).values()]
        origins = {str(getattr(value, "__module__", None)) for value in values}
        new = {name for name in origins if name.startswith(f"{__package__}.")} - modules
    digest = hashlib.sha256()
    for name in sorted(modules):
        digest.update(Path(str(sys.modules[name].__file__)).read_bytes())
    return digest.hexdigest()
