"""The live terminal view of a run: step and phase with their progress, key numbers, sparklines, a sample.

It redraws at most four times a second from a thread of its own and only when something changed. Notes, warnings and
other output appear above it. Not covered: terminals that cannot redraw and log files (`plain`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise

from rich.console import Console, ConsoleOptions, RenderResult
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType
from rich.text import Text

from rl_platform.launch.views.headline import History, duration, number
from rl_platform.launch.views.open_phases import OpenPhase, OpenPhases, nested_name
from rl_platform.launch.views.panels import print_lines, print_start
from rl_platform.reporter import Reporter, RunInfo, Sample

REDRAW_SECONDS = 0.25
_LABEL = 12  # width of the first column
_CELL = 20  # least width of a key number: label and value
_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_.-=+*%#"


class LiveView(Reporter):
    """A reporter that draws. Calls store the news; a thread draws."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._info: RunInfo | None = None
        self._phases = OpenPhases()
        self._sample: Sample | None = None
        self._drawn: list[int] = []  # cells of each line on the screen
        self._settled: tuple[tuple[int, int] | None, list[Text]] = (None, [])
        self._changed = threading.Event()
        self._stop = threading.Event()

    def prepare(self, info: RunInfo, history: History) -> None:
        """Stores the run and its history without drawing."""
        self._info, self._history = info, history

    def start(self, info: RunInfo) -> None:
        self.prepare(info, History.of(info))
        print_start(self.console, info)
        self._live = Live(self, console=self.console, auto_refresh=False, vertical_overflow="crop")
        self._live.start()
        self._thread = threading.Thread(target=self._redraw, name="terminal view", daemon=True)
        self._thread.start()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with self._phases.phase(name):
            self._changed.set()
            yield
        self._changed.set()

    def progress(self, done: int, total: int, unit: str, **numbers: float) -> None:
        self._phases.progress(done, total, unit, **numbers)
        self._changed.set()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._history.add(step, metrics)
        self._changed.set()

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        if samples:
            self._sample = samples[-1]
            self._changed.set()

    def note(self, text: str) -> None:
        self._erase_wrapped()
        self.console.print(Text.assemble(("• ", "yellow"), text))

    def close(self) -> None:
        if self._info is None or self._stop.is_set():
            return
        self._stop.set()
        self._thread.join()
        self._erase_wrapped()
        self._live.update(self, refresh=True)
        self._live.stop()
        if self._history.count:
            print_lines(self.console, "summary", self._history.summary(self._info))

    def _redraw(self) -> None:
        second = 0
        while not self._stop.wait(REDRAW_SECONDS):
            if self._changed.is_set() or int(time.monotonic()) != second:  # the clock of a phase moves once a second
                second = int(time.monotonic())
                self._changed.clear()
                self._erase_wrapped()
                self._live.refresh()

    def _erase_wrapped(self) -> None:
        """Erases the rows that a narrowed terminal made by wrapping drawn lines; `Live` erases one row per line."""
        width = self.console.width
        extra = sum((cells - 1) // width for cells in self._drawn if cells)
        if extra:
            row = ((ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1))
            self.console.control(Control(*row * extra))
            self._drawn = []

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(options.max_width - 1, 1)
        layout = (self._history.count, width)
        if self._settled[0] != layout:  # between steps only the header moves
            self._settled = (layout, self._numbers(width) + self._curves(width, options.ascii_only))
        lines = self._header(width) + self._settled[1]
        if self._sample is not None and console.height > len(lines) + 4:
            lines += self._sample_lines()
        lines = lines[: max(console.height - 1, 1)]
        for line in lines:
            line.truncate(width, overflow="crop" if options.ascii_only else "ellipsis")
            line.no_wrap = True
        self._drawn = [line.cell_len for line in lines]
        yield from lines

    def _header(self, width: int) -> list[Text]:
        assert self._info is not None
        history = self._history
        source = f"  {self._info.config_path}" if self._info.config_path else ""
        title = Text.assemble((self._info.experiment, "bold"), (f"{source}  → {self._info.output_dir}", "dim"))
        pace = f"{duration(history.seconds_per_step)}/step  ETA {duration(history.eta)}"
        steps = f"{history.step}/{history.max_steps}  {pace}"
        lines = [title, _progress("step", history.step, history.max_steps, steps, width, "green")]
        open_phases = self._phases.by_thread()
        lines += [_phase_line(phases, width) for phases in open_phases]
        return lines if open_phases else [*lines, Text()]

    def _numbers(self, width: int) -> list[Text]:
        history = self._history
        cells = [(label, number(history.current(metric))) for label, metric in history.numbers.items()]
        columns = max(min(width // _CELL, 4), 1)
        cell = max(width // columns, _CELL)
        lines = [Text()]
        for first in range(0, len(cells), columns):
            line = Text()
            for label, value in cells[first : first + columns]:
                line.append(f"{label:<{_LABEL}}", "dim").append(f"{value:<{cell - _LABEL}}", "bold")
            lines.append(line)
        if history.count:
            names = (name for name in history.last if name.startswith("time/") and "." not in name)
            times = {name[5:]: history.last[name] for name in names}
            times.pop("step", None)
            parts = [f"{name} {duration(value)}" for name, value in sorted(times.items(), key=lambda item: -item[1])]
            lines.append(Text.assemble((f"{'time':<{_LABEL}}", "dim"), "  ".join(parts)))
        return lines

    def _curves(self, width: int, ascii_only: bool) -> list[Text]:
        lines = [Text()]
        headline = self._history.headline
        rates = zip(headline.rates.values(), ("green", "yellow"), strict=False)
        for metric, style in ((headline.objective, "green"), (headline.validation, "yellow"), *rates):
            values = [value for _, value in self._history.series(metric)]
            if len(values) < 2:
                continue
            label = next(label for label, name in self._history.numbers.items() if name == metric)
            span = f"  {number(values[0])} → {number(values[-1])}"
            bars = sparkline(values, min(width - _LABEL - len(span), 60), ascii_only)
            lines.append(Text.assemble((f"{label:<{_LABEL}}", "dim"), (bars, style), span))
        return lines if len(lines) > 1 else []

    def _sample_lines(self) -> list[Text]:
        assert self._sample is not None
        label, reward = f"{'sample':<{_LABEL}}", f"  reward {number(self._sample.reward)}"
        return [
            Text(),
            Text.assemble((label, "dim"), (printable(self._sample.prompt), "dim")),
            Text.assemble(" " * _LABEL, printable(self._sample.response), (reward, "bold")),
        ]


def _phase_line(phases: list[OpenPhase], width: int) -> Text:
    """Returns the progress of the innermost of these nested phases."""
    phase = phases[-1]
    count = f"{phase.done}{f'/{phase.total}' if phase.total else ''} {phase.unit}  " if phase.unit else ""
    extra = "".join(f"  {number(value)} {name}" for name, value in (phase.numbers or {}).items())
    status = f"{count}{duration(time.monotonic() - phase.began)}{extra}"
    return _progress(nested_name(phases), phase.done, phase.total, status, width, "cyan")


def _progress(label: str, done: int, total: int, status: str, width: int, style: str) -> Text:
    """Returns `label ━━━━──── status`. The bar fills the rest of the line; without room or a total there is none."""
    text = Text(f"{label:<{_LABEL}}" if len(label) < _LABEL else f"{label} ", "bold")
    room = min(width - len(text) - len(status) - 2, 40)
    if total and room >= 5:
        filled = round(room * min(done / total, 1.0))
        text.append("━" * filled, style).append("─" * (room - filled) + "  ", "dim")
    return text.append(status, "default")


def sparkline(values: Sequence[float], width: int, ascii_only: bool = False) -> str:
    """Returns at most `width` characters, neighbouring values averaged, lowest to highest over the full height."""
    if not values or width < 1:
        return ""
    cells = min(width, len(values))
    edges = [len(values) * cell // cells for cell in range(cells + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    bars = _ASCII_BARS if ascii_only else _BARS
    scale = (len(bars) - 1) / (high - low) if high > low else 0.0
    return "".join(bars[round((mean - low) * scale)] for mean in means)


def printable(text: str) -> str:
    """Returns one line without control characters: generated text must not steer the terminal."""
    return "".join("⏎" if char == "\n" else char if char.isprintable() else "·" for char in text.strip())
