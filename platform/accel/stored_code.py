"""Machine code of compiled loops on disk, so that another process compiles nothing.

numba's own cache has three faults. It does not notice changes of the modules that a loop uses. It raises at a damaged
file or a full disk. It mixes up the files of two processes that store different code of one loop. Here every compiled
loop has a file of its own, in a folder that is named after the sources.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numba
from numba.core.caching import FunctionCache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from rl_platform.disk import cache_folder

if TYPE_CHECKING:
    from numba.core.codegen import Codegen
    from numba.core.cpu import CPUContext

PACKAGE = Path(__file__).parents[1]
SOURCES = ("accel", "algorithms")
"""Folders of the package that loops take functions and numbers from."""
_DIGEST = hashlib.sha256().digest_size


class StoredCode(FunctionCache):  # type: ignore[misc]
    """The cache of one loop. A loop without a file, or with a damaged one, is compiled; a full disk raises no error.

    A file's name is a digest of numba's key: the loop's code and closure, its types, the processor's name and features.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        self._py_func = function  # numba's constructor requires a folder beside the source or one of the user

    @property
    def cache_path(self) -> str:
        return str(_folder())

    def load_overload(self, sig: object, target_context: CPUContext) -> object:
        target_context.refresh()
        try:
            content = self._file(sig, target_context.codegen()).read_bytes()
        except (OSError, RuntimeError):  # RuntimeError: no home folder
            return None
        digest, code = content[:_DIGEST], content[_DIGEST:]
        if hashlib.sha256(code).digest() != digest:
            return None
        return CompileResult._rebuild(target_context, *pickle.loads(code))

    def save_overload(self, sig: object, data: CompileResult) -> None:
        if data.library.has_dynamic_globals:  # addresses of this process
            return
        code = dumps(data._reduce())
        with suppress(OSError, RuntimeError):
            file = self._file(sig, data.codegen)
            file.parent.mkdir(parents=True, exist_ok=True)
            stage = file.with_name(f".{file.name}-{os.getpid()}-{threading.get_ident()}")
            try:
                stage.write_bytes(hashlib.sha256(code).digest() + code)
                os.replace(stage, file)
            finally:
                stage.unlink(missing_ok=True)

    def _file(self, sig: object, codegen: Codegen) -> Path:
        function = self._py_func
        place = function.__module__, function.__qualname__, function.__code__.co_firstlineno
        key = hashlib.sha256(repr((place, self._index_key(sig, codegen))).encode()).hexdigest()
        return _folder() / f"{function.__name__}-{key[:32]}"


def _folder() -> Path:
    return cache_folder() / "loops" / sources_digest()[:16]


@cache
def sources_digest() -> str:
    """Returns the digest of all sources whose code loops may contain, and of the versions of numba and Python."""
    digest = hashlib.sha256(f"{numba.__version__} {sys.version}".encode())
    for file in sorted(file for folder in SOURCES for file in (PACKAGE / folder).glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
