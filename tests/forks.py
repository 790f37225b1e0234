"""Processes as forks of a process that has imported for them. No test by itself.

This file as a program is such a process. It listens on a Unix socket. A process that connects sends descriptors and a
job, and gets the process id of a fork, and later its wait status. A fork has a session, descriptors, a folder,
environment variables and search paths of its own, as a process that was not forked. The process that forks ends with
the test process.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import ModuleType
from typing import Any, NoReturn, TypedDict

NUMBER = struct.Struct("i")
PATH = os.path.abspath(__file__)


class Job(TypedDict):
    """What a fork runs. arguments: its `sys.argv`."""

    code: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str


class Forking:
    """A process that forks. start: starts it; its argument is the descriptor on which the process listens."""

    def __init__(self, start: Callable[[int], Any]) -> None:
        self._folder = tempfile.TemporaryDirectory(dir="/tmp")
        self.path = os.path.join(self._folder.name, "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.path)
            listener.listen(128)
            self.process = start(listener.fileno())
        self._owner = _connected(self.path)

    def close(self) -> None:
        self._owner.close()
        self.process.kill()
        self.process.wait()
        self._folder.cleanup()


class Fork:
    """A fork, with the methods of `subprocess.Popen` that its users call. Arguments as of `ask`."""

    def __init__(self, path: str, job: Job, descriptors: Mapping[int, int], stdin: Any = None) -> None:
        self.stdin = stdin
        self.returncode: int | None = None
        self._lock = threading.Lock()
        self._status = ask(path, job, descriptors).detach()
        weakref.finalize(self, os.close, self._status)
        self.pid = self._read()

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None and not select.select([self._status], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
        with self._lock:
            if self.returncode is None:
                self.returncode = os.waitstatus_to_exitcode(self._read())
        return self.returncode

    def _read(self) -> int:
        message = os.read(self._status, NUMBER.size)
        assert len(message) == NUMBER.size, "the process that forks has ended: see its output above"
        number: int = NUMBER.unpack(message)[0]
        return number


def ask(path: str, job: Job, descriptors: Mapping[int, int]) -> socket.socket:
    """Asks the process that listens at `path` for a fork; returns the connection.

    descriptors: ours, by their numbers in the fork.
    """
    connection = _connected(path)
    socket.send_fds(connection, [b"\n"], [*descriptors.values()])
    connection.sendall(json.dumps({**job, "numbers": [*descriptors]}).encode())
    connection.shutdown(socket.SHUT_WR)
    return connection


def _connected(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(None)  # whatever socket.setdefaulttimeout is
    connection.connect(path)
    return connection


def main(descriptor: int, preload: str) -> NoReturn:
    """Runs the imports `preload`, and then forks for each job on the listening socket."""
    listener = socket.socket(fileno=descriptor)
    listener.settimeout(None)
    exec(preload, {})
    gc.collect()
    gc.freeze()  # so that forks share it
    _run(_serve(listener))


def _serve(listener: socket.socket) -> str:
    """Forks until the test process ends. Returns in each fork, with the code that it has to run."""
    owner, _ = listener.accept()
    running: dict[int, socket.socket] = {}
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    while True:
        ready, _, _ = select.select([listener, owner, woken], [], [])
        if owner in ready:
            os._exit(0)
        if woken in ready:
            os.read(woken, 4096)
            _report_ends(running)
        if listener not in ready:
            continue
        connection, _ = listener.accept()
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 64)
        with connection.makefile("rb") as file:
            asked = file.read()
        if (pid := _forked(asked)) == 0:
            signal.set_wakeup_fd(-1)
            for each in (listener, owner, connection, *running.values()):
                each.close()
            for number in (woken, wakes):
                os.close(number)
            return _become(json.loads(asked), descriptors)
        if pid is None:
            connection.close()
        else:
            running[pid] = connection
            with suppress(OSError):  # nobody may wait for it
                connection.sendall(NUMBER.pack(pid))
        for number in descriptors:
            os.close(number)


def _forked(asked: bytes) -> int | None:
    """Forks; None if the process that asks was killed before it had sent the whole job, as Ray does."""
    try:
        json.loads(asked)
    except ValueError:
        return None
    return os.fork()


def _report_ends(running: dict[int, socket.socket]) -> None:
    for pid in list(running):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with running.pop(pid) as connection, suppress(OSError):
                connection.sendall(NUMBER.pack(status))


def _become(job: dict[str, Any], descriptors: list[int]) -> str:
    """Makes this process, a fork, one of its own. Returns the code of its job."""
    os.setsid()
    for number in (signal.SIGCHLD, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    numbers = job["numbers"]
    above = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, max(numbers) + 1) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(above, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    tempfile.tempdir = None  # of the other TMPDIR
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = dict.fromkeys(["", *filter(None, paths), *sys.path])
    sys.argv = job["arguments"]
    code: str = job["code"]
    return code


def _run(code: str) -> NoReturn:
    """Runs a program and ends this process as the interpreter does, but leaves its modules to the kernel.

    The interpreter would clear every module, for which a fork copies all of its memory.
    """
    program = sys.modules["__main__"] = ModuleType("__main__")
    status = 1
    try:
        exec(compile(code, "<string>", "exec"), vars(program))
        status = 0
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        else:
            status = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    leave(status)


def leave(status: int) -> NoReturn:
    """Waits for threads, calls what is registered for the end and collects garbage; `sys.exit` would do so, too."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    gc.collect()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file
    main(int(sys.argv[1]), sys.argv[2])
