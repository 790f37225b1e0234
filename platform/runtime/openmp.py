"""One OpenMP team per process: threads that wait give theirs up.

libgomp, which torch computes with on Linux, keeps a team of threads for every thread that ever ran a parallel region.
As soon as all teams together have more threads than the machine has cores, no team waits for its next region actively
any more: each region then costs a sleep and a wake-up. Components are threads, so a small matrix product would take
half as long again, an addition ten times as long. They compute in turns, though, so one team at a time is enough.
"""

from __future__ import annotations

import ctypes
import os

_PAUSE_SOFT = 1  # omp_pause_soft of OpenMP 5.0: the next parallel region builds the team anew


def release_team() -> None:
    """End the calling thread's OpenMP team. Does nothing where libgomp is not in use."""
    try:  # by name, and only if it is loaded: torch brings its own
        libgomp = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        libgomp.omp_pause_resource_all(_PAUSE_SOFT)
    except (OSError, AttributeError):
        return
