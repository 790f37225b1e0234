"""Puts of several threads of a process that go to the same channel elsewhere travel together: one call at a time.

Each put still waits until its items are in the channel, or raises its own error. While one call is on its way, the puts
that come meanwhile gather for the next, which waits a moment for the threads that were served last: those that put in a
loop are about to come back, and would otherwise travel in two groups by turns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from rl_platform.runtime.wire import unpack_error

LINGER_S = 0.5e-3  # a tenth of what a call with large items takes


@dataclass(frozen=True)
class Put:
    """Items as they travel, all of one weight and key; `who` waits at most `timeout` seconds for room."""

    forms: Sequence[Any]
    weight: float
    key: Hashable
    timeout: float | None
    who: str


class Outbox:
    """`send`: delivers puts in order and says of each what went wrong, packed; raises if they may be lost."""

    def __init__(self, send: Callable[[Sequence[Put]], Sequence[bytes | None]]) -> None:
        self._send = send
        lock = threading.Lock()
        self._changed, self._arrived = threading.Condition(lock), threading.Condition(lock)
        self._gathered: list[Put] = []
        self._sending = False
        self._users = 1  # threads that put at the time of the last call
        self._outcomes: dict[int, BaseException | None] = {}

    def put(self, put: Put) -> None:
        """Returns when the items are in the channel. Raises what kept them out."""
        with self._changed:
            self._gathered.append(put)
            self._arrived.notify()
            while id(put) not in self._outcomes:
                if self._sending:
                    self._changed.wait()
                else:
                    self._deliver()
            error = self._outcomes.pop(id(put))
        if error is not None:
            raise error

    def _deliver(self) -> None:
        """With the lock held, which is free while the call is on its way."""
        self._sending = True
        self._arrived.wait_for(lambda: len(self._gathered) >= self._users, LINGER_S)
        puts, self._gathered = self._gathered, []
        self._changed.release()
        try:
            errors = [None if data is None else unpack_error(data) for data in self._send(puts)]
        except BaseException as error:
            errors = [error] * len(puts)
        self._changed.acquire()
        self._outcomes.update(zip(map(id, puts), errors, strict=True))
        self._sending, self._users = False, len(puts) + len(self._gathered)
        self._changed.notify_all()
