"""Messages between a trainer and an environment server: a header, a JSON object, and the bytes of arrays.

| part | content |
|---|---|
| header, 20 bytes | `RLPE`, kind of the message, bytes of the JSON object, bytes of all arrays |
| JSON object | fields of the message; `arrays`: name, dtype and shape of each array, in order |
| arrays | their elements, little-endian, C order |

A connection begins with the server's greeting and the trainer's claim, both of a fixed size. The claim proves that the
trainer has the token, without sending it. Nothing is unpickled, and nothing that exceeds a limit is read. Messages are
not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import os
import secrets
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

VERSION = 3
TOKEN_VARIABLE = "RL_PLATFORM_ENV_TOKEN"
SHORTEST_TOKEN = 16
GREETING_TIMEOUT_S = 10.0
READING_S = 1.0  # after a deadline: the longest time to read a message that has arrived
MOST_JSON = 1 << 20
_MAGIC = b"RLPE"
_GREETING = struct.Struct("!4sI32s")  # version, nonce
_CLAIM = struct.Struct("!4sI32s")  # version, HMAC-SHA256 of the nonce
_HEADER = struct.Struct("!4sIIQ")  # kind, bytes of JSON, bytes of arrays
AHEAD = 1 << 16  # bytes that a Reader takes at once
SHORT_JSON = 1000  # bytes of a JSON object that is parsed once
_DTYPES = ("<f4", "<f8", "<i8", "|i1", "|u1", "|b1")


class Kind(IntEnum):
    """refused: `reason` and `busy`; the connection ends. welcome: facts of the environment. open: a trainer's request,
    answered by granted (`step_timeout_s` of the server, if it has one) and, once the environments are built, by done.
    reset, step, render: answered by done or failed."""

    REFUSED = 0
    WELCOME = 1
    OPEN = 2
    GRANTED = 3
    DONE = 4
    FAILED = 5
    RESET = 6
    STEP = 7
    RENDER = 8


class WireError(Exception):
    """The other side sent something that is no message, or one that is too large or was not expected."""


Table = tuple[tuple[str, np.dtype, tuple[int, ...]], ...]  # name, dtype and shape of each array


Fields = dict[str, Any]  # of a message: JSON, not checked yet


class Message(NamedTuple):
    """A message of one connection: its kind, JSON fields, and arrays by name."""

    kind: Kind
    fields: Fields
    arrays: dict[str, np.ndarray]


class _Limits(NamedTuple):
    """Deadlines (time.monotonic). waiting: for bytes to arrive; reading: to read bytes that have arrived."""

    waiting: float
    reading: float


def host_and_port(address: str) -> tuple[str, int]:
    """Returns the parts of `host:port` or `[IPv6 address]:port`."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def address_of(host: str, port: int) -> str:
    """Returns an address as `host_and_port` reads it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def read_token(path: str) -> str:
    """Returns the token in a file, without blanks at its ends. Raises ValueError if there is none, or if it is short.
    Also raises it if other users of this machine may read it, because each of them could then move a robot."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise ValueError(f"other users or its group may read or change it: chmod 600 {path}")
            token = file.read(1000).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
    return checked_token(token)


def checked_token(token: str) -> str:
    """Returns the token. Raises ValueError for a short one."""
    if not token:
        raise ValueError("holds no token")
    if len(token) < SHORTEST_TOKEN:
        raise ValueError(f"holds a token of {len(token)} characters; at least {SHORTEST_TOKEN} are needed")
    return token


