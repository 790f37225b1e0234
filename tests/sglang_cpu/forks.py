"""Forks SGLang's processes from the engine's process, which has already imported their modules.

SGLang sets the start method `spawn`, with which each process imports for seven seconds of processor time.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from functools import partial

set_start_method = multiprocessing.set_start_method


def fork_processes() -> None:
    """Replaces the start method `spawn` by `fork` in an engine's process (`python -c PROGRAM SOCKET`)."""
    if sys.argv[0] == "-c":
        multiprocessing.set_start_method = _set_fork


def _set_fork(_: str, force: bool = False) -> None:
    """The engine's process calls it before it starts others."""
    set_start_method("fork", force)
    os.register_at_fork(after_in_child=partial(_close_socket, os.getpid()))


def _close_socket(engine: int) -> None:
    """Closes the engine's socket in a fork, so that its hang-up shows the end of the engine's process."""
    if os.getppid() == engine:
        os.close(int(sys.argv[1]))
