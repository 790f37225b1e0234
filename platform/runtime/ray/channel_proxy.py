"""Channels between processes: the queue lives in one of them, its home; the others reach it by calls.

In its home a channel passes references as in one process. Items from and to other processes are serialised and sent in
batches; for large ones only references pass through the home. If the home dies the queue is lost, and all calls raise
WorkerDied. `RayTransport` carries the calls.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from rl_platform.errors import Deadline, PlatformError, WorkerDied, WorkerError
from rl_platform.runtime.channel import Channel
from rl_platform.runtime.lifecycle import close_channels
from rl_platform.runtime.ray.payloads import Content, Payload, batch_contents, store_large, to_payload, unpack_items
from rl_platform.runtime.ray.send_buffer import PutRequest, SendBuffer
from rl_platform.runtime.ray.serialization import References, pack_error, unpack_error
from rl_platform.runtime.waits import caller, waits_on

if TYPE_CHECKING:
    from rl_platform.runtime.ray.transport import RayTransport


@dataclass(frozen=True)
class ChannelAddress:
    """The name of a channel and its home, with all that the home needs to make it at the first use."""

    number: int
    name: str
    home: str
    capacity: int
    deadline_s: float
    producers: tuple[str, ...]
    consumers: tuple[str, ...]


class ChannelRegistry:
    """The channels of one process: its own queues, and proxies of the others. `here`: this host, or `runner`."""

    def __init__(
        self, here: str, transport: RayTransport, references: References, status: Callable[[str], str]
    ) -> None:
        self.here, self.transport, self.references = here, transport, references
        self._status = status
        self._lock = threading.Lock()
        self._homes: dict[str, ServedChannel] = {}
        self._failures: list[tuple[str | None, PlatformError | None, float]] = []
        self._send_buffers: WeakValueDictionary[int, SendBuffer] = WeakValueDictionary()

    def channel(self, address: ChannelAddress) -> Channel[object] | ChannelProxy:
        """Returns the queue itself if it lives here, otherwise a proxy."""
        return self.home(address) if address.home == self.here else ChannelProxy(address, self)

    def home(self, address: ChannelAddress) -> ServedChannel:
        with self._lock:
            channel = self._homes.get(address.name)
            # a name may be used again once its channel is closed
            if channel is None or channel.address.number < address.number:
                channel = self._homes[address.name] = ServedChannel(address, self, self._status)
                # the notice of a failure may arrive before the first use of a channel
                for label, error, before in self._failures:
                    if _concerns(label, before, channel):
                        channel.close(error)
            elif channel.address.number > address.number:
                raise WorkerDied(f"channel '{address.name}' was closed and is gone")
            return channel

    def fail(self, label: str | None, error: PlatformError | None, before: float = math.inf) -> list[PlatformError]:
        """Closes the channels here that name this producer or consumer (None: all); what was wrong with them.

        before: those of this number or a higher one were made after the failure, which they may have overtaken. A
        channel of a lower number that is used here for the first time later is closed then.
        """
        with self._lock:
            if before < math.inf:
                self._failures.append((label, error, before))
            homes = [home for home in self._homes.values() if _concerns(label, before, home)]
        return close_channels(homes, error)

    def serve(self, address: ChannelAddress, operation: str, arguments: tuple[object, ...], producer: str) -> object:
        """Runs a call of another process, in a thread that bears the caller's name while it waits."""
        thread = threading.current_thread()
        own, thread.name = thread.name, producer
        try:
            return getattr(self.home(address), f"serve_{operation}")(*arguments)
        finally:
            thread.name = own

    def serve_at_once(self, address: ChannelAddress, operation: str, arguments: tuple[Any, ...]) -> object | None:
        """As `serve`, if it needs no waiting and no work worth a thread; else nothing is done and None comes back."""
        home = self.home(address)
        if operation == "put":
            return home.put_at_once(*arguments)
        if operation == "close":
            home.serve_close(*arguments)
            return []
        return home.get_at_once(*arguments) if operation == "get_many" else None

    def send_buffer(self, channel: ChannelProxy) -> SendBuffer:
        """Returns the buffer in which all threads of this process collect what they put into a channel of another
        process."""
        with self._lock:
            send_buffer = self._send_buffers.get(channel.address.number)
            if send_buffer is None:
                send_buffer = self._send_buffers[channel.address.number] = SendBuffer(channel.send)
            return send_buffer

    def existing_send_buffer(self, address: ChannelAddress) -> SendBuffer | None:
        """Returns the buffer of a channel into which this process has put items, else None."""
        with self._lock:
            return self._send_buffers.get(address.number)

    def flush(self, producer: str) -> None:
        """Returns when all items of this producer are in their channels. Raises the first error of those that are not,
        and no error of them again."""
        with self._lock:
            send_buffers = list(self._send_buffers.values())
        failures: list[Exception] = []
        for send_buffer in send_buffers:
            try:
                send_buffer.flush(producer)
            except Exception as failure:
                failures.append(failure)
        if failures:
            raise failures[0]

    def unpacked(self, items: Sequence[object]) -> list[object]:
        return unpack_items(items, self.references, self.transport)


def _concerns(label: str | None, before: float, channel: ServedChannel) -> bool:
    named = label is None or label in (*channel.producers, *channel.consumers)
    return named and channel.address.number < before