def prepare(sock: socket.socket) -> None:
    """Sends small messages at once, and notices a machine that is gone after about a minute (Linux: also while a
    message waits for its acknowledgement)."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 60_000)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def greet(sock: socket.socket, token: str) -> str:
    """Checks a trainer's claim. Returns the reason of a refusal; empty: the trainer has the token."""
    deadline = time.monotonic() + GREETING_TIMEOUT_S
    nonce = secrets.token_bytes(32)
    sock.settimeout(GREETING_TIMEOUT_S)
    sock.sendall(_GREETING.pack(_MAGIC, VERSION, nonce))
    magic, version, proof = _CLAIM.unpack(_exactly(sock, _CLAIM.size, _limits(deadline)))
    if not hmac.compare_digest(proof, _proof(token, nonce)):
        return "wrong token"
    if magic != _MAGIC or version != VERSION:
        return f"protocol version {version}; this server has version {VERSION}"
    return ""


def claim(sock: socket.socket, token: str) -> None:
    """Sends a trainer's claim. Raises WireError if the other side is no server of this version."""
    deadline = time.monotonic() + GREETING_TIMEOUT_S
    magic, version, nonce = _GREETING.unpack(_exactly(sock, _GREETING.size, _limits(deadline)))
    if magic != _MAGIC:
        raise WireError("it is no environment server")
    if version != VERSION:
        raise WireError(f"it has protocol version {version}; this platform has version {VERSION}")
    sock.sendall(_CLAIM.pack(_MAGIC, VERSION, _proof(token, nonce)))


def _proof(token: str, nonce: bytes) -> bytes:
    return hmac.new(token.encode(), nonce, hashlib.sha256).digest()


def send(
    sock: socket.socket,
    kind: Kind,
    fields: Mapping[str, object] | None = None,
    arrays: Mapping[str, np.ndarray] | None = None,
    deadline: float | None = None,
) -> None:
    """Sends a message; contiguous arrays are not copied. Raises OSError.

    deadline: of the whole message (time.monotonic), after which TimeoutError is raised; None: the socket's own timeout.
    """
    given = {name: np.ascontiguousarray(array) for name, array in (arrays or {}).items()}
    table = tuple([(name, array.dtype, array.shape) for name, array in given.items()])
    text = _table_text(table) if not fields else _text(fields, table)
    size = sum([array.nbytes for array in given.values()])
    parts = [memoryview(_HEADER.pack(_MAGIC, kind, len(text), size) + text)]
    parts += [array.data.cast("B") for array in given.values() if array.nbytes]
    while parts:
        if deadline is not None:
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError("timed out")
            sock.settimeout(left)
        parts = _rest(parts, sock.sendmsg(parts))


def _text(fields: Mapping[str, object], table: Table) -> bytes:
    return json.dumps({**fields, "arrays": [[name, dtype.str, shape] for name, dtype, shape in table]}).encode()


@lru_cache(16)
def _table_text(table: Table) -> bytes:
    """Returns the JSON object of a message without fields, as those of most steps."""
    return _text({}, table)


def receive(
    sock: socket.socket | Reader,
    expected: Sequence[Kind],
    targets: Mapping[str, np.ndarray] | None = None,
    deadline: float | None = None,
    most: int = 0,
) -> Message:
    """Returns the next message. Arrays named in `targets` are received into these; others have at most `most` bytes.

    targets: contiguous. deadline: of the whole message (time.monotonic); None: the socket's own timeout. A message that
    has arrived by then is read within READING_S. Raises TimeoutError, EOFError, WireError or OSError.
    """
    targets, limits = targets or {}, _limits(deadline)
    limit = most + sum([array.nbytes for array in targets.values()])
    magic, number, text_size, size = _HEADER.unpack(_exactly(sock, _HEADER.size, limits))
    if magic != _MAGIC:
        raise WireError("not a message")
    if text_size > MOST_JSON or size > limit:
        raise WireError(f"a message of {text_size} + {size} bytes; the limits are {MOST_JSON} + {limit}")
    if number not in expected:
        raise WireError(f"an unexpected message of kind {number}")
    text = _exactly(sock, text_size, limits)
    fields, table, total = _parsed_short(text) if text_size <= SHORT_JSON else _parsed(text)
    if total != size:
        raise WireError("bytes that belong to no array" if total < size else "arrays that exceed their message")
    arrays: dict[str, np.ndarray] = {}
    for name, dtype, shape in table:
        array = targets.get(name)
        if array is None:
            array = np.empty(shape, dtype)
        elif array.dtype != dtype or array.shape != shape:
            raise WireError(f"{name} as {dtype} {list(shape)} instead of {array.dtype} {list(array.shape)}")
        arrays[name] = array
    _fill(sock, [array.data.cast("B") for array in arrays.values() if array.nbytes], limits)
    for name, array in arrays.items():
        if array.dtype == np.bool_ and max(array.tobytes(), default=0) > 1:
            raise WireError(f"{name} with values that are neither true nor false")
    return Message(Kind(number), dict(fields), arrays)


