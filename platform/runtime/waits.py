"""Who runs, and what each thread of this process waits on: for the messages of missed deadlines."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

# Thread id -> (channel, start on the monotonic clock).
_WAITING: dict[int, tuple[str, float]] = {}


def caller() -> str:
    """Who runs this code, for messages: `critic[2]` in a component's thread, `runner` in the main thread."""
    thread = threading.current_thread()
    return "runner" if thread is threading.main_thread() else thread.name


@contextmanager
def waits_on(channel: str) -> Iterator[None]:
    """This thread is known to wait on the channel; within another such block, on that block's."""
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
    """What a thread waits on now, as `channel 'rollouts' for 12 s`; empty if it does not wait on a channel."""
    entry = _WAITING.get(thread_id) if thread_id is not None else None
    return f"channel '{entry[0]}' for {time.monotonic() - entry[1]:.3g} s" if entry else ""


def clock_before(seconds: float) -> str:
    """The time of day `seconds` ago."""
    return time.strftime("%H:%M:%S", time.localtime(time.time() - seconds))
