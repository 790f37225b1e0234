"""The open phases of a run with their progress, which views show during a step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from rl_platform.launch.views.headline import duration, number


@dataclass(eq=False)  # compared by identity: two ranks may run the same phase
class OpenPhase:
    """A phase that has not ended. began: time of the clock. total: 0 if not known."""

    name: str
    began: float
    thread: int
    done: int = 0
    total: int = 0
    unit: str = ""
    numbers: Mapping[str, float] | None = None


class OpenPhases:
    """The open phases of all threads. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: list[OpenPhase] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        phase = OpenPhase(name, self._clock(), threading.get_ident())
        self._open.append(phase)
        try:
            yield
        finally:
            self._open.remove(phase)

    def progress(self, done: int, total: int, unit: str, **numbers: float) -> None:
        """Sets the progress of the calling thread's innermost phase."""
        own = [phase for phase in list(self._open) if phase.thread == threading.get_ident()]
        for phase in own[-1:]:
            phase.done, phase.total, phase.unit, phase.numbers = done, total, unit, numbers

    def by_thread(self) -> list[list[OpenPhase]]:
        """Returns the nested phases of each thread, outermost first."""
        threads: dict[int, list[OpenPhase]] = {}
        for phase in list(self._open):
            threads.setdefault(phase.thread, []).append(phase)
        return list(threads.values())

    def lines(self) -> list[str]:
        """Returns a line per thread, such as `validate: 3 of 10 episodes, 31 s`."""
        return [self._line(phases) for phases in self.by_thread()]

    def _line(self, phases: list[OpenPhase]) -> str:
        phase = phases[-1]
        count = f"{phase.done}{f' of {phase.total}' if phase.total else ''} {phase.unit}, " if phase.unit else ""
        extra = "".join(f", {number(value)} {name}" for name, value in (phase.numbers or {}).items())
        return f"{nested_name(phases)}: {count}{_seconds(self._clock() - phase.began)}{extra}"


def nested_name(phases: list[OpenPhase]) -> str:
    """Returns the name of the outermost phase, followed by that of the innermost."""
    return phases[0].name if len(phases) == 1 else f"{phases[0].name} › {phases[-1].name}"


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value < 60 else duration(value)
