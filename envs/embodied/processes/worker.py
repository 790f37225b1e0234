"""The learner's handle of a process that steps some of the environments (`worker_process`).

A message is one byte. A pickle with its length follows if the message has content; arrays are in shared memory. The
worker process ends as soon as the learner's process has ended, even during a step.
"""

from __future__ import annotations

import os
import pickle
import select
import time
from typing import Any

from rl_platform.envs.embodied.block import failure
from rl_platform.envs.embodied.buffers import Buffers
from rl_platform.envs.embodied.processes.interpreter import executable, interpreter_code
from rl_platform.envs.embodied.processes.notices import variables_of_worker
from rl_platform.envs.embodied.processes.worker_process import CALL, DONE, RESULT, STEP
from rl_platform.errors import Deadline, WorkerDied
from rl_platform.runtime.child import Child, Death
from rl_platform.user_code import files_behind

START_TIMEOUT_S = 120.0
_PROCESSES = "rl_platform.envs.embodied.processes"
_WORKER = f"from {_PROCESSES}.notices import hide_shown; hide_shown(); "
_WORKER += f"from {_PROCESSES}.worker_process import main; main()"
# more threads than one would compete with the other workers for cores
_THREAD_LIMITS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "LP_NUM_THREADS")  # the last: Mesa's


class EnvWorker:
    """One worker process, which steps environments first..last-1."""

    def __init__(
        self,
        index: int,
        rows: tuple[int, int],
        env_id: str,
        setup: bytes,
        memory_fd: int,
        cpus: set[int],
        variables: dict[str, str],
        python: str | None = None,
    ) -> None:
        """Starts the process, which builds its environments; `wait("start", ...)` waits until they are built.

        rows: (first, last). setup: a pickled EnvSetup. cpus: the CPUs of the process, with one thread each; empty: one
        thread on any CPU. variables: additional environment variables. python: of `env.python`.
        """
        self._name, self._index, self._env_id = f"environment worker {index}", index, env_id
        self._first, self._last = rows
        environment = dict.fromkeys(_THREAD_LIMITS, "1") | variables_of_worker() | variables
        code, other = (_WORKER, None) if python is None else (interpreter_code(_WORKER), executable(python))
        self._child = Child(code, Death.HANG_UP, [memory_fd], environment, [memory_fd], python=other)
        self._connection = self._child.connection()
        if cpus:
            os.sched_setaffinity(self.pid, cpus)
        self._poller = select.poll()
        self._fd = self._connection.fileno()
        self._poller.register(self._fd, select.POLLIN)
        self._send(b"", pickle.dumps((files_behind(setup), setup, *rows, index, max(len(cpus), 1))))

    def send_step(self) -> None:
        self._send(STEP)

    def command(self, method: str, *arguments: object) -> None:
        """Calls a method of the worker's EnvBlock; `wait` returns its result."""
        self._send(CALL, pickle.dumps((method, arguments)))

    def _send(self, message: bytes, payload: bytes | None = None) -> None:
        try:
            os.write(self._fd, message)
            if payload is not None:
                self._connection.send_bytes(payload)
        except OSError as error:
            raise self._died("the time between commands", self._first) from error

    def wait(self, doing: str, timeout_s: float, buffers: Buffers, since: float | None = None) -> Any:
        """Returns the result of the latest command. Raises Deadline, WorkerDied, or WorkerError with its traceback.

        since: the start of the timeout (time.monotonic); None: now.
        """
        left = timeout_s if since is None else max(since + timeout_s - time.monotonic(), 0.0)
        if not self._poller.poll(left * 1000):
            env = int(buffers.busy[self._index])
            raise Deadline(
                f"environment {env} ({self._env_id}) in {self._name} (pid {self.pid}) did not "
                f"finish its {doing} within {timeout_s:g} s" + (" (env.step_timeout_s)" if doing != "start" else "")
            )
        try:
            reply = os.read(self._fd, 1)
            if reply == DONE:
                return None
            payload = self._connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise self._died(doing, int(buffers.busy[self._index])) from error
        if reply == RESULT:
            return pickle.loads(payload)
        env_index, doing, details = pickle.loads(payload)
        raise failure(env_index, self._env_id, doing, details)

    def _died(self, doing: str, env_index: int) -> WorkerDied:
        return WorkerDied(
            f"{self._name} (pid {self.pid}) died ({self._child.exit_reason()}) during {doing}, "
            f"at environment {env_index} of {self._first}..{self._last - 1} ({self._env_id})"
        )

    @property
    def pid(self) -> int:
        return self._child.pid

    def kill(self) -> None:
        """Kills the process at once."""
        self.hang_up()
        self._child.kill()

    def hang_up(self) -> None:
        """Closes the connection; the process then ends."""
        self._connection.close()

    def reap(self) -> None:
        """Waits one second for the end of the process, then kills it."""
        self._child.end(1.0)


def cpu_shares(num_workers: int) -> list[set[int]]:
    """Returns disjoint sets of this process's CPUs, one per worker; empty sets if there are too few, and on macOS.

    Workers wake up many times per millisecond. A scheduler that prefers the CPU of the waking process would run workers
    without CPUs of their own one after the other.
    """
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return [set(cpus[index::num_workers]) if len(cpus) >= num_workers else set() for index in range(num_workers)]
