"""Channels: named, bounded streams between components, within one process.

A channel hands over references and copies nothing. Every item that was put is got exactly once, or the error the
channel was closed with is raised. Every wait has a deadline. The message of a missed one names the waiting
thread, the time it began, and the state of the other side. Not covered: channels between processes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

from rl_platform.errors import ChannelClosed, Deadline, PlatformError
from rl_platform.runtime.waits import caller, clock_before, waits_on
from rl_platform.tracing import recorder

T = TypeVar("T")


class _Stream(Generic[T]):
    """The items of one key in order of arrival, the condition to wait for them, and the number of waiting consumers."""

    __slots__ = ("items", "ready", "users")

    def __init__(self, lock: threading.Lock) -> None:
        self.items: deque[T] = deque()
        self.ready = threading.Condition(lock)
        self.users = 0


class Channel(Generic[T]):
    """A bounded stream with several producers and consumers; all methods may be called from any thread.

    A key is an address: an item put with a key is returned only by a get with that key, an item without a key by a get
    without one. Items of one key stay in order. `capacity` counts the items of all keys together. A `timeout` is in
    seconds, None is the channel's `deadline_s`; it limits the wait for the next bit of progress and raises Deadline.
    `status` returns the state of a registered producer or consumer as text; it is called with the channel locked.
    """

    def __init__(
        self,
        name: str,
        capacity: int,
        deadline_s: float,
        producers: Sequence[str] = (),
        consumers: Sequence[str] = (),
        status: Callable[[str], str] | None = None,
    ) -> None:
        if capacity < 1:
            raise ValueError(f"channel '{name}': capacity {capacity} must be at least 1")
        self.name = name
        self.capacity = capacity
        self.producers = tuple(producers)
        self.consumers = tuple(consumers)
        self._deadline_s = deadline_s
        self._status = status
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._producers_waiting = 0
        self._streams: dict[Hashable, _Stream[T]] = {None: _Stream(self._lock)}
        self._closed = False
        self._error: BaseException | None = None
        self._puts = self._gets = self._depth = 0

    def put(self, item: T, key: Hashable = None) -> None:
        """Adds one item, waiting for room. Raises ChannelClosed, caused by the error the channel was closed with."""
        self.put_many((item,), key)

    def put_many(self, items: Iterable[T], key: Hashable = None, timeout: float | None = None) -> None:
        """Adds items in order, waiting for room. Messages of errors have the number of items that were added."""
        items = list(items)
        done, total = 0, len(items)
        with self._lock:
            while done < total:
                if self._closed or self._depth >= self.capacity:
                    self._wait_for_room(f"{done} of {total} items put" if total > 1 else "", timeout)
                stop = min(total, done + self.capacity - self._depth)
                stream = self._streams.get(key) or self._open(key)
                self._add(stream, items[done:stop] if stop - done < total else items)
                done = stop

    def get(self, key: Hashable = None, timeout: float | None = None) -> T:
        """Returns the next item. Raises the error of `close`, or ChannelClosed, if the channel is closed and empty."""
        return self.get_many(1, key, timeout)[0]

    def get_many(
        self, max_items: int, key: Hashable = None, timeout: float | None = None, linger: float = 0.0
    ) -> list[T]:
        """Returns at most `max_items` items; waits for the first one, and up to `linger` seconds for the others.

        Raises the same errors as `get`.
        """
        if max_items < 1:
            raise ValueError(f"channel '{self.name}': max_items {max_items} must be at least 1")
        with self._lock:
            stream = self._streams.get(key) or self._open(key)
            try:
                while True:
                    if not stream.items and not self._wait_for_items(stream, key, timeout):
                        raise self._error or ChannelClosed(f"get on channel '{self.name}', which is closed and empty")
                    self._linger(stream, max_items, linger)
                    if stream.items:  # no other consumer took them meanwhile
                        return self._take(stream, max_items)
            finally:
                self._forget(key, stream)

    def close(self, error: BaseException | None = None) -> None:
        """Ends puts. Consumers get the remaining items, then `error`. A second call changes no earlier error."""
        with self._lock:
            self._closed = True
            self._error = self._error or error
            self._room.notify_all()
            for stream in self._streams.values():
                stream.ready.notify_all()
        self.check_integrity()

    @property
    def closed(self) -> bool:
        """Whether the channel takes no more items."""
        return self._closed

    @property
    def depth(self) -> int:
        """The number of items that were put and not got."""
        return self._depth

    def check_integrity(self) -> None:
        """Raises PlatformError unless every put was got once or is still there."""
        with self._lock:
            held = sum(len(stream.items) for stream in self._streams.values())
            if self._puts != self._gets + held or held != self._depth:
                raise PlatformError(
                    f"channel '{self.name}' lost or repeated items: {self._puts} put, {self._gets} got, "
                    f"{held} held, depth {self._depth}"
                )

    # The methods below require the lock.

    def _add(self, stream: _Stream[T], items: Sequence[T]) -> None:
        stream.items.extend(items)
        self._depth += len(items)
        self._puts += len(items)
        if stream.users:
            stream.ready.notify(len(items))

    def _open(self, key: Hashable) -> _Stream[T]:
        stream = self._streams[key] = _Stream(self._lock)
        return stream

    def _forget(self, key: Hashable, stream: _Stream[T]) -> None:
        if key is not None and not stream.items and not stream.users:
            self._streams.pop(key, None)

    def _take(self, stream: _Stream[T], max_items: int) -> list[T]:
        items = stream.items
        if len(items) <= max_items:
            taken = list(items)
            items.clear()
        else:
            taken = [items.popleft() for _ in range(max_items)]
        self._depth -= len(taken)
        self._gets += len(taken)
        if self._producers_waiting:
            self._room.notify(len(taken))
        return taken

    def _linger(self, stream: _Stream[T], wanted: int, seconds: float) -> None:
        until = time.monotonic() + seconds
        stream.users += 1
        try:
            while len(stream.items) < wanted and self._depth < self.capacity and not self._closed:
                if (left := until - time.monotonic()) <= 0:
                    return
                stream.ready.wait(left)
        finally:
            stream.users -= 1

    def _wait_for_room(self, progress: str, timeout: float | None) -> None:
        self._producers_waiting += 1
        try:
            self._wait(
                self._room, lambda: self._depth >= self.capacity and not self._closed, "producer", progress, timeout
            )
        finally:
            self._producers_waiting -= 1
        if self._closed:
            detail = f" ({progress})" if progress else ""
            reason = f" because of {type(self._error).__name__}: {self._error}" if self._error else ""
            raise ChannelClosed(f"put on channel '{self.name}', which is closed{reason}{detail}") from self._error

    def _wait_for_items(self, stream: _Stream[T], key: Hashable, timeout: float | None) -> bool:
        """Returns False if the channel is closed and has no item of this key."""
        progress = "" if key is None else f"none with key {key!r}"
        stream.users += 1
        try:
            self._wait(stream.ready, lambda: not stream.items and not self._closed, "consumer", progress, timeout)
        finally:
            stream.users -= 1
        return bool(stream.items)

    def _wait(
        self, ready: threading.Condition, blocked: Callable[[], bool], role: str, progress: str, timeout: float | None
    ) -> None:
        limit = self._deadline_s if timeout is None else timeout
        start = time.monotonic()
        try:
            with waits_on(self.name):
                while blocked():
                    remaining = start + limit - time.monotonic()
                    if remaining <= 0:
                        raise Deadline(self._deadline_message(role, limit, progress))
                    ready.wait(remaining)
        except BaseException:
            ready.notify()  # this thread may have consumed a wake-up that another one needs
            raise
        finally:
            recorder.add("wait", f"{self.name}: {'full' if role == 'producer' else 'empty'}", start)

    def _deadline_message(self, role: str, limit: float, progress: str) -> str:
        other, names = ("consumers", self.consumers) if role == "producer" else ("producers", self.producers)
        states = [f"{name} {self._status(name)}" if self._status else name for name in names] or ["none registered"]
        action = "to put on" if role == "producer" else "on"
        depth = f"depth {self._depth}" + (f" of {self.capacity}" if role == "producer" else "")
        facts = ", ".join(part for part in (depth, progress, f"{other}: {', '.join(states)}") if part)
        return f"{caller()} waited {limit:g} s {action} channel '{self.name}' ({facts}), since {clock_before(limit)}"
