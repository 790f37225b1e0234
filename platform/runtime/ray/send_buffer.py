"""Puts of several threads of a process into one channel of another process are sent together, one call at a time.

While one call is on its way, further puts are collected for the next call. That call waits a moment for the producers
of the last one: a producer in a loop is about to put again. The threads would otherwise form two alternating groups.

A put waits until its items are in the channel, or raises its own error. If the last reply reported enough free
capacity, a put returns earlier. A thread of the buffer then sends the items. Errors are raised by `flush` or by the
next put of the same producer. After a flush there is no difference to a waiting put.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from rl_platform.runtime.ray.payloads import Content
from rl_platform.runtime.ray.serialization import Packed, unpack_error

LINGER_S = 0.5e-3  # a tenth of the time of a call with large items
AHEAD = 16 * 2**20  # bytes in flight without a waiting producer
IDLE_S = 1.0


@dataclass(frozen=True)
class PutRequest:
    """Serialised items of one key."""

    contents: Sequence[Content]
    key: Hashable
    producer: str

    @property
    def size(self) -> int:
        """Bytes of the large items."""
        return sum(content.size for content in self.contents if isinstance(content, Packed))


class SendBuffer:
    """`send` delivers puts in order; it answers what went wrong with each, packed, and how many more items had room
    then. It raises if they may be lost."""

    def __init__(self, send: Callable[[Sequence[PutRequest]], tuple[Sequence[bytes | None], int]]) -> None:
        self._send = send
        lock = threading.Lock()
        self._changed, self._arrived = threading.Condition(lock), threading.Condition(lock)
        self._gathered: list[PutRequest] = []
        self._sending = False
        self._users = 1  # producers at the time of the last call
        self._room = 0
        self._items = self._bytes = 0  # gathered or in flight
        self._outcomes: dict[int, BaseException | None] = {}
        self._ahead: set[int] = set()  # puts without a waiting producer
        self._unsettled: Counter[str] = Counter()  # their number for each producer
        self._failures: dict[str, BaseException] = {}
        self._sender: threading.Thread | None = None

    def put(self, put: PutRequest) -> None:
        """Raises the error of its items, or of earlier ones of this producer, that are not in the channel."""
        with self._changed:
            self._raise_failure(put.producer)
            size = put.size
            fits = self._items + len(put.contents) <= self._room // 2 and self._bytes + size <= AHEAD
            self._gathered.append(put)
            self._items, self._bytes = self._items + len(put.contents), self._bytes + size
            self._arrived.notify()
            if fits:
                self._leave(put)
                return
            while id(put) not in self._outcomes:
                if self._sending:
                    self._changed.wait()
                else:
                    self._deliver()
            error = self._outcomes.pop(id(put))
        if error is not None:
            raise error

    def flush(self, producer: str = "") -> None:
        """Returns when the items of this producer and of threads named after it have arrived. Raises their first error,
        and none of them again."""
        with self._changed:
            self._changed.wait_for(lambda: not any(name.startswith(producer) for name in self._unsettled))
            failures = [self._failures.pop(name) for name in list(self._failures) if name.startswith(producer)]
        if failures:
            raise failures[0]

    def assume_full(self) -> None:
        """Treats the channel as full, so that the next put waits."""
        with self._changed:
            self._room = 0

    # What follows runs with the lock held.

    def _raise_failure(self, producer: str) -> None:
        if producer in self._failures:
            raise self._failures.pop(producer)

    def _leave(self, put: PutRequest) -> None:
        self._ahead.add(id(put))
        self._unsettled[put.producer] += 1
        if self._sender is None:
            self._sender = threading.Thread(target=self._serve, name="send buffer", daemon=True)
            self._sender.start()
        elif not self._sending:
            self._changed.notify_all()

    def _serve(self) -> None:
        with self._changed:
            while self._changed.wait_for(lambda: self._ahead and not self._sending, IDLE_S):
                self._deliver()
            self._sender = None

    def _deliver(self) -> None:
        """Sends the gathered puts in one call. The lock is free during the call."""
        self._sending = True
        self._arrived.wait_for(lambda: self._count_users(self._gathered) >= self._users, LINGER_S)
        puts, self._gathered = self._gathered, []
        self._changed.release()
        room = 0
        try:
            packed, room = self._send(puts)
            errors = [None if data is None else unpack_error(data) for data in packed]
        except BaseException as failure:
            errors = [failure] * len(puts)
        self._changed.acquire()
        for put, error in zip(puts, errors, strict=True):
            self._items, self._bytes = self._items - len(put.contents), self._bytes - put.size
            if id(put) in self._ahead:
                self._settle(put, error)
            else:
                self._outcomes[id(put)] = error
        self._sending, self._room = False, room
        self._users = self._count_users([*puts, *self._gathered])
        self._changed.notify_all()

    def _settle(self, put: PutRequest, error: BaseException | None) -> None:
        self._ahead.discard(id(put))
        self._unsettled[put.producer] -= 1
        if not self._unsettled[put.producer]:
            del self._unsettled[put.producer]
        if error is not None:
            self._failures.setdefault(put.producer, error)

    def _count_users(self, puts: Sequence[PutRequest]) -> int:
        return len({put.producer for put in puts})
