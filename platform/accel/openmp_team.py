"""Runs a compiled function in the OpenMP threads that torch computes with. Linux with libgomp only."""

from __future__ import annotations

import ctypes

from rl_platform.runtime.cpu import libgomp


def has_team() -> bool:
    """Returns whether `run_by_team` can be called."""
    try:
        return hasattr(libgomp(), "GOMP_parallel")
    except OSError:
        return False


def run_by_team(function: int, argument: int, threads: int) -> None:
    """Calls the compiled function at an address once in each of `threads` OpenMP threads, the calling one included.

    With torch's number of threads these are the threads of torch's operations, so that no others compete for the
    cores. `argument` is the pointer that the function gets. Requires `has_team()`.
    """
    libgomp().GOMP_parallel(ctypes.c_void_p(function), ctypes.c_void_p(argument), threads, 0)
