"""Settings of the C library and of OpenMP for threads that compute with torch on CPUs.

The settings have an effect on Linux with glibc and libgomp only; on other systems these functions do nothing.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

_PAUSE_SOFT = 1  # omp_pause_soft of OpenMP 5.0: the next parallel region creates the thread pool again
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # options of mallopt(3)
_MOST_KEPT = 2**31 - 1


def keep_freed_memory() -> None:
    """Makes the allocator reuse freed memory instead of returning it to the system. Call before threads start.

    glibc maps every large block anew, and the kernel clears each of its pages at the first touch. For the activations
    of a training step, that takes a fifth of the time of the matrix products that fill them.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    mallopt(_M_ARENA_MAX, 1)  # only the main arena can grow beyond 64 MiB
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT)


@contextmanager
def one_thread() -> Iterator[None]:
    """Computes with one thread, because the rounding of sums depends on their number. Meant for small tensors."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def compute_alone() -> None:
    """Makes the calling thread compute without an OpenMP thread pool; other threads keep theirs."""
    import torch

    # This sets the calling thread's number, and that of every thread that has not computed yet: the latter is undone.
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    restore = threading.Thread(target=torch.set_num_threads, args=(usual,))
    restore.start()
    restore.join()


def release_team() -> None:
    """Ends the calling thread's OpenMP thread pool; OpenMP creates it again on demand.

    libgomp keeps a thread pool for every thread that ever ran a parallel region. If all pools together have more
    threads than the machine has cores, idle pools sleep instead of spinning, and each region costs a wake-up. A small
    matrix product then takes half as long again, an addition ten times as long. Components are threads but compute in
    turns, so one pool at a time is enough.
    """
    with suppress(OSError, AttributeError):
        libgomp().omp_pause_resource_all(_PAUSE_SOFT)


@cache
def libgomp() -> ctypes.CDLL:
    """Returns the libgomp that torch has loaded. Raises OSError, which is not cached, before torch has loaded it."""
    return ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
