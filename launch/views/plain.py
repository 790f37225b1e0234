"""The view without a terminal: one aligned line per step, and a line at least every 30 s in between.

`terminal_view` selects the live view on terminals that can redraw.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console

from rl_platform.launch.views.console import run_console
from rl_platform.launch.views.headline import History, duration, number
from rl_platform.launch.views.open_phases import OpenPhases
from rl_platform.launch.views.panels import print_lines, print_start
from rl_platform.reporter import Reporter, RunInfo

QUIET_SECONDS = 25.0
"""Longest time without a line: less than 30 s even on a busy machine."""


def terminal_view(console: Console | None = None) -> Reporter:
    """Returns the live view on a terminal, else plain lines."""
    console = console or run_console()
    if not console.is_terminal or console.is_dumb_terminal:
        return PlainView(console)
    from rl_platform.launch.views.live_view import LiveView

    return LiveView(console)


class PlainView(Reporter):
    """A reporter that prints lines. After `QUIET_SECONDS` without a line a thread prints the progress."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = console
        self._clock = clock
        self._info: RunInfo | None = None
        self._phases = OpenPhases(clock)
        self._said = clock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, info: RunInfo) -> None:
        self._info, self._history = info, History.of(info)
        print_start(self.console, info)
        self._said = self._clock()
        self._watch()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._watch()
        with self._phases.phase(name):
            yield

    def progress(self, done: int, total: int, unit: str, **numbers: float) -> None:
        self._phases.progress(done, total, unit, **numbers)

    def beat(self) -> None:
        """Prints a line for every thread's phase if nothing was printed for `QUIET_SECONDS`."""
        quiet = self._clock() - self._said
        if quiet >= QUIET_SECONDS:
            for line in self._phases.lines() or [f"working: {quiet:.0f} s since the last line"]:
                self._print(f"  {line}")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        history = self._history
        history.add(step, metrics)
        digits = len(str(history.max_steps))
        cells = [f"step {step:>{digits}}/{history.max_steps}"]
        for label, metric in history.numbers.items():
            value = "" if metric not in metrics else number(metrics[metric])
            cells.append(f"{label} {value or '·':>7}")
        cells.append(f"{duration(metrics.get('time/step', float('nan'))):>7}")
        cells.append(f"eta {duration(history.eta)}")
        self._print("  ".join(cells))

    def note(self, text: str) -> None:
        self._print(text)

    def close(self) -> None:
        if self._thread is not None:
            self._closed.set()
            self._thread.join()
        if self._info is not None and self._history.count:
            print_lines(self.console, "summary", self._history.summary(self._info))

    def _watch(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep_beating, name="plain view", daemon=True)
            self._thread.start()

    def _keep_beating(self) -> None:
        while not self._closed.wait(max(QUIET_SECONDS - (self._clock() - self._said), 0.01)):
            try:
                self.beat()
            except (OSError, ValueError):  # the reader of the output has gone: the training continues
                return

    def _print(self, text: str) -> None:
        self._said = self._clock()
        self.console.file.write(text + "\n")  # directly: rich takes 0.2 ms for its layout
        self.console.file.flush()
