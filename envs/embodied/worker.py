"""A process that steps some of the environments: its main loop, and the handle that the learner's process holds.

The process is started with a command line of its own rather than by multiprocessing, so it does not import the user's
main module (nor torch) again. A message is one byte, followed by a framed pickle where there is more to say; arrays
travel in shared memory. When the other side is gone the process ends, even in the middle of a step.
"""

from __future__ import annotations

import mmap
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any

from rl_platform.envs.embodied.block import EnvBlock, EnvFailure
from rl_platform.envs.embodied.buffers import Buffers
from rl_platform.envs.embodied.spaces import EnvDescription, EnvSpaces
from rl_platform.errors import Deadline, WorkerDied, WorkerError
from rl_platform.standard_streams import never_fail

_STEP, _CALL = b"s", b"c"
_DONE, _RESULT, _FAILED = b"d", b"r", b"f"
START_TIMEOUT_S = 120.0
_EXIT_GRACE_S = 2.0
# more threads than one would compete with the other workers for cores
_THREAD_LIMITS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "LP_NUM_THREADS")  # the last: Mesa's


class EnvWorker:
    """The learner's side of one worker process, which steps environments first..last-1."""

    def __init__(
        self,
        index: int,
        first: int,
        last: int,
        env_id: str,
        memory_fd: int,
        cpus: set[int],
        variables: dict[str, str],
    ) -> None:
        """Start the process. `cpus` it may run on, with a thread each (empty: one thread on any of them); `variables`
        are added to its environment."""
        self._name = f"environment worker {index}"
        self._index = index
        self._first = first
        self._last = last
        self._env_id = env_id
        self._threads = max(len(cpus), 1)
        self._connection, theirs = Pipe()
        environment = {**os.environ, **dict.fromkeys(_THREAD_LIMITS, "1"), **variables}
        environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        code = f"from {__name__} import main; main({theirs.fileno()}, {memory_fd})"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=(theirs.fileno(), memory_fd),
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # signals to the process group are left to the learner, which may still save
        )
        theirs.close()
        if cpus:
            os.sched_setaffinity(self.process.pid, cpus)
        self._poller = select.poll()
        self._fd = self._connection.fileno()
        self._poller.register(self._fd, select.POLLIN)

    def start(
        self,
        description: EnvDescription,
        spec: bytes,
        spaces: EnvSpaces,
        num_envs: int,
        render_mode: str | None,
        restarts: int,
        numbers: Sequence[int],
    ) -> None:
        """Have the environments built; `wait` tells when they are. `numbers`: of all `num_envs` in the run."""
        rows = (self._first, self._last, self._index)
        own = list(numbers[self._first : self._last])
        self._send(
            b"", pickle.dumps((description, spec, spaces, num_envs, *rows, render_mode, self._threads, restarts, own))
        )

    def send_step(self) -> None:
        self._send(_STEP)

    def command(self, method: str, *arguments: Any) -> None:
        """Call a method of the worker's EnvBlock; `wait` returns its result."""
        self._send(_CALL, pickle.dumps((method, arguments)))

    def _send(self, message: bytes, payload: bytes | None = None) -> None:
        try:
            os.write(self._fd, message)
            if payload is not None:
                self._connection.send_bytes(payload)
        except OSError as error:
            raise self._died("the time between commands", self._first) from error

    def wait(self, doing: str, timeout_s: float, buffers: Buffers, since: float | None = None) -> Any:
        """Result of the command sent last. Raises Deadline, WorkerDied, or WorkerError with the remote traceback.

        since: when the time began to count (time.monotonic); None: now.
        """
        left = timeout_s if since is None else max(since + timeout_s - time.monotonic(), 0.0)
        if not self._poller.poll(left * 1000):
            env = int(buffers.busy[self._index])
            raise Deadline(
                f"environment {env} ({self._env_id}) in {self._name} (pid {self.process.pid}) did not "
                f"finish its {doing} within {timeout_s:g} s" + (" (env.step_timeout_s)" if doing != "start" else "")
            )
        try:
            reply = os.read(self._fd, 1)
            if reply == _DONE:
                return None
            payload = self._connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise self._died(doing, int(buffers.busy[self._index])) from error
        if reply == _RESULT:
            return pickle.loads(payload)
        env_index, doing, details = pickle.loads(payload)
        raise failure(env_index, self._env_id, doing, details)

    def _died(self, doing: str, env_index: int) -> WorkerDied:
        try:
            code: int | None = self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            code = None
        how = "closed its connection" if code is None else f"exit code {code}" if code >= 0 else _signal_name(-code)
        return WorkerDied(
            f"{self._name} (pid {self.process.pid}) died ({how}) during {doing}, "
            f"at environment {env_index} of {self._first}..{self._last - 1} ({self._env_id})"
        )

    def kill(self) -> None:
        """End the process at once, whatever it is at."""
        self._connection.close()
        self.process.kill()
        self.process.wait()

    def hang_up(self) -> None:
        """Tell the process to end: it sees the end of its connection."""
        self._connection.close()

    def reap(self) -> None:
        """Wait for the process to end, by force after a grace."""
        try:
            self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def cpu_count() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_shares(num_workers: int) -> list[set[int]]:
    """Disjoint sets of this process's CPUs, one per worker; empty where there are too few, and on macOS.

    Workers wake up many times a millisecond. A scheduler that prefers the waker's CPU runs them one after the other
    unless each has CPUs of its own.
    """
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return [set(cpus[index::num_workers]) if len(cpus) >= num_workers else set() for index in range(num_workers)]


