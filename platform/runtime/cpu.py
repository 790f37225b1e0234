"""How a process whose threads compute with torch on CPUs gets along with the C library and with OpenMP.

Both matter on Linux with glibc and libgomp only; elsewhere the functions do nothing.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

MEMORY_THREADS = 8  # more are no faster: the memory is busy
_PAUSE_SOFT = 1  # omp_pause_soft of OpenMP 5.0: the next parallel region builds the team anew
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # options of mallopt(3)
_MOST_KEPT = 2**31 - 1


def keep_freed_memory() -> None:
    """Have the allocator reuse freed memory instead of returning it to the system. Call before threads start.

    glibc maps every large block anew, and the kernel clears each of its pages at the first touch: for a training step's
    activations that costs a fifth of the matrix products that fill them.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(_M_ARENA_MAX, 1)  # only the main arena can grow beyond 64 MiB
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT)


def compute_alone() -> None:
    """The calling thread computes without a team from now on; others are not concerned."""
    import torch

    # This sets the calling thread's number, and that of every thread that has not computed yet: the latter is undone.
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    restore = threading.Thread(target=torch.set_num_threads, args=(usual,))
    restore.start()
    restore.join()


def memory_threads() -> int:
    """How many threads are enough for work at the speed of memory."""
    return min(len(os.sched_getaffinity(0)), MEMORY_THREADS)


def in_threads(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """What it makes of each, in order; a few items at a time are taken and worked on, and the next ones then.

    For functions at the speed of memory that let other threads run, as numpy's copies do. They take cores that were
    given to other processes, as these wait for the outcome.
    """
    count, left, results = memory_threads(), iter(items), list[Result]()
    with ThreadPoolExecutor(count) as pool:
        while taken := list(islice(left, count)):
            results += map(function, taken) if len(taken) == 1 else pool.map(function, taken)
    return results


def release_team() -> None:
    """End the calling thread's OpenMP team, which is built anew when the thread needs it again.

    libgomp keeps a team for every thread that ever ran a parallel region. As soon as all teams together have more
    threads than the machine has cores, no team waits for its next region actively any more: each region then costs a
    sleep and a wake-up, a small matrix product takes half as long again, an addition ten times as long. Components are
    threads but compute in turns, so one team at a time is enough.
    """
    with suppress(OSError, AttributeError):
        libgomp().omp_pause_resource_all(_PAUSE_SOFT)


@cache
def libgomp() -> ctypes.CDLL:
    """By name, as torch brings its own. Raises OSError, which is not kept, while it is not loaded."""
    return ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
