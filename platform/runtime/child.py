"""Child processes: a clean start, a private pipe, death with the parent, an end with a deadline.

A child runs a string of code in a new interpreter, so it imports neither the user's main module nor what the parent has
imported. Its end of the pipe is an inherited socket: no other process can open it. It leads its own session, so signals
of the terminal reach the parent only. Killing the child also kills the processes that it started.

Not covered: the messages on the pipe.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import Enum
from multiprocessing.connection import Connection
from typing import BinaryIO

_AT_HANG_UP = """
import os, select, sys, threading, time
def leave():
    poller = select.poll()
    poller.register(int(sys.argv[1]), 0)  # hang-ups are always reported
    poller.poll()
    time.sleep(2)
    os._exit(1)
threading.Thread(target=leave, daemon=True).start()
"""
_AT_END_OF_THREAD = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() != int(sys.argv.pop(2)):
    os._exit(1)
"""
_BY_GUARD = """
import os, shutil, signal, sys
scratch = sys.argv.pop(2)
if os.fork() == 0:
    os.close(int(sys.argv[1]))
    os.read(0, 1)  # until no process holds the other end of this pipe
    if scratch:  # first: the signal ends the guard, too
        shutil.rmtree(scratch, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)
"""


class Death(Enum):
    """The way in which a child dies with its parent, however that ends."""

    HANG_UP = "the child ends 2 s after the pipe is closed, unless native code holds its interpreter lock"
    THREAD = "Linux: the kernel kills the child with the parent's thread that started it, whatever the child does"
    GUARD = "a process beside the child kills the child and all that it started"
    NEVER = "the child outlives its parent and has to end by itself"


_PRELUDES = {Death.HANG_UP: _AT_HANG_UP, Death.THREAD: _AT_END_OF_THREAD, Death.GUARD: _BY_GUARD, Death.NEVER: ""}


class Child:
    """Starts `python -c code DESCRIPTOR *arguments`; DESCRIPTOR is that of the child's end of the pipe.

    environment: variables added to those of this process; a PYTHONPATH precedes this process's search paths; None
    removes a variable. descriptors: files that stay open in the child. output: file of stdout and stderr, by default
    those of this process. python: another interpreter, with its own search paths and those of `environment` only.
    scratch: a folder that the guard removes if this process dies; kill() leaves it.
    """

    def __init__(
        self,
        code: str,
        death: Death,
        arguments: Sequence[object] = (),
        environment: Mapping[str, str | None] | None = None,
        descriptors: Sequence[int] = (),
        output: BinaryIO | None = None,
        python: str | None = None,
        scratch: str = "",
    ) -> None:
        assert death is Death.GUARD or not scratch
        self._death = death
        self.socket, theirs = socket.socketpair()
        for end in (self.socket, theirs):
            end.setblocking(True)  # whatever socket.setdefaulttimeout is
        facts: list[object] = [os.getpid()] if death is Death.THREAD else [scratch] if death is Death.GUARD else []
        values = map(str, (theirs.fileno(), *facts, *arguments))
        self._process = subprocess.Popen(
            [python or sys.executable, "-c", _PRELUDES[death] + code, *values],
            env=_environment(environment or {}, () if python else sys.path),
            stdin=subprocess.PIPE if death is Death.GUARD else subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(theirs.fileno(), *descriptors),
            start_new_session=True,
        )
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether one of the methods below has noticed the end of the child."""
        return self._process.returncode is not None

    def connection(self) -> Connection:
        """Returns a Connection, which owns the pipe from then on."""
        return Connection(self.socket.detach())

    def ends_within(self, seconds: float) -> bool:
        """Waits at most `seconds` for the child's end, and returns whether it has ended.

        With a guard, the end of the child also kills its children.
        """
        noticed = self.ended
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        if self.ended and not noticed and self._death is Death.GUARD:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)  # the guard may have been killed
        if self.ended:
            self._release()
        return self.ended

    def exit_reason(self, seconds: float = 1.0) -> str:
        """Returns `exit code 3`, `killed by SIGKILL`, or `closed its connection` for a child that does not end."""
        if not self.ends_within(seconds):
            return "closed its connection"
        code: int = self._process.returncode
        if code >= 0:
            return f"exit code {code}"
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"

    def end(self, seconds: float) -> None:
        """Kills the child unless it ends within `seconds`. Close the pipe first: the child ends at the hang-up."""
        if not self.ends_within(seconds):
            self.kill()

    def kill(self) -> None:
        """Kills the child and its children, and closes the pipe. A second call does nothing, as ids are reused."""
        if not self.ended:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
        self._release()

    def _release(self) -> None:
        self.socket.close()
        if self._process.stdin is not None:
            self._process.stdin.close()  # the guard kills the remaining processes


def _environment(added: Mapping[str, str | None], search_paths: Sequence[str]) -> dict[str, str]:
    paths = [added.get("PYTHONPATH"), *(path or os.getcwd() for path in search_paths)]
    variables = {**os.environ, **added, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    return {name: value for name, value in variables.items() if value is not None}
