"""Calls between two processes of one node through a Unix-domain socket, in a fifth of the time of Ray's calls.

Carries small messages without references to the object store; `call` returns None for all others. A call counts as made
once it is written. Its answer comes through the socket. An answer that is large or holds references is stored until the
caller fetches it through Ray. Not covered: whether the other process died. A closed connection only means that no
answer will come.

The sockets have abstract names (Linux), so there is no file on disk, and the kernel removes the name with its process.
Both ends refuse processes of other users.
"""

from __future__ import annotations

import copyreg
import hashlib
import io
import itertools
import logging
import os
import pickle
import socket
import struct
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import NoReturn

from rl_platform.runtime.ray.serialization import SHARED, Answer, Packed

logger = logging.getLogger(__name__)

WAITING = 128  # connections that are not accepted yet


@dataclass(frozen=True)
class FetchThroughRay:
    """Stands for an answer that did not come through the socket. `number`: the key of `SocketServer.fetch`, if there is
    one."""

    number: int | None


SocketAnswer = Answer | FetchThroughRay


def socket_name(run: str, node: str, host: str) -> str:
    """Returns the name of a host's socket, equal in all processes of a run. Socket names have at most 107 bytes."""
    return f"\0{run}-{hashlib.sha256(f'{node} {host}'.encode()).hexdigest()[:16]}"


class SocketClient:
    """The caller's end, shared by its threads. Objects of class `reference` are not sent through the socket."""

    def __init__(self, connection: Connection, reference: type) -> None:
        self._connection, self._reference = connection, reference
        self._numbers = itertools.count()
        self._sending = threading.Lock()
        self._pending: dict[int, Future[SocketAnswer]] = {}
        self._ended = False
        threading.Thread(target=self._read_messages, name="socket client", daemon=True).start()

    @classmethod
    def to(cls, name: str, reference: type) -> SocketClient | None:
        """Returns a connection to the process that listens there; None: there is none."""
        if sys.platform != "linux":
            return None
        end = socket.socket(socket.AF_UNIX)
        try:
            end.connect(name)
        except OSError:
            end.close()
            return None
        return cls(Connection(end.detach()), reference) if _same_user(end) else None

    def call(self, method: str, arguments: tuple[object, ...]) -> Future[SocketAnswer] | None:
        """Returns the answer, or FetchThroughRay; the future never raises. None: nothing was sent, use Ray.

        Callbacks of the future run where answers arrive, and must not wait.
        """
        future: Future[SocketAnswer] = Future()
        number = next(self._numbers)
        data = _packed((number, method, arguments), self._reference)
        if data is None:
            return None
        with self._sending:
            if self._ended:
                return None
            self._pending[number] = future
            try:
                self._connection.send_bytes(data)
            except OSError:
                del self._pending[number]
                return None
        return future

    def _read_messages(self) -> None:
        try:
            while True:
                number, answer = pickle.loads(self._connection.recv_bytes())
                self._pending.pop(number).set_result(answer)
        except (EOFError, OSError):
            pass
        except Exception:
            logger.exception("an answer cannot be read")
        with self._sending:
            self._ended = True
            self._connection.close()
        for future in self._pending.values():
            future.set_result(FetchThroughRay(None))


class SocketServer:
    """The end that is called. `take(method, *arguments)` answers in a future that never raises, and does not wait."""

    def __init__(self, name: str, take: Callable[..., Future[Answer]], reference: type) -> None:
        self._take, self._reference = take, reference
        self._numbers = itertools.count()
        self._unsent: dict[int, Answer] = {}
        if sys.platform != "linux":
            return
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(name)
        self._socket.listen(WAITING)
        self._open = {self._socket.fileno()}
        os.register_at_fork(after_in_child=self._forget)  # a child that lives longer would keep the socket open
        threading.Thread(target=self._accept, name="socket server", daemon=True).start()

    def fetch(self, number: int | None) -> Answer | None:
        """Returns an answer that was not sent through the socket; None if there is none of this number."""
        return None if number is None else self._unsent.pop(number, None)

    def _accept(self) -> None:
        with self._socket:  # a connection after a failure is refused and does not wait for an answer
            while True:
                end, _ = self._socket.accept()
                if _same_user(end):
                    self._open.add(end.fileno())
                    connection = Connection(end.detach())
                    threading.Thread(
                        target=self._read_messages, args=(connection,), name="socket server", daemon=True
                    ).start()

    def _read_messages(self, connection: Connection) -> None:
        sending = threading.Lock()
        try:
            while True:
                number, method, arguments = pickle.loads(connection.recv_bytes())
                answer = partial(self._answer, connection, sending, number)
                self._take(method, *arguments).add_done_callback(answer)  # keeps no answer until the next call
        except (EOFError, OSError):
            pass
        except Exception:
            logger.exception("a call cannot be taken")
        with sending:
            self._open.discard(connection.fileno())
            connection.close()

    def _answer(self, connection: Connection, sending: threading.Lock, number: int, done: Future[Answer]) -> None:
        data = _packed((number, done.result()), self._reference)
        if data is None:
            key = next(self._numbers)
            self._unsent[key] = done.result()
            data = pickle.dumps((number, FetchThroughRay(key)))
        with sending, suppress(OSError):  # the caller is gone
            connection.send_bytes(data)

    def _forget(self) -> None:
        for descriptor in self._open:
            os.close(descriptor)


class _NotSendable(Exception):
    """The message must go through Ray."""


def _packed(message: object, reference: type) -> bytes | None:
    """Returns the pickled message; None if it is large or holds references."""
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, protocol=5)
    pickler.dispatch_table = copyreg.dispatch_table | {reference: _refuse, Packed: _if_small}
    try:
        pickler.dump(message)
    except _NotSendable:
        return None
    return stream.getvalue()


def _refuse(_: object) -> NoReturn:
    raise _NotSendable


def _if_small(packed: Packed) -> tuple[type[Packed], tuple[object, ...]]:
    if packed.size >= SHARED:
        raise _NotSendable
    return Packed, (packed.data, packed.buffers)


def _same_user(end: socket.socket) -> bool:
    """Returns whether the process at the other end is this user's; closes it if not."""
    _, user, _ = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if user != os.getuid():
        end.close()
    return bool(user == os.getuid())
