"""Channels: order, back-pressure, exactly once, close and errors, deadlines; in one process and between processes."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import HANG_S, until

from rl_platform.errors import ChannelClosed, DataError, Deadline, PlatformError, WorkerDied
from rl_platform.runtime.channel import Channel
from rl_platform.runtime.ray.channel_proxy import ChannelAddress, ChannelRegistry
from rl_platform.runtime.ray.serialization import NO_REFERENCES
from rl_platform.runtime.waits import waiting_on

Make = Callable[..., Any]


class Bounded(Channel[Any]):
    def _add(self, *items: Any) -> None:
        super()._add(*items)
        assert self.depth <= self.capacity


def local(capacity: int = 16, deadline_s: float = HANG_S, **options: Any) -> Channel[Any]:
    return Bounded("rollouts", capacity, deadline_s, **options)


@pytest.fixture(scope="module", params=["one process", pytest.param("ray", marks=pytest.mark.slow)])
def make(request: pytest.FixtureRequest) -> Make:
    """make(capacity=2): a new channel, in this process or in one that Ray started."""
    return local if request.param == "one process" else request.getfixturevalue("ray_channel")


def test_items_come_in_the_order_they_were_put(make: Make):
    channel = make()
    channel.put("a")
    channel.put_many(["b", "c", "d"])
    assert [channel.get(), *channel.get_many(2), channel.get()] == ["a", "b", "c", "d"]


def test_references_are_passed_not_copies():
    channel, payload = local(), object()
    channel.put(payload)
    assert channel.get() is payload


def test_key_is_an_address(make: Make):
    channel = make()
    channel.put("for a", key="a")
    channel.put("for nobody")
    channel.put("for b", key="b")
    assert channel.get(key="b") == "for b"
    assert channel.get() == "for nobody"
    with pytest.raises(Deadline, match=r"depth 1, none with key 'b'"):
        channel.get(key="b", timeout=0.01)
    assert channel.get(key="a") == "for a"


def test_keys_that_are_used_up_leave_nothing_behind():
    channel = local()
    for key in range(100):
        channel.put(key, key=key)
        assert channel.get(key=key) == key
    assert len(channel._streams) == 1


def test_waiters_of_different_keys_each_get_their_item():
    channel = local()
    with ThreadPoolExecutor(4) as pool:
        results = {key: pool.submit(channel.get, key) for key in "abcd"}
        until(lambda: len(channel._streams) == 5)
        for key in "dbca":
            channel.put(key.upper(), key=key)
        assert {key: future.result(HANG_S) for key, future in results.items()} == {key: key.upper() for key in "abcd"}


def test_a_full_channel_holds_the_producer_back_until_there_is_room(make: Make):
    channel = make(capacity=2)
    with ThreadPoolExecutor(1) as pool:
        putting = pool.submit(channel.put_many, range(5))
        time.sleep(0.05)
        assert not putting.done()
        assert [channel.get() for _ in range(5)] == [0, 1, 2, 3, 4]
        putting.result(HANG_S)


@settings(max_examples=20)
@given(
    producers=st.integers(1, 4),
    consumers=st.integers(1, 4),
    capacity=st.integers(1, 9),
    batch=st.integers(1, 5),
    modes=st.lists(st.sampled_from(["get", "get_many", "linger"]), min_size=4, max_size=4),
)
def test_every_item_is_delivered_exactly_once_and_in_its_producers_order(
    producers, consumers, capacity, batch, modes, make: Make
):
    channel = make(capacity)

    def produce(producer: int) -> None:
        for start in range(0, 60, batch):
            channel.put_many([(producer, index) for index in range(start, min(60, start + batch))])

    def consume(mode: str) -> list[tuple[int, int]]:
        received: list[tuple[int, int]] = []
        try:
            while True:
                if mode == "get":
                    received.append(channel.get())
                else:
                    received += channel.get_many(batch, linger=0.001 if mode == "linger" else 0.0)
        except ChannelClosed:
            return received

    with ThreadPoolExecutor(producers + consumers) as pool:
        consuming = [pool.submit(consume, mode) for mode in modes[:consumers]]
        for putting in [pool.submit(produce, producer) for producer in range(producers)]:
            putting.result(HANG_S)
        channel.close()
        received = [future.result(HANG_S) for future in consuming]

    everything = Counter(item for items in received for item in items)
    assert everything == Counter((producer, index) for producer in range(producers) for index in range(60))
    for items in received:
        for producer in range(producers):
            own = [index for who, index in items if who == producer]
            assert all(first < second for first, second in pairwise(own))


def test_a_get_that_lingers_waits_for_others_until_there_are_enough_or_no_more_can_come(make: Make):
    channel = make(capacity=4)
    with ThreadPoolExecutor(1) as pool:

        def got_after(*puts: int, wanted: int = 3, then: Callable[[], None] = lambda: None) -> list[int]:
            channel.put(puts[0])
            getting = pool.submit(channel.get_many, wanted, linger=10 * HANG_S)
            for item in puts[1:]:
                time.sleep(0.01)
                channel.put(item)
            then()
            return getting.result(HANG_S)

        assert got_after(0, 1, 2) == [0, 1, 2]
        assert got_after(0, 1, 2, 3, wanted=9) == [0, 1, 2, 3], "a full channel takes no more"
        channel.put(0)
        assert channel.get_many(2, linger=0.001) == [0]
        assert got_after(0, 1, wanted=9, then=channel.close) == [0, 1]


@settings(max_examples=100)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("put_many"), st.integers(0, 4)),
            st.tuples(st.just("get_many"), st.integers(1, 4)),
        ),
        max_size=30,
    )
)
def test_channel_behaves_as_a_plain_bounded_queue(steps, make: Make):
    channel, model, number = make(capacity=6, deadline_s=0), deque(), 0
    for step, count in steps:
        if step == "put_many":
            fitting = min(count, 6 - len(model))
            items = list(range(number, number + count))
            number += count
            model.extend(items[:fitting])
            if fitting == count:
                channel.put_many(items)
            else:
                with pytest.raises(Deadline, match=f"{fitting} of {count}" if count > 1 else "depth 6 of 6"):
                    channel.put_many(items)
        elif model:
            assert channel.get_many(count) == [model.popleft() for _ in range(min(count, len(model)))]
        else:
            with pytest.raises(Deadline):
                channel.get_many(count)


def test_close_lets_consumers_drain_and_then_ends_them(make: Make):
    channel = make()
    channel.put_many([1, 2])
    channel.close()
    channel.close()
    with pytest.raises(ChannelClosed, match="put on channel 'rollouts', which is closed"):
        channel.put(3)
    assert channel.get_many(9) == [1, 2]
    with pytest.raises(ChannelClosed, match="closed and empty"):
        channel.get()


def test_close_with_an_error_is_raised_after_what_was_put(make: Make):
    channel, error = make(), DataError("rollout[0] read a bad line")
    channel.put("good")
    channel.close(error)
    channel.close(DataError("a later error"))
    with pytest.raises(ChannelClosed, match="because of DataError: rollout") as refused:
        channel.put("late")
    assert repr(refused.value.__cause__) == repr(error)
    assert channel.get() == "good"
    for end in (channel.get, lambda: channel.get_many(2)):
        with pytest.raises(DataError) as raised:
            end()
        assert repr(raised.value) == repr(error)


def test_close_wakes_every_waiter():
    channel = local(capacity=1)
    channel.put("only", key="elsewhere")
    calls = [channel.get, lambda: channel.get_many(3), lambda: channel.put(1)]
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(call) for call in calls]
        until(lambda: channel._producers_waiting == 1 and channel._streams[None].users == 2)
        channel.close()
        assert all(isinstance(future.exception(HANG_S), ChannelClosed) for future in waiting)


def test_a_missed_get_names_waiter_channel_depth_and_producers():
    status = {"rollout[0]": "busy in generate for 60 s", "rollout[1]": "dead"}
    channel = local(producers=tuple(status), status=status.__getitem__)
    errors: list[Deadline] = []

    def wait() -> None:
        try:
            channel.get(timeout=0.05)
        except Deadline as error:
            errors.append(error)

    thread = threading.Thread(target=wait, name="critic[2]")
    thread.start()
    thread.join(HANG_S)
    assert str(errors[0]).startswith(
        "critic[2] waited 0.05 s on channel 'rollouts' "
        "(depth 0, producers: rollout[0] busy in generate for 60 s, rollout[1] dead), since "
    )


def test_a_missed_put_names_the_consumers(make: Make):
    channel = make(capacity=1, deadline_s=0.02, consumers=("reward[0]",))
    channel.put(0)
    with pytest.raises(
        Deadline, match=r"runner waited 0.02 s to put on channel 'rollouts' \(depth 1 of 1, consumers: "
    ):
        channel.put(1)


def test_a_missed_deadline_comes_in_time_and_leaves_no_trace(make: Make):
    channel = make()
    start = time.monotonic()
    with pytest.raises(Deadline, match=r"waited 0\.05 s on channel .*producers: none registered"):
        channel.get(timeout=0.05)
    assert time.monotonic() - start >= 0.05
    assert waiting_on(threading.get_ident()) == ""
    channel.put("still works")
    assert channel.get() == "still works"


def test_who_waits_on_a_channel_is_known_while_it_waits():
    channel = local()
    thread = threading.Thread(target=channel.get)
    thread.start()
    until(lambda: waiting_on(thread.ident).startswith("channel 'rollouts' for "))
    channel.put(1)
    thread.join(HANG_S)
    assert waiting_on(thread.ident) == ""


def test_a_lost_item_is_found_out():
    channel = local()
    channel.put_many([1, 2, 3])
    channel._streams[None].items.popleft()
    with pytest.raises(PlatformError, match="3 put, 0 got, 2 held, depth 3"):
        channel.close()


@pytest.mark.parametrize("call", [lambda: local(capacity=0), lambda: local().get_many(0)])
def test_senseless_numbers_are_refused(call):
    with pytest.raises(ValueError, match="channel 'rollouts': "):
        call()


def test_a_failure_that_is_told_late_closes_no_channel_that_was_made_after_it() -> None:
    registry = ChannelRegistry("host0", Any, NO_REFERENCES, str)  # type: ignore[arg-type]
    earlier, later = (
        registry.home(ChannelAddress(number, f"channel {number}", "host0", 4, 1.0, ("rollout[0]",), ()))
        for number in (6, 8)
    )
    registry.fail("rollout[0]", WorkerDied("gone"), before=7)
    assert (earlier.closed, later.closed) == (True, False)
    registry.fail("rollout[0]", WorkerDied("gone"))
    assert later.closed


def test_a_failure_that_is_told_before_the_first_use_of_a_channel_closes_it() -> None:
    registry = ChannelRegistry("host0", Any, NO_REFERENCES, str)  # type: ignore[arg-type]
    registry.fail("rollout[0]", WorkerDied("gone"), before=7)
    mine, others, later = (
        registry.home(ChannelAddress(number, f"channel {number}", "host0", 4, 1.0, (producer,), ()))
        for number, producer in ((5, "rollout[0]"), (6, "rollout[1]"), (8, "rollout[0]"))
    )
    assert (mine.closed, others.closed, later.closed) == (True, False, False)
    with pytest.raises(WorkerDied, match="gone"):
        mine.get()
