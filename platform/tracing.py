"""A timeline of the first steps: spans of work and of waiting, written as `trace.json`.

The file is in the trace event format that chrome://tracing and ui.perfetto.dev open: a group of lanes per host, a lane
per component rank, and one for the runner with the phases of each step. Calls of components, waits on channels and the
work of an embodied run (physics, inference, optimizer steps) are recorded in their own process. While recording is off
it costs nothing.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rl_platform.reporter import Reporter, RunInfo

log = logging.getLogger(__name__)

_EPOCH = time.time() - time.monotonic()  # the processes of one node share a clock


@dataclass(frozen=True)
class TraceSpan:
    """`began`: seconds since 1970; `seconds`: its length. `kind`: call, wait, work, phase or step."""

    host: str
    lane: str
    kind: str
    name: str
    began: float
    seconds: float


class Recorder:
    """The spans of this process. Threads may add spans; `settle` sets the host and lane of the calling thread."""

    def __init__(self) -> None:
        self.on = False
        # plain tuples: quick to create, and the garbage collector does not track them
        self._spans: list[tuple[str, str, str, str, float, float]] = []
        self._here = threading.local()

    def settle(self, host: str, lane: str) -> None:
        self._here.host, self._here.lane = host, lane

    def add(self, kind: str, name: str, began: float, lane: str = "") -> None:
        """Adds a span from `began` on the monotonic clock until now, in the calling thread's lane or another one."""
        if not self.on:
            return
        host, own = getattr(self._here, "host", "run"), getattr(self._here, "lane", "runner")
        self._spans.append((host, lane or own, kind, name, _EPOCH + began, time.monotonic() - began))

    def drain(self) -> list[TraceSpan]:
        """Returns the spans since the last call."""
        spans, self._spans = self._spans, []
        return [TraceSpan(*span) for span in spans]


recorder = Recorder()
"""Of this process."""


class Timeline(Reporter):
    """The sink of a run's reporter that writes `trace.json` when `steps` steps are done, or at the end of the run.

    `sources` return spans; a runtime with other processes adds one for them.
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