def failure(env_index: int, env_id: str, doing: str, details: str) -> WorkerError:
    """The error for an environment that raised; `details` is its traceback."""
    return WorkerError(f"environment {env_index} ({env_id}) failed in {doing}:\n{details}")


def _signal_name(number: int) -> str:
    try:
        return f"killed by {signal.Signals(number).name}"
    except ValueError:
        return f"killed by signal {number}"


def main(connection_fd: int, memory_fd: int) -> None:
    """Main loop of the worker process: obey until the learner's side of the connection closes."""
    never_fail()  # an environment may print
    connection = Connection(connection_fd)
    threading.Thread(target=_exit_when_abandoned, args=(connection_fd,), daemon=True).start()
    try:
        block = _build(connection, memory_fd)
        if block is not None:
            _serve(connection, block)
            block.close()
    except (EOFError, ConnectionError):  # the learner's process has ended or hung up
        pass


def _build(connection: Connection, memory_fd: int) -> EnvBlock | None:
    arguments = pickle.loads(connection.recv_bytes())
    description, spec, spaces, num_envs, *where, render_mode, threads, restarts, numbers = arguments
    memory = mmap.mmap(memory_fd, Buffers.size(num_envs, spaces))
    os.close(memory_fd)
    try:
        buffers = Buffers(num_envs, spaces, memory)
        built = description, pickle.loads(spec), spaces, buffers
        block = EnvBlock(*built, *where, render_mode, threads, restarts=restarts, numbers=numbers)
    except Exception:
        _reply(connection, _FAILED, (where[0], "start", traceback.format_exc()))
        return None
    _reply(connection, _DONE)
    return block


def _serve(connection: Connection, block: EnvBlock) -> None:
    fd = connection.fileno()
    while message := os.read(fd, 1):
        try:
            if message == _STEP:
                block.step()
                _reply(connection, _DONE)
            else:
                method, arguments = pickle.loads(connection.recv_bytes())
                _reply(connection, _RESULT, getattr(block, method)(*arguments))
        except EnvFailure as error:
            _reply(connection, _FAILED, (error.env_index, error.doing, error.details))


def _reply(connection: Connection, kind: bytes, content: Any = None) -> None:
    os.write(connection.fileno(), kind)
    if kind != _DONE:
        connection.send_bytes(pickle.dumps(content))


def _exit_when_abandoned(connection_fd: int) -> None:
    """End this process if the other side hangs up while an environment does not return."""
    poller = select.poll()
    poller.register(connection_fd, 0)  # hang-ups are reported unasked
    poller.poll()
    time.sleep(_EXIT_GRACE_S)
    os._exit(1)
