"""Reports ranks that take much longer than the others of their component.

Not covered: ranks that wait for one another in collectives, as those of a learner in `update`: all of them take as long
as the slowest one.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping

from rl_platform.runtime.worker_group import WorkerGroup

FACTOR = 2.0  # times the median of the other ranks
LEAST_S = 0.5  # in a step: less is noise
STEPS = 3  # in a row

Key = tuple[str, str]  # label of a rank, method
Timing = tuple[int, float]  # calls, their seconds


class Stragglers:
    """Compares the ranks of each group after each step; notes each slow rank and method once."""

    def __init__(self, groups: Mapping[str, WorkerGroup], note: Callable[[str], None]) -> None:
        self._groups = [group for group in groups.values() if group.world_size > 1]
        self._note = note
        self._before = self._timings()
        self._steps: Counter[Key] = Counter()
        self._noted: set[Key] = set()

    def look(self) -> None:
        """Compares the ranks. Must be called after each step."""
        before, self._before = self._before, self._timings()
        for group in self._groups:
            labels = [worker.label for worker in group.workers]
            for method in sorted({method for label, method in self._before if label in labels}):
                calls, seconds = set[int](), dict[str, float]()
                for label in labels:
                    (count, total), (earlier, until_then) = (
                        timings.get((label, method), (0, 0.0)) for timings in (self._before, before)
                    )
                    calls.add(count - earlier)
                    seconds[label] = total - until_then
                if len(calls) == 1 and calls != {0}:  # else some ranks had other work
                    self._compare(method, seconds)

    def _compare(self, method: str, seconds: Mapping[str, float]) -> None:
        for label, own in seconds.items():
            key, median = (label, method), statistics.median(seconds[other] for other in seconds if other != label)
            slow = own > FACTOR * median and own - median > LEAST_S
            self._steps[key] = self._steps[key] + 1 if slow else 0
            if self._steps[key] == STEPS and key not in self._noted:
                self._noted.add(key)
                times = f"{own / max(median, 1e-3):.1f} times"
                self._note(
                    f"{label} is a straggler: {method} took {times} the median of the other ranks in each of {STEPS} "
                    f"steps ({own:.1f} s, median {median:.1f} s)"
                )

    def _timings(self) -> dict[Key, Timing]:
        return {
            (worker.label, method): timing
            for group in self._groups
            for worker in group.workers
            for method, timing in worker.timings().items()
        }
