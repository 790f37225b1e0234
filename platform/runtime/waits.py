"""Names of threads and the channels that they wait on, for the messages of missed deadlines."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

# Thread id -> (channel, start on the monotonic clock).
_WAITING: dict[int, tuple[str, float]] = {}


def caller() -> str:
    """Returns the name of the calling thread for messages: `critic[2]` of a component, `runner` of the main thread."""
    thread = threading.current_thread()
    return "runner" if thread is threading.main_thread() else thread.name


@contextmanager
def waits_on(channel: str) -> Iterator[None]:
    """Registers that this thread waits on the channel; a nested block has no effect."""
    thread_id = threading.get_ident()
    if thread_id in _WAITING:
        yield
        return
    _WAITING[thread_id] = (channel, time.monotonic())
    try:
        yield
    finally:
        del _WAITING[thread_id]


def waiting_on(thread_id: int | None) -> str:
    """Returns the channel that a thread waits on, as `channel 'rollouts' for 12 s`; empty if there is none."""
    entry = _WAITING.get(thread_id) if thread_id is not None else None
    return f"channel '{entry[0]}' for {time.monotonic() - entry[1]:.3g} s" if entry else ""


def stack_of(thread_id: int | None) -> str:
    """Returns the stack of a thread of this process, the innermost call last; empty for a thread that has ended."""
    frame = sys._current_frames().get(thread_id) if thread_id is not None else None
    return "".join(traceback.format_stack(frame)) if frame is not None else ""


def clock_before(seconds: float) -> str:
    """Returns the time of day `seconds` ago."""
    return time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
