"""Sockets between two processes of a node: which messages they carry, which they refuse, and how they end."""

from __future__ import annotations

import itertools
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from waiting import HANG_S, until

from rl_platform.runtime.ray import unix_socket
from rl_platform.runtime.ray.payloads import Payload, store_large, to_payload, unpack_items
from rl_platform.runtime.ray.serialization import NO_REFERENCES, SHARED, Packed, pack
from rl_platform.runtime.ray.unix_socket import FetchThroughRay, SocketClient, SocketServer, socket_name

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract socket names")
RUNS = itertools.count()


class Reference:
    """Something that must travel another way."""


class Taken:
    """What a listener was called with; the test answers."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[tuple[tuple[Any, ...], Future[Any]]] = queue.SimpleQueue()

    def __call__(self, *call: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        self.calls.put((call, answer))
        return answer

    def next(self) -> tuple[tuple[Any, ...], Future[Any]]:
        return self.calls.get(timeout=HANG_S)


@pytest.fixture
def name() -> str:
    return socket_name(f"test-{os.getpid()}-{next(RUNS)}", "node", "host0")


def echo(method: str, *arguments: Any) -> Future[Any]:
    answer: Future[Any] = Future()
    answer.set_result(((method, *arguments), None))
    return answer


def asked(caller: SocketClient, *arguments: Any) -> Future[Any]:
    future = caller.call("call", arguments)
    assert future is not None
    return future


def test_calls_arrive_in_order_and_every_one_gets_its_own_answer_in_whatever_order(name: str) -> None:
    taken = Taken()
    listener = SocketServer(name, taken, Reference)
    caller = SocketClient.to(name, Reference)
    assert caller is not None
    futures = [asked(caller, number) for number in range(100)]
    calls = [taken.next() for _ in range(100)]
    assert [call for call, _ in calls] == [("call", number) for number in range(100)]
    for (_, number), answer in reversed(calls):
        answer.set_result((number * 2, None))
    assert [future.result(HANG_S) for future in futures] == [(number * 2, None) for number in range(100)]
    assert listener.fetch(0) is None


def test_threads_share_a_client_and_several_clients_a_server(name: str) -> None:
    SocketServer(name, echo, Reference)
    callers = [SocketClient.to(name, Reference) for _ in range(2)]
    text = "x" * 50_000  # several writes

    def talk(number: int) -> bool:
        caller = callers[number % 2]
        assert caller is not None
        return all(
            asked(caller, number, turn, text).result(HANG_S) == (("call", number, turn, text), None)
            for turn in range(20)
        )

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(talk, range(6)))


def test_an_item_of_a_channel_travels_whose_pickle_is_sent_from_where_it_lies(name: str) -> None:
    """Such a pickle is at least IN_BAND large and smaller than SHARED: a PickleBuffer in the message."""
    item = "x" * (SHARED // 2)
    contents = store_large([to_payload(item, NO_REFERENCES).content], store=None)
    taken = Taken()
    listener = SocketServer(name, taken, Reference)
    caller = SocketClient.to(name, Reference)
    assert caller is not None
    assert caller.call("put", (contents,)) is not None
    (_, received), _ = taken.next()
    assert unpack_items([Payload(content) for content in received], NO_REFERENCES, store=None) == [item]
    del listener


@pytest.mark.parametrize(
    ("value", "travels"),
    [
        (pack(bytes(SHARED // 2), NO_REFERENCES), True),
        (Packed(b"", [bytearray(SHARED - 1)]), True),
        (Packed(b"", [bytearray(SHARED)]), False),
        ([{"deep": (Reference(),)}], False),
    ],
    ids=["small", "just small enough", "large", "reference"],
)
def test_large_messages_and_references_travel_another_way(name: str, value: Any, travels: bool) -> None:
    taken = Taken()
    listener = SocketServer(name, taken, Reference)
    caller = SocketClient.to(name, Reference)
    assert caller is not None
    assert (caller.call("call", (value,)) is not None) == travels
    future = asked(caller, "short")
    while (call := taken.next())[0] != ("call", "short"):
        pass
    call[1].set_result((value, None))
    answer = future.result(HANG_S)
    if travels:
        assert answer[0] == value
    else:
        assert isinstance(answer, FetchThroughRay)
        assert listener.fetch(answer.number) == (value, None)
        assert listener.fetch(answer.number) is None, "it was fetched"


def test_who_is_of_another_user_is_refused_by_both_ends(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    SocketServer(name, echo, Reference)
    user = os.getuid()
    monkeypatch.setattr(unix_socket.os, "getuid", lambda: user + (threading.current_thread().name == "socket server"))
    caller = SocketClient.to(name, Reference)
    assert caller is not None
    refused = caller.call("call", ())
    assert refused is None or refused.result(HANG_S) == FetchThroughRay(None)
    monkeypatch.setattr(unix_socket.os, "getuid", lambda: user + (threading.current_thread().name != "socket server"))
    assert SocketClient.to(name, Reference) is None


def test_without_a_server_there_is_no_client(name: str) -> None:
    assert SocketClient.to(name, Reference) is None


PROCESS = """
import os, sys
from concurrent.futures import Future
from rl_platform.runtime.ray import unix_socket
from rl_platform.runtime.ray.unix_socket import SocketServer

forked = []
def take(method, *arguments):
    if not forked:
        forked.append(os.fork())
        if not forked[0]:  # outlives its parent, until the test ends
            sys.stdin.read()
            os._exit(0)
    print(method, flush=True)
    return Future()

listener = SocketServer("\\0" + sys.argv[1], take, set)
print("listens", flush=True)
os.read(0, 1)
"""


def test_a_connection_ends_with_the_process_even_if_a_child_of_it_lives_on_and_leaves_nothing(name: str) -> None:
    command = [sys.executable, "-c", PROCESS, name[1:]]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "listens\n"
        caller = SocketClient.to(name, Reference)
        assert caller is not None
        waiting = [asked(caller), asked(caller)]
        assert process.stdout.readline() == "call\n"
        process.kill()
        assert [future.result(HANG_S) for future in waiting] == [FetchThroughRay(None)] * 2
        assert caller.call("call", ()) is None
        until(lambda: name[1:] not in Path("/proc/net/unix").read_text())  # the child closes one after the other
        assert SocketClient.to(name, Reference) is None
    finally:
        process.kill()
        process.communicate()  # ends the child too


def test_a_call_that_cannot_be_read_ends_the_connection_and_nobody_waits_for_ever(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    SocketServer(name, echo, Reference)
    caller = SocketClient.to(name, Reference)
    assert caller is not None
    assert asked(caller, Unreadable()).result(HANG_S) == FetchThroughRay(None)
    assert "cannot be taken" in caplog.text


class Unreadable:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return int, ("no number",)