def _parsed(text: bytes) -> tuple[Fields, Table, int]:
    """Returns the fields of a message, its arrays, and their bytes."""
    try:
        fields = json.loads(text)
        given = [(str(name), str(dtype), tuple([int(n) for n in shape])) for name, dtype, shape in fields.pop("arrays")]
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise WireError("not a JSON object with a list of arrays") from error
    seen = set()
    for name, dtype, shape in given:
        if dtype not in _DTYPES or not all(0 <= n < 2**31 for n in shape) or len(shape) > 8:
            raise WireError(f"an array {name!r} of dtype {dtype!r} and shape {list(shape)}")
        if math.prod(n or 1 for n in shape) > 2**59:  # NumPy refuses such a shape even for no numbers
            raise WireError("arrays that exceed their message")
        if name in seen:
            raise WireError(f"two arrays {name!r}")
        seen.add(name)
    table = tuple((name, np.dtype(dtype), shape) for name, dtype, shape in given)
    return fields, table, sum(dtype.itemsize * math.prod(shape) for _, dtype, shape in table)


_parsed_short = lru_cache(64)(_parsed)  # the messages of most steps have the same text


class Reader:
    """Reads ahead from a socket, for `receive`: a small message takes one system call instead of three."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self.settimeout = sock, sock.settimeout
        self._memory = memoryview(bytearray(AHEAD))
        self._ahead = self._memory[:0]

    def recvmsg_into(self, views: Sequence[memoryview]) -> tuple[int]:
        """Fills the views in order, as far as bytes are there; returns their number, 0 at the end of the connection."""
        if not self._ahead:
            if sum(map(len, views)) >= AHEAD:
                return self._socket.recvmsg_into(views)[:1]
            self._ahead = self._memory[: self._socket.recv_into(self._memory)]
        count = 0
        for view in views:
            part = self._ahead[: len(view)]
            view[: len(part)] = part
            self._ahead = self._ahead[len(part) :]
            count += len(part)
            if not self._ahead:
                break
        return (count,)


def _limits(deadline: float | None) -> _Limits | None:
    return None if deadline is None else _Limits(deadline, max(deadline, time.monotonic()) + READING_S)


def _exactly(sock: socket.socket | Reader, size: int, limits: _Limits | None) -> bytes:
    buffer = bytearray(size)
    _fill(sock, [memoryview(buffer)] if size else [], limits)
    return bytes(buffer)


def _fill(sock: socket.socket | Reader, views: list[memoryview], limits: _Limits | None) -> None:
    while views:
        if limits is not None:
            if (now := time.monotonic()) > limits.reading:
                raise TimeoutError("timed out")
            sock.settimeout(max(limits.waiting - now, 1e-3))  # above 0, so that bytes that have arrived are read
        count = sock.recvmsg_into(views)[0]
        if count == 0:
            raise EOFError("the connection was closed")
        views = _rest(views, count)


def _rest(views: list[memoryview], count: int) -> list[memoryview]:
    """Returns the views without their first `count` bytes."""
    if count == sum(map(len, views)):
        return []
    for index, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[index + 1 :]]
        count -= len(view)
    return []