class ServedChannel(Channel[object]):
    """The queue in its home. Items of other processes stay serialised until a get."""

    def __init__(self, address: ChannelAddress, registry: ChannelRegistry, status: Callable[[str], str]) -> None:
        super().__init__(
            address.name, address.capacity, address.deadline_s, address.producers, address.consumers, status
        )
        self.address, self._registry = address, registry

    def get_many(
        self, max_items: int, key: Hashable = None, timeout: float | None = None, linger: float = 0.0
    ) -> list[object]:
        return self._registry.unpacked(super().get_many(max_items, key, timeout, linger))

    # For other processes: serialised items in and out.

    def serve_put(self, puts: Sequence[PutRequest]) -> tuple[list[bytes | None], int]:
        """Returns what went wrong with each, and the room left. After one that waited in vain, none waits as long
        again."""
        errors: list[bytes | None] = []
        late = False
        for put in puts:
            threading.current_thread().name = put.producer
            try:
                self.put_many([Payload(content) for content in put.contents], put.key, 0.0 if late else None)
                errors.append(None)
            except PlatformError as error:
                late = late or isinstance(error, Deadline)
                errors.append(pack_error(error))
        return errors, 0 if self.closed else self.capacity - self._depth

    def put_at_once(self, puts: Sequence[PutRequest]) -> tuple[list[bytes | None], int] | None:
        with self._lock:
            fits = not self._closed and self._depth + sum(len(put.contents) for put in puts) <= self.capacity
            for put in puts if fits else ():
                stream = self._streams.get(put.key) or self._open(put.key)
                self._add(stream, [Payload(content) for content in put.contents])
            return ([None] * len(puts), self.capacity - self._depth) if fits else None

    def get_at_once(self, max_items: int, key: Hashable, _: float | None, linger: float) -> list[Content] | None:
        with self._lock:
            stream = self._streams.get(key)
            if stream is None or max_items < 1 or not stream.items or (linger and len(stream.items) < max_items):
                return None
            first = list(itertools.islice(stream.items, max_items))
            contents = [item.content for item in first if isinstance(item, Payload)]
            if len(contents) < len(first):
                return None
            self._take(stream, max_items)
            self._forget(key, stream)
        return store_large(contents, self._registry.transport)

    def serve_get_many(self, max_items: int, key: Hashable, timeout: float | None, linger: float) -> list[Content]:
        items = super().get_many(max_items, key, timeout, linger)
        try:
            return store_large(batch_contents(items, self._registry.references), self._registry.transport)
        except Exception as error:  # they have left the queue and are lost
            lost = WorkerError(f"channel '{self.name}': an item cannot travel to another process: {error}")
            self.close(lost)
            raise lost from error

    def serve_close(self, error: bytes | None) -> None:
        self.close(None if error is None else unpack_error(error))

    def serve_closed(self) -> bool:
        return self.closed


class ChannelProxy:
    """A channel that lives in another process; methods and meanings of `Channel`.

    A put to a channel with plenty of room returns before its items arrive; see `SendBuffer`. They arrive
    before this thread gets, before this process calls another method, and before the call of the rank ends.
    """

    def __init__(self, address: ChannelAddress, registry: ChannelRegistry) -> None:
        self.address, self._registry = address, registry
        self.name, self.capacity = address.name, address.capacity
        self.producers, self.consumers = address.producers, address.consumers
        self._closed = False
        self._send_buffer: SendBuffer | None = None

    def put(self, item: object, key: Hashable = None) -> None:
        self.put_many((item,), key)

    def put_many(self, items: Iterable[object], key: Hashable = None) -> None:
        contents = [to_payload(item, self._registry.references).content for item in items]
        if contents:
            self._send_buffer = self._send_buffer or self._registry.send_buffer(self)
            with waits_on(self.name):
                self._send_buffer.put(PutRequest(contents, key, caller()))

    def get(self, key: Hashable = None, timeout: float | None = None) -> Any:
        return self.get_many(1, key, timeout)[0]

    def get_many(
        self, max_items: int, key: Hashable = None, timeout: float | None = None, linger: float = 0.0
    ) -> list[Any]:
        self._flush(caller())  # earlier puts of this thread have then arrived
        contents = self._call("get_many", max_items, key, timeout, linger, timeout=timeout)
        return list(self._registry.unpacked([Payload(content) for content in contents]))

    def close(self, error: BaseException | None = None) -> None:
        try:
            if error is None:
                self._flush()
        except PlatformError as failure:
            error = failure
            raise
        finally:
            self._call("close", None if error is None else pack_error(error))
            self._closed = True
            if (send_buffer := self._registry.existing_send_buffer(self.address)) is not None:
                send_buffer.assume_full()

    @property
    def closed(self) -> bool:
        if not self._closed:
            self._flush()
            self._closed = self._call("closed")
        return self._closed

    def send(self, puts: Sequence[PutRequest]) -> tuple[Sequence[bytes | None], int]:
        contents = iter(store_large([content for put in puts for content in put.contents], self._registry.transport))
        sent = [replace(put, contents=list(itertools.islice(contents, len(put.contents)))) for put in puts]
        answer: tuple[Sequence[bytes | None], int] = self._call("put", sent)
        return answer

    def _flush(self, producer: str = "") -> None:
        if (send_buffer := self._registry.existing_send_buffer(self.address)) is not None:
            with waits_on(self.name):
                send_buffer.flush(producer)

    def _call(self, operation: str, *arguments: object, timeout: float | None = None) -> Any:
        limit = self.address.deadline_s if timeout is None else timeout
        home = self.address.home
        with waits_on(self.name):
            return self._registry.transport.call(
                home, "channel", self.address, operation, arguments, caller(), limit=limit
            )
