"""Discrete events: processes that wait for seconds or for conditions, on a clock that jumps from event to event.

A process is a generator. It yields the seconds that it waits, or a condition without arguments. Waiting processes are
resumed in the order in which they began to wait, so equal inputs give equal events.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Generator, Iterable

Condition = Callable[[], bool]
Process = Generator["float | Condition", None, None]


class Clock:
    """Runs processes from the time `now`, in seconds."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._due: list[tuple[float, int, Process]] = []
        self._blocked: list[tuple[Condition, Process]] = []
        self._numbers = itertools.count()  # orders events of one time

    def start(self, process: Process) -> None:
        """Runs a process until it waits for the first time."""
        wanted = next(process, None)
        if isinstance(wanted, float | int):
            heapq.heappush(self._due, (self.now + wanted, next(self._numbers), process))
        elif wanted is not None:
            self._blocked.append((wanted, process))

    def run(self, until: float = math.inf) -> None:
        """Runs all events before `until`, and sets the clock to it if any are left."""
        self._resume()
        while self._due:
            if self._due[0][0] >= until:
                self.now = until
                return
            self.now, _, process = heapq.heappop(self._due)
            self.start(process)
            self._resume()
        assert not self._blocked, "every process waits for another one"

    def _resume(self) -> None:
        """Resumes blocked processes as long as the condition of one holds."""
        index = 0
        while index < len(self._blocked):
            holds, process = self._blocked[index]
            if holds():
                del self._blocked[index]
                self.start(process)
                index = 0
            else:
                index += 1

    def together(self, processes: Iterable[Process]) -> Process:
        """Runs processes side by side until the last one ends."""
        running = set[int]()

        def counted(number: int, process: Process) -> Process:
            yield from process
            running.discard(number)

        started = list(enumerate(processes))
        running.update(number for number, _ in started)
        for number, process in started:
            self.start(counted(number, process))
        yield lambda: not running
