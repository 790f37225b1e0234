"""What a process sends to a channel elsewhere: together, in order, ahead of the answer where there is room."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from waiting import HANG_S

from rl_platform.errors import ChannelClosed, Deadline
from rl_platform.runtime.ray import send_buffer as send_buffer_module
from rl_platform.runtime.ray.payloads import BUNDLE, Payload, StoredItem, store_large, to_payload, unpack_items
from rl_platform.runtime.ray.send_buffer import PutRequest, SendBuffer
from rl_platform.runtime.ray.serialization import NO_REFERENCES, Packed, pack_error


class Home:
    """Takes puts as a channel's home does; answers when it may and with the room it is told to."""

    def __init__(self, room: int = 100) -> None:
        self.room = room
        self.calls: list[list[Any]] = []
        self.error: Exception | None = None
        self.free = threading.Event()
        self.free.set()

    def send(self, puts: Sequence[PutRequest]) -> tuple[list[bytes | None], int]:
        assert self.free.wait(HANG_S)
        self.calls.append([content for put in puts for content in put.contents])
        return [None if self.error is None else pack_error(self.error) for _ in puts], self.room

    @property
    def items(self) -> list[Any]:
        return [item for call in self.calls for item in call]


def put(number: Any, producer: str = "rollout[0]") -> PutRequest:
    return PutRequest([number], None, producer)


@pytest.fixture
def home() -> Iterator[Home]:
    made = Home()
    yield made
    made.free.set()


def test_with_room_a_put_returns_before_the_answer_and_flush_after_it(home: Home) -> None:
    send_buffer = SendBuffer(home.send)
    send_buffer.put(put(0))  # tells of the room
    home.free.clear()
    for number in range(1, 21):
        send_buffer.put(put(number))
    assert home.items == [0]
    threading.Timer(0.1, home.free.set).start()
    send_buffer.flush("rollout[0]")
    assert home.items == list(range(21))
    assert len(home.calls) <= 4, "what came during a call did not travel together"


def test_without_room_a_put_waits_for_the_answer(home: Home) -> None:
    home.room, send_buffer = 1, SendBuffer(home.send)
    for number in range(5):
        send_buffer.put(put(number))
        assert home.items == list(range(number + 1))
    home.error = Deadline("full")
    with pytest.raises(Deadline, match="full"):
        send_buffer.put(put(5))
    send_buffer.flush()


def test_no_more_than_half_the_room_is_sent_ahead(home: Home) -> None:
    home.room, send_buffer = 10, SendBuffer(home.send)
    send_buffer.put(put(0))
    home.free.clear()
    for number in range(1, 6):
        send_buffer.put(put(number))
    waiting = threading.Thread(target=send_buffer.put, args=(put(6),))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    home.free.set()
    waiting.join(HANG_S)
    send_buffer.flush()
    assert home.items == list(range(7))


def test_what_went_wrong_ahead_is_raised_once_for_its_user_only(home: Home) -> None:
    send_buffer = SendBuffer(home.send)
    send_buffer.put(put(0))
    home.error = ChannelClosed("closed")
    send_buffer.put(put(1))
    with pytest.raises(ChannelClosed):
        send_buffer.flush("rollout[0]")
    send_buffer.flush("rollout[0]")
    home.error = None
    send_buffer.put(put(2, "rollout[1]"))
    home.error = ChannelClosed("closed again")
    send_buffer.put(put(3, "rollout[1]-sink_0"))
    send_buffer.flush("rollout[10]")
    send_buffer.put(put(4, "rollout[1]"))
    with pytest.raises(ChannelClosed, match="again"):
        send_buffer.flush("rollout[1]")  # and threads named after it
    send_buffer.flush("rollout[1]")


def test_after_distrust_the_next_put_waits(home: Home) -> None:
    send_buffer = SendBuffer(home.send)
    send_buffer.put(put(0))
    send_buffer.assume_full()
    home.error = ChannelClosed("closed")
    with pytest.raises(ChannelClosed):
        send_buffer.put(put(1))


def test_threads_that_put_in_a_loop_travel_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_buffer_module, "LINGER_S", 0.5)  # threads may be delayed on a busy machine

    class Slow(Home):
        def send(self, puts: Sequence[PutRequest]) -> tuple[list[bytes | None], int]:
            time.sleep(0.005)
            return super().send(puts)

    home = Slow(room=0)  # everybody waits
    send_buffer = SendBuffer(home.send)

    def produce(rank: int) -> None:
        for number in range(25):
            send_buffer.put(put((rank, number), f"rollout[{rank}]"))

    threads = [threading.Thread(target=produce, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    for rank in range(4):
        assert [item for item in home.items if item[0] == rank] == [(rank, number) for number in range(25)]
    assert len(home.calls) < 50, "in two groups by turns it is 50"


class Memory:
    """An object store in this process that counts."""

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self.loads = 0

    def store(self, value: Any) -> int:
        self.objects.append(value)
        return len(self.objects) - 1

    def load(self, references: Sequence[int]) -> list[Any]:
        self.loads += len(references)
        return [self.objects[reference] for reference in references]


def contents(items: Sequence[Any]) -> list[Any]:
    return [to_payload(item, NO_REFERENCES).content for item in items]


class TestParcels:
    def test_large_items_of_a_call_are_one_object_which_is_read_once(self) -> None:
        items: list[Any] = [np.full(2**18, number) for number in range(3)] + ["small", 5]
        memory = Memory()
        sent = store_large(contents(items), memory)
        assert len(memory.objects) == 1
        assert [type(content) for content in sent] == [StoredItem] * 3 + [bytes] * 2
        received = unpack_items([Payload(content) for content in sent] + ["no payload"], NO_REFERENCES, memory)
        assert memory.loads == 1
        assert all(np.array_equal(a, b) for a, b in zip(received[:3], items[:3], strict=True))
        assert received[3:] == ["small", 5, "no payload"]

    def test_an_object_takes_no_more_items_once_it_is_full(self) -> None:
        memory = Memory()
        sent = store_large(contents([np.zeros(BUNDLE // 8 // 2) for _ in range(5)]), memory)
        assert [(content.reference, content.index) for content in sent] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]

    def test_a_few_kilobytes_travel_in_the_call(self) -> None:
        memory = Memory()
        (sent,) = store_large(contents([np.arange(1000)]), memory)
        assert isinstance(sent, Packed)
        assert not memory.objects
        assert np.array_equal(unpack_items([Payload(sent)], NO_REFERENCES, memory)[0], np.arange(1000))

    def test_long_texts_are_large_items_too(self) -> None:
        memory = Memory()
        sent = store_large(contents(["x" * 10**6]), memory)
        assert len(memory.objects) == 1
        assert unpack_items([Payload(sent[0])], NO_REFERENCES, memory) == ["x" * 10**6]
