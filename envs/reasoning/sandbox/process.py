"""A sandbox: a process in namespaces of its own that runs one program on several tests, and ends with the response.

This side starts it, sends tests, reads results with limits on size and time, and kills it. All bytes that it reads are
untrusted. Not covered: the judgement of results (`program_verdict.py`), and the program inside (`program_runner.py`).
"""

from __future__ import annotations

import marshal
import math
import os
import select
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

import psutil

from rl_platform.envs.reasoning.sandbox import program_runner
from rl_platform.envs.reasoning.sandbox.cases import Case
from rl_platform.envs.reasoning.sandbox.isolation import (
    DISK_BYTES,
    ENVIRONMENT,
    FOLDER,
    isolating_command,
    plain_command,
    readable,
    runner_code,
    system_call_filter,
)
from rl_platform.errors import WorkerError

LONGEST_OUTPUT = 2**20  # bytes of a test
START_S = 30.0
SPARE_S = 5.0  # for the runner to report that the time is over
WALL_FACTOR = 3  # a test may take so many times its CPU seconds, because the machine may be busy
ENDED, CRASHED, TIMEOUT, MEMORY, OUTPUT = "ended", "crashed", "timeout", "memory", "output"
_STATUS = {
    program_runner.DONE: ENDED,
    program_runner.CRASHED: CRASHED,
    program_runner.TIMEOUT: TIMEOUT,
    program_runner.MEMORY: MEMORY,
    program_runner.OUTPUT: OUTPUT,
}


@dataclass(frozen=True)
class Limits:
    """cpu_s: CPU seconds of all tests together. memory_bytes: address space of the program."""

    cpu_s: float
    memory_bytes: int


@dataclass(frozen=True)
class Result:
    """The result of one test. status: ENDED (with exit code 0), CRASHED, TIMEOUT, MEMORY or OUTPUT (too long). output:
    what the program printed, or the result of the call as JSON. note: the end of its error output."""

    status: str
    output: bytes = b""
    note: str = ""
    cpu_s: float = 0.0


class Sandbox:
    """Runs `program` test by test. A context manager: at its end no process of the sandbox is left.

    isolated: in namespaces, with Landlock and seccomp; else only with resource limits. Not a
    `runtime.child.Child`: the process inherits neither the environment nor other descriptors. Raises WorkerError at
    construction if the sandbox cannot be made, which is never a program's fault.
    """

    def __init__(self, program: str, limits: Limits, *, isolated: bool) -> None:
        self._left_s, self._wall_end = limits.cpu_s, 0.0
        self._folder = None if isolated else tempfile.TemporaryDirectory(prefix="program-", ignore_cleanup_errors=True)
        self._process = subprocess.Popen(
            isolating_command() if isolated else plain_command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            cwd="/" if self._folder is None else self._folder.name,
            env={} if isolated else ENVIRONMENT,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._stdin, self._stdout, self._stderr = self._process.stdin, self._process.stdout, self._process.stderr
        setup = {
            "program": program,
            "isolated": isolated,
            "folder": FOLDER if self._folder is None else self._folder.name,
            "reads": [*readable(), "/dev/zero", "/dev/urandom"],
            "filter": system_call_filter().hex() if isolated else "",
            "memory_bytes": limits.memory_bytes,
            "disk_bytes": DISK_BYTES,
            "longest_output": LONGEST_OUTPUT,
        }
        try:
            self._send(runner_code() + _frame(setup), START_S)
            self._read(1, time.monotonic() + START_S)
        except OSError as error:
            self._process.kill()
            said = self._errors() or str(error)
            self.close()
            raise WorkerError(f"the sandbox does not start: {said}") from error
        self._wall_end = time.monotonic() + WALL_FACTOR * limits.cpu_s

    def run(self, case: Case) -> Result:
        """Runs one test. After a result with the status TIMEOUT there is no time for others."""
        wall_s = self._wall_end - time.monotonic()
        if self._left_s <= 0 or wall_s <= 0:
            return Result(TIMEOUT)
        end = time.monotonic() + program_runner.CONFINED_S + wall_s + SPARE_S
        try:
            test = case.question() | {"cpu_s": max(math.ceil(self._left_s), 1), "wall_s": wall_s}
            self._send(_frame(test), wall_s)
            head = self._read(program_runner.REPLY.size, end)
            code, cpu_s, length, note_length = program_runner.REPLY.unpack(head)
            if length > LONGEST_OUTPUT or note_length > program_runner.LONGEST_NOTE:
                raise OSError("a frame of the sandbox is too long")
            output, note = self._read(length, end), self._read(note_length, end)
        except TimeoutError:
            self._left_s = 0.0
            return Result(TIMEOUT)
        except OSError:  # the sandbox is gone, as after a lack of memory
            self._left_s = 0.0
            return Result(CRASHED, note="the sandbox was killed")
        shown = note.decode(errors="replace").strip()
        if code not in _STATUS:
            raise WorkerError(f"the sandbox could not confine the program: {shown} {self._errors()}")
        self._left_s = 0.0 if code == program_runner.TIMEOUT else self._left_s - (cpu_s if cpu_s > 0 else 0.0)
        return Result(_STATUS[code], output, shown, cpu_s)

    def close(self) -> None:
        """Ends every process of the sandbox and waits for that. May be called twice."""
        process = self._process
        with suppress(OSError):
            self._stdin.close()  # process 1 ends by that, and the kernel ends its namespace
        try:
            process.wait(SPARE_S if process.poll() is None and self._left_s else 0.1)
        except subprocess.TimeoutExpired:
            with suppress(psutil.Error):  # it has ended
                for child in psutil.Process(process.pid).children():  # process 1, which may be suspended
                    child.kill()
            process.kill()  # bubblewrap's process
            process.wait()
        with suppress(OSError):  # the end of this pipe is the end of process 1
            while self._read(1, time.monotonic() + SPARE_S):
                pass
        self._stdout.close()
        self._stderr.close()
        if self._folder is not None:
            self._folder.cleanup()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _errors(self) -> str:
        """Returns what bubblewrap or the runner wrote before it ended."""
        descriptor = self._stderr.fileno()
        if not select.select([descriptor], [], [], 1.0)[0]:
            return ""
        return os.read(descriptor, 4096).decode(errors="replace").strip()[-500:]

    def _send(self, message: bytes, seconds: float) -> None:
        """Raises OSError if the sandbox is gone, TimeoutError if it does not read."""
        descriptor = self._stdin.fileno()
        os.set_blocking(descriptor, False)
        data, end = memoryview(message), time.monotonic() + seconds
        while data:
            if not select.select([], [descriptor], [], max(end - time.monotonic(), 0.0))[1]:
                raise TimeoutError
            data = data[os.write(descriptor, data) :]

    def _read(self, size: int, end: float) -> bytes:
        """Raises OSError at the end of the stream, TimeoutError after `end`."""
        descriptor, parts = self._stdout.fileno(), bytearray()
        while len(parts) < size:
            if not select.select([descriptor], [], [], max(end - time.monotonic(), 0.0))[0]:
                raise TimeoutError
            part = os.read(descriptor, size - len(parts))
            if not part:
                raise OSError("the sandbox ended")
            parts += part
        return bytes(parts)


def _frame(message: dict[str, object]) -> bytes:
    """Returns a message as bytes. The sandbox runs the same interpreter, whose own format needs no modules."""
    body = marshal.dumps(message)
    return program_runner.LENGTH.pack(len(body)) + body
