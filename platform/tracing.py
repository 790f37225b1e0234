"""Spans of work and of waiting in the first steps, which `runners/watching/trace_file.py` writes as `trace.json`.

Calls of components, waits on channels and the work of an embodied run (physics, inference, optimizer steps) are
recorded in their own process. While recording is off it costs nothing.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

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
