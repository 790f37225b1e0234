"""Switches OpenMP threads to passive waiting while the machine has too few cores.

The threads of OpenMP divide each operation and wait for each other at its end. By default libgomp's threads
wait actively for about ten milliseconds. That is fastest while every thread has a core. Beside another busy process a
waiting thread occupies the core that the slowest thread needs: a PPO step on two cores takes three times as long. With
passive waiting it takes less than twice as long, but passive waiting costs a quiet machine up to a fifth.

A background thread therefore measures once a second how long the threads of this process waited for a core. The number
of OpenMP threads stays the same, so results do not change.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from rl_platform.accel.openmp_team import has_team, run_by_team
from rl_platform.runtime.cpu import release_team

PERIOD_S = 1.0
CROWDED = 0.3  # seconds that threads waited for a core, all together, per second; up to 0.05 on a quiet machine
QUIET = 0.1
_TASKS = Path("/proc/self/task")


def wait_passively_when_crowded() -> Callable[[], None]:
    """Starts the background thread and returns a function that ends it.

    Does nothing where the kernel does not count waiting times.
    """
    over = threading.Event()
    if waited_ns():
        threading.Thread(target=_watch, args=(over,), name="crowded cores", daemon=True).start()
    return over.set


def waited_ns() -> dict[str, int]:
    """Returns the nanoseconds that each thread of this process was runnable without a core, by thread id.

    Empty where the kernel does not count them. Format: /proc/<pid>/schedstat in Linux's
    Documentation/scheduler/sched-stats.rst.
    """
    waited: dict[str, int] = {}
    with suppress(OSError):
        for task in os.listdir(_TASKS):
            with suppress(OSError):  # a thread that has just ended
                waited[task] = int((_TASKS / task / "schedstat").read_text(encoding="ascii").split()[1])
    return waited


def _watch(over: threading.Event) -> None:
    passive = False
    before, then = waited_ns(), time.monotonic()
    while not over.wait(PERIOD_S):  # the thread's idle pool ends with it
        waited, now = waited_ns(), time.monotonic()
        share = _grown(before, waited) / (now - then)
        before, then = waited, now
        if not passive and share > CROWDED:
            passive = _wait_passively()
        elif passive and share < QUIET:
            release_team()
            passive = False


def _grown(before: Mapping[str, int], after: Mapping[str, int]) -> float:
    """Returns the seconds that the threads in `after` waited since `before`."""
    return sum(max(0, waited - before.get(task, 0)) for task, waited in after.items()) / 1e9


def _wait_passively() -> bool:
    """Starts an idle OpenMP thread pool in the calling thread; returns False if libgomp is not loaded.

    libgomp then counts more threads than cores, and reduces active waiting to about ten microseconds.
    """
    if not has_team():
        return False
    idle = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p).value
    run_by_team(idle or 0, 0, len(os.sched_getaffinity(0)) + 1)
    return True
