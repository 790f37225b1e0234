"""Waiting for what another thread or process brings about."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import psutil

from rl_platform.errors import ChannelClosed

T = TypeVar("T")
HANG_S = 60.0  # ends a test that would hang; on an idle machine everything that is waited for takes moments


def until(condition: Callable[[], T], seconds: float = HANG_S) -> T:
    """Returns what `condition` returns as soon as that is true; fails after `seconds`."""
    end = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < end, "the condition never came true"
        time.sleep(0.01)
    return result


def drained(channel: Any) -> list[Any]:
    """All items of a channel until it is closed. Raises the error it was closed with."""
    items = []
    while True:
        try:
            items.append(channel.get())
        except ChannelClosed as end:
            if "closed and empty" not in str(end):
                raise
            return items


def alive(pids: Iterable[int]) -> list[int]:
    """Those of processes that run; one that ended while it is looked at does not."""
    running = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            running += [pid] if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE else []
    return running


def command_line(process: psutil.Process) -> str:
    """Its words; "" if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def assert_gone(processes: Sequence[psutil.Process], seconds: float = HANG_S) -> None:
    """Waits for the end of all processes; fails if some are left after `seconds`."""
    _, left = psutil.wait_procs(processes, seconds)
    assert not left, f"processes left: {left}"
