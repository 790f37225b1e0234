"""The learner's handle of a process that steps some of the environments (`worker_process`).

A message is one byte, followed by a framed pickle where it has content; arrays travel in shared memory. When the
learner's process has ended the worker ends too, even in the middle of a step.
"""

from __future__ import annotations

import os
import pickle
import select
import time
from collections.abc import Sequence
from typing import Any

from rl_platform.envs.embodied.buffers import Buffers
from rl_platform.envs.embodied.spaces import EnvDescription, EnvSpaces
from rl_platform.envs.embodied.worker_process import CALL, DONE, RESULT, STEP
from rl_platform.errors import Deadline, WorkerDied, WorkerError
from rl_platform.runtime.child import Child, Death

START_TIMEOUT_S = 120.0
_WORKER = "from rl_platform.envs.embodied.worker_process import main; main()"
# more threads than one would compete with the other workers for cores
_THREAD_LIMITS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "LP_NUM_THREADS")  # the last: Mesa's


class EnvWorker:
    """The learner's side of one worker process, which steps environments first..last-1."""

    def __init__(
        self, index: int, first: int, last: int, env_id: str, memory_fd: int, cpus: set[int], variables: dict[str, str]
    ) -> None:
        """Start the process. `cpus` it may run on, with a thread each (empty: one thread on any of them); `variables`
        are added to its environment."""
        self._name = f"environment worker {index}"
        self._index = index
        self._first = first
        self._last = last
        self._env_id = env_id
        self._threads = max(len(cpus), 1)
        environment = dict.fromkeys(_THREAD_LIMITS, "1") | variables
        self._child = Child(_WORKER, Death.HANG_UP, [memory_fd], environment, [memory_fd])
        self._connection = self._child.connection()
        if cpus:
            os.sched_setaffinity(self.pid, cpus)
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
        self._send(STEP)

    def command(self, method: str, *arguments: Any) -> None:
        """Call a method of the worker's EnvBlock; `wait` returns its result."""
        self._send(CALL, pickle.dumps((method, arguments)))

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
        """End the process at once, whatever it is at."""
        self._connection.close()
        self._child.kill()

    def hang_up(self) -> None:
        """Close the connection, at which the process ends."""
        self._connection.close()

    def reap(self) -> None:
        """Wait for the process to end, by force after a grace."""
        self._child.end(1.0)


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
