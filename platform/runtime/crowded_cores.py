"""Waiting asleep while other processes want the cores too.

The threads of an OpenMP team share each operation and wait for the slowest of them. libgomp has them wait actively, for
about ten milliseconds, which is fastest while every thread has a core. Beside another busy process they have not: who
waits actively then keeps the core from the very thread it waits for. A PPO step on two cores takes three times as long
beside one such process, and about twice if its threads wait asleep; on a quiet machine sleeping costs up to a fifth.

So a thread here looks once a second how long this process's threads waited for a core. Results do not depend on it: the
number of threads, by which operations are divided, stays.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from rl_platform.runtime.cpu import release_team, run_by_team

PERIOD_S = 1.0
CROWDED = 0.3  # seconds that threads waited for a core, all together, per second; up to 0.05 on a quiet machine
QUIET = 0.1
_TASKS = Path("/proc/self/task")


@cache
def wait_asleep_when_crowded() -> None:
    """Watch from now on, once per process; on systems that do not tell how long threads wait nothing happens."""
    if waited_ns():
        threading.Thread(target=_watch, name="crowded cores", daemon=True).start()


def waited_ns() -> dict[str, int]:
    """Nanoseconds for which each thread of this process could have run and had no core, by thread id. Empty where the
    kernel does not count them. Format: Linux, Documentation/scheduler/sched-stats.rst, /proc/<pid>/schedstat."""
    found: dict[str, int] = {}
    with suppress(OSError):
        for task in os.listdir(_TASKS):
            with suppress(OSError):  # a thread that has just ended
                found[task] = int((_TASKS / task / "schedstat").read_text(encoding="ascii").split()[1])
    return found


def _watch() -> None:
    asleep = False
    before, then = waited_ns(), time.monotonic()
    while True:
        time.sleep(PERIOD_S)
        waited, now = waited_ns(), time.monotonic()
        share = _grown(before, waited) / (now - then)
        before, then = waited, now
        if not asleep and share > CROWDED:
            asleep = _wait_asleep()
        elif asleep and share < QUIET:
            release_team()
            asleep = False


def _grown(before: Mapping[str, int], after: Mapping[str, int]) -> float:
    """Seconds by which the threads that are still there waited longer."""
    return sum(max(0, waited - before.get(task, 0)) for task, waited in after.items()) / 1e9


def _wait_asleep() -> bool:
    """Give the calling thread a team that has nothing to do. From now on there are more threads in teams than cores,
    and libgomp's wait about ten microseconds before they sleep. False if there is no libgomp yet."""
    idle = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p).value
    try:
        run_by_team(idle or 0, 0, len(os.sched_getaffinity(0)) + 1)
    except (OSError, AttributeError):
        return False
    return True
