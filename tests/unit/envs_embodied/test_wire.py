"""Messages of environment servers: arrays arrive as they were sent, and anything else is refused."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from rl_platform.envs.embodied.remote import wire
from rl_platform.envs.embodied.remote.served_facts import ServedFacts
from rl_platform.envs.embodied.remote.wire import Kind, WireError
from rl_platform.envs.embodied.spaces import ActionSpace, EnvSpaces, ObservationPart

TOKEN = "a token of many letters"


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def test_arrays_arrive_in_place_and_others_within_a_limit(pair) -> None:
    draw = np.random.default_rng(0)
    sent = {
        "observations": draw.normal(size=(300, 200)).astype(np.float32),
        "rewards": draw.normal(size=5),
        "lengths": draw.integers(0, 9, 5),
        "images": draw.integers(0, 256, (2, 4, 4, 3), np.uint8),
        "flags": draw.random(5) < 0.5,
        "empty": np.zeros((0, 3), np.float32),
    }
    target = np.zeros((300, 200), np.float32)
    sender = threading.Thread(target=wire.send, args=(pair[0], Kind.STEP, {"a": [1, "ä"]}, sent))
    sender.start()
    message = wire.receive(pair[1], (Kind.STEP,), {"observations": target}, most=1000)
    sender.join()
    assert message.arrays["observations"] is target
    assert message.fields == {"a": [1, "ä"]}
    for name, array in sent.items():
        assert np.array_equal(message.arrays[name], array)
        assert message.arrays[name].dtype == array.dtype


class Counted(socket.socket):
    """Counts the calls that receive."""

    calls = 0

    def recvmsg_into(self, *arguments):
        self.calls += 1
        return super().recvmsg_into(*arguments)

    def recv_into(self, *arguments):
        self.calls += 1
        return super().recv_into(*arguments)


def test_a_reader_takes_messages_that_have_arrived_in_one_call_and_large_arrays_in_place(pair) -> None:
    counted = Counted(fileno=pair[1].detach())
    reader = wire.Reader(counted)
    rows = [np.full((2, 3), number, np.float32) for number in range(20)]
    for number, row in enumerate(rows):
        wire.send(pair[0], Kind.STEP, {"number": number} if number % 2 else {}, {"row": row, "empty": row[:0]})
    for number, row in enumerate(rows):
        message = wire.receive(reader, (Kind.STEP,), most=24)
        assert message.fields == ({"number": number} if number % 2 else {})
        assert np.array_equal(message.arrays["row"], row)
        message.fields["changed"] = True  # which later messages with the same text do not see
    assert counted.calls == 1
    large = np.random.default_rng(0).normal(size=wire.AHEAD)
    sender = threading.Thread(target=wire.send, args=(pair[0], Kind.STEP, {}, {"large": large}))
    sender.start()
    assert np.array_equal(wire.receive(reader, (Kind.STEP,), most=large.nbytes).arrays["large"], large)
    sender.join()
    pair[0].close()
    with pytest.raises(EOFError):
        wire.receive(reader, (Kind.STEP,))
    counted.close()


def test_a_reader_reads_messages_in_pieces(pair) -> None:
    drawn = np.random.default_rng(0)
    rows = [np.arange(size, dtype=np.int64) for size in (0, 3, 9_000, 1, 8_192, 5)]

    def send_pieces() -> None:
        one, two = socket.socketpair()
        with one, two:
            for row in rows:
                sending = threading.Thread(target=wire.send, args=(one, Kind.STEP, {"n": len(row)}, {"row": row}))
                sending.start()
                left = 20 + len(wire._text({"n": len(row)}, (("row", row.dtype, row.shape),))) + row.nbytes
                while left:
                    data = two.recv(min(left, int(drawn.choice([1, 7, 20, 65_536]))))
                    pair[0].sendall(data)
                    left -= len(data)
                sending.join()

    thread = threading.Thread(target=send_pieces)
    thread.start()
    reader, most = wire.Reader(pair[1]), max(row.nbytes for row in rows)
    for row in rows:
        message = wire.receive(reader, (Kind.STEP,), deadline=time.monotonic() + 20, most=most)
        assert message.fields == {"n": len(row)}
        assert np.array_equal(message.arrays["row"], row)
    thread.join()


def _message(text: bytes, size: int = 0, kind: int = Kind.STEP, magic: bytes = b"RLPE") -> bytes:
    return struct.pack("!4sIIQ", magic, kind, len(text), size) + text


def _table(*entries: object) -> bytes:
    return json.dumps({"arrays": entries}).encode()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n", "not a message"),
        (_message(b"{}", magic=b"RLPX"), "not a message"),
        (_message(b"", kind=77), "unexpected message of kind 77"),
        (_message(b"", kind=Kind.OPEN), "unexpected message"),
        (_message(_table(["known", "<f4", [2]]), 8, kind=Kind.REFUSED) + bytes(8), "unexpected message of kind 0"),
        (struct.pack("!4sIIQ", b"RLPE", Kind.STEP, 1 << 31, 0), "the limits are"),
        (_message(b"{}", 1 << 40), "the limits are"),
        (_message(b"\x80\x04K\x01."), "not a JSON object"),  # a pickle
        (_message(b"[1]"), "not a JSON object"),
        (_message(b"{}"), "not a JSON object"),
        (_message(b"[" * 100_000), "not a JSON object"),
        (_message(b'{"arrays": [["x", "|O", [1]]]}', 8), "an array 'x' of dtype '|O'"),
        (_message(_table(["x", "<f4", [-1]]), 4), "of dtype"),
        (_message(_table(["x", "<f4", [2**31]])), "of dtype"),
        (_message(_table(["x", "<f4", [2**20, 2**20, 2**20]]), 4), "exceed their message"),
        (_message(_table(["x", "<f4", [2]]), 4), "exceed their message"),
        (_message(_table(["x", "<f4", [0] + [2**31 - 1] * 7])), "exceed their message"),
        (_message(b'{"arrays": [["x", "<f4", [Infinity]]]}'), "not a JSON object"),
        (_message(_table(["x", "<f4", [1]]) + b"", 8) + b"12345678", "belong to no array"),
        (_message(_table(["known", "<f8", [1]]), 8), "known as float64 [1] instead of float32 [2]"),
        (_message(_table(["known", "<f4", [1, 2]]), 8), "known as float32 [1, 2] instead of float32 [2]"),
        (_message(_table(["x", "<f4", [1]], ["x", "<f4", [1]]), 8), "two arrays 'x'"),
        (_message(_table(["x", "|b1", [2]]), 2) + b"\x01\x02", "neither true nor false"),
    ],
)
def test_what_is_no_message_is_refused(pair, data: bytes, reason: str) -> None:
    pair[0].sendall(data)
    with pytest.raises(WireError) as refused:
        wire.receive(pair[1], (Kind.STEP,), {"known": np.zeros(2, np.float32)}, most=100)
    assert reason in str(refused.value)


def test_half_a_message_ends_at_the_deadline_or_with_the_connection(pair) -> None:
    data = _message(_table(["x", "<f4", [10]]), 40)
    pair[0].sendall(data)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        wire.receive(pair[1], (Kind.STEP,), deadline=began + 0.2, most=40)
    assert 0.1 < time.monotonic() - began < 5
    pair[0].sendall(data + b"1234")
    pair[0].close()
    with pytest.raises(EOFError):
        wire.receive(pair[1], (Kind.STEP,), most=40)


def test_bytes_that_arrive_one_by_one_do_not_extend_the_deadline(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "READING_S", 0.2)
    ended = threading.Event()

    def trickle() -> None:
        pair[0].sendall(_message(_table(["x", "|u1", [100_000]]), 100_000))
        while not ended.wait(1e-4):
            pair[0].sendall(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    began = time.monotonic()
    try:
        with pytest.raises(TimeoutError):
            wire.receive(pair[1], (Kind.STEP,), deadline=began + 0.1, most=100_000)
        assert time.monotonic() - began < 3
    finally:
        ended.set()
        thread.join()


class Trickle:
    """A socket with a clock. A byte arrives each millisecond."""

    def __init__(self, data: bytes) -> None:
        self._data, self._next, self.now = data, 0, 100.0

    def settimeout(self, seconds: float) -> None:
        pass

    def recvmsg_into(self, views: list[memoryview]) -> tuple[int]:
        views[0][:1] = self._data[self._next : self._next + 1]
        self._next, self.now = self._next + 1, self.now + 1e-3
        return (1,)


def test_the_parts_of_a_message_have_one_deadline_together(monkeypatch: pytest.MonkeyPatch) -> None:
    table = _table(["x", "|u1", [900]])
    source = Trickle(_message(b" " * (900 - len(table)) + table, 900) + bytes(900))
    monkeypatch.setattr(wire, "time", SimpleNamespace(monotonic=lambda: source.now))
    with pytest.raises(TimeoutError):
        wire.receive(source, (Kind.STEP,), deadline=source.now, most=900)
    assert source.now - 100 < wire.READING_S + 0.01


def test_a_reader_that_takes_bytes_one_by_one_does_not_extend_the_deadline_of_a_sender(pair) -> None:
    ended = threading.Event()

    def take() -> None:
        while not ended.wait(0.01):
            with contextlib.suppress(TimeoutError):
                pair[1].recv(1 << 12)

    pair[1].settimeout(0.1)
    thread = threading.Thread(target=take)
    thread.start()
    pair[0].settimeout(30)
    began = time.monotonic()
    try:
        with pytest.raises(TimeoutError):
            wire.send(pair[0], Kind.STEP, {}, {"x": np.zeros(1 << 24, np.uint8)}, began + 0.3)
        assert 0.2 < time.monotonic() - began < 3
    finally:
        ended.set()
        thread.join()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="of Linux")
def test_a_machine_that_is_gone_is_noticed_while_a_message_waits_for_its_acknowledgement() -> None:
    with socket.socket() as sock:
        wire.prepare(sock)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000


def _greeted(pair: tuple[socket.socket, socket.socket], token: str) -> str:
    found: list[str] = []
    server = threading.Thread(target=lambda: found.append(wire.greet(pair[0], TOKEN)))
    server.start()
    wire.claim(pair[1], token)
    server.join()
    return found[0]


def test_the_token_is_checked_and_never_sent(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _greeted(pair, TOKEN) == ""
    assert _greeted(pair, TOKEN + "!") == "wrong token"
    sent = []
    monkeypatch.setattr(wire, "_proof", lambda token, nonce: sent.append(nonce) or b"x" * 32)
    assert _greeted(pair, TOKEN) == ""  # both sides compute the same
    assert sent[0] == sent[1]
    assert _greeted(pair, TOKEN) == ""
    assert sent[2] != sent[0], "a claim could be repeated"


def test_another_version_is_named_on_both_sides(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair[0].sendall(wire._GREETING.pack(b"RLPE", 9, b"n" * 32))
    with pytest.raises(WireError, match="protocol version 9; this platform has version 3"):
        wire.claim(pair[1], TOKEN)
    pair[0].sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n")
    with pytest.raises(WireError, match="no environment server"):
        wire.claim(pair[1], TOKEN)
    one, two = socket.socketpair()
    found: list[str] = []
    server = threading.Thread(target=lambda: found.append(wire.greet(one, TOKEN)))
    server.start()
    nonce = wire._GREETING.unpack(wire._exactly(two, wire._GREETING.size, None))[2]
    two.sendall(wire._CLAIM.pack(b"RLPE", 7, wire._proof(TOKEN, nonce)))
    server.join()
    assert found == ["protocol version 7; this server has version 3"]
    one.close()
    two.close()


SPACES = EnvSpaces((4,), ActionSpace("continuous", 2), (2,), (-1.0, float("-inf")), (1.0, 2.0))
CHOICES = EnvSpaces(
    (7,),
    ActionSpace("multi_discrete", 5, (2, 3)),
    (2,),
    action_start=(1, 0),
    action_dtype="int32",
    parts=(ObservationPart("arm", (3,), 3, True), ObservationPart("eye", (2, 2, 1), 4, False, True)),
)


@pytest.mark.parametrize("spaces", [SPACES, CHOICES])
def test_facts_survive_json(spaces: EnvSpaces) -> None:
    facts = ServedFacts("robot.py:Arm", spaces, limited=True, tasks=("reach", "push"), render_rate=30)
    assert ServedFacts.of(json.loads(json.dumps(facts.fields()))) == facts


@pytest.mark.parametrize(
    "change",
    [
        {"observation_shape": [2**20, 2**20]},
        {"observation_shape": ["x"]},
        {"observation_dtype": "object"},
        {"action": {"kind": "telepathy", "size": 2, "choices": []}},
        {"action_low": [-1.0]},
        {"action_dtype": "O"},
        {"action_dtype": "(1,"},
        {"observation_shape": [-2, -3]},
        {"observation_shape": [float("inf")]},
        {"action_shape": [-2]},
        {"action_low": [float("nan"), 0.0]},
        {"action": {"kind": "multi_discrete", "size": 2, "choices": [1, 10**12]}, "action_low": [], "action_high": []},
        {"parts": [{"name": "x", "shape": [4], "size": 10**12, "numbers": False, "image": False}]},
        {"parts": [{"name": "x"}]},
        {"action": None},
    ],
)
def test_facts_that_describe_no_environment_are_refused(change: dict[str, object]) -> None:
    fields = json.loads(json.dumps(ServedFacts("x", SPACES, limited=True).fields()))
    fields["spaces"] |= change
    with pytest.raises(WireError):
        ServedFacts.of(fields)
