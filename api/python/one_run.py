"""A run within a process of the user: one at a time, and the settings of the process are restored after it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rl_platform.errors import RunInProgress
from rl_platform.interrupts import interruptible

_VARIABLES = ("RL_PLATFORM_", "PYTHONBREAKPOINT")  # the run's own, and Ray's, which redirects breakpoint()
_running = threading.Lock()


@contextmanager
def one_run() -> Iterator[None]:
    """Within the block Ctrl-C lets a run save; after it, signal handlers, search path and environment are as before.

    The run itself restores other settings, such as torch's number of threads. Raises RunInProgress within a block of
    this process.
    """
    if not _running.acquire(blocking=False):
        raise RunInProgress(
            "this process already trains, checks or evaluates. Wait for its end, or start another process"
        )
    path, variables = list(sys.path), set(os.environ)
    try:
        with interruptible():
            yield
    finally:
        sys.path[:] = [entry for entry in sys.path if entry in path]
        for name in [name for name in os.environ if name.startswith(_VARIABLES) and name not in variables]:
            del os.environ[name]
        _running.release()
