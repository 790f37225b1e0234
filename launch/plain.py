"""The view without a terminal: one aligned line per step, a line now and then inside long phases. Fit for log files."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console

from rl_platform.launch.headline import History, duration, number
from rl_platform.launch.panels import print_lines, print_start
from rl_platform.metrics import RunInfo, Sample

QUIET_SECONDS = 30.0
"""A phase that takes longer says how far it is, this often."""


class PlainView:
    """A reporter that prints lines."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._info: RunInfo | None = None
        self._lock = threading.Lock()
        self._current = threading.local()  # phases of several threads run side by side
        self._said = time.monotonic()

    def start(self, info: RunInfo) -> None:
        self._info, self._history = info, History.of(info)
        print_start(self.console, info)
        self._said = time.monotonic()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before = getattr(self._current, "phase", "")
        self._current.phase = name
        try:
            yield
        finally:
            self._current.phase = before

    def progress(self, done: int, total: int, unit: str, **numbers: float) -> None:
        with self._lock:
            if time.monotonic() - self._said < QUIET_SECONDS:
                return
            self._said = time.monotonic()
        extra = "".join(f"  {number(value)} {name}" for name, value in numbers.items())
        self._print(f"  {getattr(self._current, 'phase', '')}  {done}{f'/{total}' if total else ''} {unit}{extra}")

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
        self._said = time.monotonic()

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Not printed: they are in samples.jsonl."""

    def sync(self) -> None:
        pass

    def note(self, text: str) -> None:
        self._print(text)

    def close(self) -> None:
        if self._info is not None and self._history.rows:
            print_lines(self.console, "summary", self._history.summary(self._info))

    def _print(self, text: str) -> None:
        self.console.file.write(text + "\n")  # as it is: rich would lay it out for a fifth of a millisecond
        self.console.file.flush()
