"""The timeline of the first steps, written as `trace.json`.

chrome://tracing and ui.perfetto.dev open the file, which is in the trace event format. It has a group of lanes per
host, a lane per component rank, and a lane for the runner with the phases of each step. `rl_platform.tracing` records
the spans.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rl_platform.reporter import Reporter, RunInfo
from rl_platform.tracing import TraceSpan, recorder

log = logging.getLogger(__name__)


class Timeline(Reporter):
    """The sink of a run's reporter that writes `trace.json` when `steps` steps are done, or at the end of the run.

    `sources` return spans; those of other processes are one of them within `reading`.
    """

    def __init__(self, path: Path, steps: int) -> None:
        self.path, self.steps = path, steps
        self.sources: list[Callable[[], Sequence[TraceSpan]]] = [recorder.drain]
        self._began = time.monotonic()

    def start(self, info: RunInfo | None) -> None:
        recorder.drain()
        recorder.on = self.steps > 0
        self._began = time.monotonic()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            recorder.add("phase", name, began)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        recorder.add("step", f"step {step}" if step else "start", self._began, lane="steps")
        self._began = time.monotonic()
        if step > 0:  # step 0 is the validation before the first one
            self.steps -= 1
        if self.steps == 0:
            self.write()

    def close(self) -> None:
        self.write()

    @contextmanager
    def reading(self, spans: Callable[[], Sequence[TraceSpan]]) -> Iterator[None]:
        """Adds a source within the block. Writes the file at its end, while the processes of `spans` still run."""
        self.sources.append(spans)
        try:
            yield
        finally:
            self.write()
            self.sources.remove(spans)  # else it would keep the models of these processes after a move

    def write(self) -> None:
        """Writes the file, if it was not written yet. A failure is logged and does not end the run."""
        if recorder.on:
            spans = [span for source in self.sources for span in source()]
            recorder.on = False
            part = self.path.with_suffix(".tmp")
            try:
                part.write_text(json.dumps(trace_events(spans)), encoding="utf-8")
                os.replace(part, self.path)
            except OSError as error:
                log.warning("%s was not written: %s. The run continues", self.path, error.strerror)
                with suppress(OSError):
                    part.unlink()


def trace_events(spans: Iterable[TraceSpan]) -> dict[str, object]:
    """Returns the content of `trace.json`: times in microseconds since the first span, hosts as processes, lanes as
    threads."""
    ordered = sorted(spans, key=lambda span: span.began)
    first = ordered[0].began if ordered else 0.0
    hosts: dict[str, int] = {}
    lanes: dict[tuple[str, str], int] = {}
    events: list[dict[str, object]] = []
    for span in ordered:
        if span.host not in hosts:
            hosts[span.host] = len(hosts) + 1
            events.append(_name("process_name", hosts[span.host], 0, span.host))
        lane = span.host, span.lane
        if lane not in lanes:
            lanes[lane] = len(lanes) + 1
            events.append(_name("thread_name", hosts[span.host], lanes[lane], span.lane))
        place = {"pid": hosts[span.host], "tid": lanes[lane], "ts": round((span.began - first) * 1e6, 1)}
        events.append({"ph": "X", "name": span.name, "cat": span.kind, **place, "dur": round(span.seconds * 1e6, 1)})
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _name(what: str, host: int, lane: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": what, "pid": host, "tid": lane, "args": {"name": name}}
