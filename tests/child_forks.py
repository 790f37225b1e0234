"""Child processes of the platform as forks of processes that have imported for them. No test by itself.

In the block of `forked_children`, `rl_platform.runtime.child.Child` starts `python -c CODE` as a fork of a process with
the same interpreter and the same environment variables, which has imported what the child needs. Such a process starts
at the first child and ends with the block. A child has its own session, descriptors and search paths, as
without forks. Children of other processes, as those of Ray, start as usual.
"""

from __future__ import annotations

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
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import ModuleType, SimpleNamespace
from typing import Any

NUMBER = struct.Struct("i")
WORDS = struct.Struct("q")
# Variables in which a child may differ from the process that forks. A run in this process sets the last ones.
OTHERS = ("PYTHONPATH", "PYTEST_CURRENT_TEST", "PYTHONBREAKPOINT", "RAY_CLIENT_MODE", "RL_PLATFORM_ACCELERATE")


class ForkedProcess:
    """A fork, with the methods of `subprocess.Popen` that `Child` calls."""

    def __init__(self, forking: socket.socket, job: dict[str, Any], descriptors: Sequence[int], stdin: Any) -> None:
        self.stdin = stdin
        self.returncode: int | None = None
        self._lock = threading.Lock()
        ours, theirs = socket.socketpair()
        with theirs:
            text = json.dumps(job).encode()
            socket.send_fds(forking, [WORDS.pack(len(text))], [theirs.fileno(), *descriptors])
            forking.sendall(text)
        ours.setblocking(True)  # whatever socket.setdefaulttimeout is
        self._status = ours.detach()
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


class Forks:
    """Processes that fork, by interpreter and environment."""

    def __init__(self, programs: str, preload: str, others: Sequence[str], popen: Any) -> None:
        self._programs, self._preload, self._usual, self._lock = programs, preload, popen, threading.Lock()
        self._others = {*OTHERS, *others}
        self._forking: dict[str, tuple[subprocess.Popen[bytes], socket.socket]] = {}

    def popen(self, command: Sequence[str], **options: Any) -> Any:
        """Starts a child with the options that `Child` gives."""
        python, option, code, *arguments = command
        if self._programs not in code:
            return self._usual(command, **options)
        assert option == "-c"
        assert options.pop("start_new_session")
        return self._fork(python, code, arguments, **options)

    def _fork(
        self,
        python: str,
        code: str,
        arguments: list[str],
        env: dict[str, str],
        stdin: int,
        stdout: Any,
        stderr: Any,
        pass_fds: Sequence[int],
    ) -> ForkedProcess:
        output = [number if file is None else file.fileno() for number, file in ((1, stdout), (2, stderr))]
        theirs, kept = os.pipe() if stdin == subprocess.PIPE else (os.open(os.devnull, os.O_RDONLY), None)
        job = {"code": code, "arguments": arguments, "environment": env, "folder": os.getcwd()}
        job["numbers"] = [0, 1, 2, *pass_fds]
        try:
            pipe = None if kept is None else os.fdopen(kept, "wb", 0)
            with self._lock:
                return ForkedProcess(self._process(python, env), job, [theirs, *output, *pass_fds], pipe)
        finally:
            os.close(theirs)

    def _process(self, python: str, env: dict[str, str]) -> socket.socket:
        key = json.dumps([python, sorted(item for item in env.items() if item[0] not in self._others)])
        if key not in self._forking:
            ours, theirs = socket.socketpair()
            with theirs:
                command = [python, "-W", "ignore", __file__, str(theirs.fileno()), self._preload]
                process = subprocess.Popen(
                    command, env=env, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
                )
            self._forking[key] = process, ours
        return self._forking[key][1]

    def close(self) -> None:
        for process, connection in self._forking.values():
            connection.close()
            process.kill()
            process.wait()


@contextmanager
def forked_children(programs: str, preload: str, others: Sequence[str] = ()) -> Iterator[None]:
    """programs: a part of the code of the children that are forks. preload: code with the imports that they need.

    others: further variables in which a child may differ from the process that forks. No import may read them.
    """
    import pytest  # here, as every process that forks runs this file

    import rl_platform.runtime.child as patched

    forks = Forks(programs, preload, others, patched.subprocess.Popen)
    options = {name: getattr(subprocess, name) for name in ("PIPE", "DEVNULL", "TimeoutExpired")}
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(patched, "subprocess", SimpleNamespace(Popen=forks.popen, **options))
            yield
    finally:
        forks.close()


def serve(connection: socket.socket) -> str:
    """Forks for each job until the other end closes. Returns in each fork, with the code that it has to run."""
    running: dict[int, socket.socket] = {}
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    while True:
        ready, _, _ = select.select([connection, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _report_ends(running)
        if connection not in ready:
            continue
        head, descriptors, _, _ = socket.recv_fds(connection, WORDS.size, 64)
        if not head:
            os._exit(0)
        text = b""
        while len(text) < WORDS.unpack(head)[0]:
            text += connection.recv(1 << 16)
        job, status = json.loads(text), socket.socket(fileno=descriptors[0])
        if (pid := os.fork()) == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for descriptor in (woken, wakes, connection.detach(), status.detach()):
                os.close(descriptor)
            for one in running.values():
                one.close()
            return _become(job, descriptors[1:])
        for descriptor in descriptors[1:]:
            os.close(descriptor)
        running[pid] = status
        status.sendall(NUMBER.pack(pid))


def _report_ends(running: dict[int, socket.socket]) -> None:
    for pid in list(running):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with running.pop(pid) as connection, suppress(OSError):  # nobody may wait for it any more
                connection.sendall(NUMBER.pack(status))


def _become(job: dict[str, Any], descriptors: list[int]) -> str:
    """This process, a fork, gets the session, descriptors, folder, environment and search paths of a child."""
    os.setsid()
    numbers = job["numbers"]
    high = [_moved(descriptor, max(numbers) + 1) for descriptor in descriptors]  # above every number that is given
    for descriptor, number in zip(high, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    tempfile.tempdir = None  # of the other TMPDIR
    sys.path[:] = list(
        dict.fromkeys(["", *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *sys.path])
    )
    sys.argv = ["-c", *job["arguments"]]
    code: str = job["code"]
    return code


def _moved(descriptor: int, least: int) -> int:
    import fcntl

    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD, least)
    os.close(descriptor)
    return moved


if __name__ == "__main__":
    import gc

    theirs = socket.socket(fileno=int(sys.argv[1]))
    preload, sys.argv = sys.argv[2], ["-c"]
    del sys.path[0]  # the folder of this file
    exec(preload, {})
    gc.collect()
    gc.freeze()  # so that forks share it
    code = serve(theirs)
    main = sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(code, "<string>", "exec"), vars(main))
