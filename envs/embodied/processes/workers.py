"""The worker processes that step environments, and replacements for those that hang or die.

The step in which a worker fails ends within its deadline, and the episodes of the worker's environments end as invalid.
The next step is invalid too, because its actions were chosen before the new first observations existed.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import tempfile
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import cloudpickle
import numpy as np

from rl_platform.envs.embodied.buffers import Buffers
from rl_platform.envs.embodied.descriptions import EnvSetup
from rl_platform.envs.embodied.processes.worker import START_TIMEOUT_S, EnvWorker, cpu_shares
from rl_platform.errors import Deadline, WorkerDied

_current_cpu = getattr(ctypes.CDLL(None), "sched_getcpu", lambda: -1)  # macOS has no such function
logger = logging.getLogger(__name__)


class EnvWorkers:
    """Worker w steps environments bounds[w]..bounds[w+1]-1. Raises after `setup.restarts` failures.

    Every method may raise WorkerDied, Deadline (both name environment and worker) or WorkerError with an environment's
    traceback. `seed`: of the first environment, from which seeds of replacements are derived.
    """

    def __init__(
        self, setup: EnvSetup, bounds: Sequence[int], step_timeout_s: float, variables: Mapping[str, str]
    ) -> None:
        """Starts the processes; `wait_for_start` waits until they are ready."""
        self._variables, self._bounds, self._timeout_s = dict(variables), bounds, step_timeout_s
        self._env_id, self._restarts, self._setup = setup.description.id, setup.restarts, cloudpickle.dumps(setup)
        self._python = setup.description.python
        self.seed = 0
        size = Buffers.size(bounds[-1], setup.spaces)
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        # without a name, so that no file is left if a process is killed
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - replacements map it too
        self._file.truncate(size)
        self.buffers = Buffers(bounds[-1], setup.spaces, mmap.mmap(self._file.fileno(), size))
        self._cpus = cpu_shares(len(bounds) - 1)
        self._members: list[EnvWorker] = []
        self._starting: set[int] = set()
        self._replaced: set[int] = set()  # workers whose first observations were not returned yet
        self._close = weakref.finalize(self, _shut_down, self._members)
        for index in range(len(bounds) - 1):
            self._members.append(self._start(index))

    @property
    def pids(self) -> list[int]:
        return [member.pid for member in self._members]

    def unseen(self) -> list[int]:
        """Returns the environments of replaced workers whose first observations no step has returned yet."""
        return [env for index in sorted(self._replaced) for env in range(*self._bounds[index : index + 2])]

    def wait_for_start(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        for member in self._members:
            member.wait("start", max(deadline - time.monotonic(), 0.0), self.buffers)

    def send_step(self, indices: Iterable[int]) -> None:
        """Starts a step of these workers with the actions in the buffers.

        The worker on this thread's own CPU is the last: it takes the CPU at once, and the others would wait for it.
        """
        here = _current_cpu()
        for index in sorted(indices, key=lambda index: here in self._cpus[index]):
            if index not in self._replaced:
                try:
                    self._members[index].send_step()
                except WorkerDied as error:
                    self._replace(index, error)

    def finish_step(self, indices: Iterable[int]) -> None:
        """Waits up to `step_timeout_s` until the step of these workers has its results in the buffers."""
        began = time.monotonic()
        for index in indices:
            if index in self._replaced:
                self._join(index)
                self._replaced.discard(index)
                self._invalidate(index)
                continue
            try:
                self._members[index].wait("step", self._timeout_s, self.buffers, began)
            except (Deadline, WorkerDied) as error:
                self._replace(index, error)
                self._invalidate(index)

    def call(self, method: str, *per_env: Sequence[object]) -> list[object]:
        """Calls a method of every EnvBlock with its part of each list and returns the joined results."""
        for index in sorted(self._starting):
            self._join(index)
        if method != "save":  # all observations are replaced
            self._replaced.clear()
        given = [[values[first:last] for values in per_env] for first, last in pairwise(self._bounds)]
        dead: dict[int, WorkerDied] = {}
        for index, values in enumerate(given):
            try:
                self._members[index].command(method, *values)
            except WorkerDied as error:
                dead[index] = error
        began, parts = time.monotonic(), []
        for index, values in enumerate(given):
            try:
                if index in dead:
                    raise dead[index]
                parts.append(self._members[index].wait(method, self._timeout_s, self.buffers, began))
            except WorkerDied as error:
                parts.append(self._repeat(index, error, method, values))
        return [value for part in parts for value in part or ()]

    def render(self) -> np.ndarray:
        """Returns a frame of the first environment, [height,width,3] uint8."""
        for index in sorted(self._starting):
            self._join(index)
        self._members[0].command("render")
        frame: np.ndarray = self._members[0].wait("render", self._timeout_s, self.buffers)
        return frame

    def close(self) -> None:
        """Ends the processes. May be called twice."""
        self._close()
        self._file.close()

    def _start(self, index: int) -> EnvWorker:
        rows = self._bounds[index], self._bounds[index + 1]
        process = self._file.fileno(), self._cpus[index], self._variables
        return EnvWorker(index, rows, self._env_id, self._setup, *process, self._python)

    def _replace(self, index: int, error: Deadline | WorkerDied) -> None:
        """Starts another process in place of one that failed. Raises `error` if no restarts are left."""
        failures, rows = self.buffers.failures, slice(*self._bounds[index : index + 2])
        count = int(failures.sum())
        if count >= self._restarts:
            raise error
        logger.warning("%s; its environments are replaced, restarts left: %d", error, self._restarts - count - 1)
        failures[max(int(self.buffers.busy[index]), rows.start)] += 1  # 0 before its first step
        self._members[index].kill()
        last_seen = self.buffers.observations[rows]  # a killed worker may have left invalid numbers
        self.buffers.final_observations[rows] = np.nan_to_num(last_seen, posinf=0.0, neginf=0.0)
        self.buffers.observations[rows] = self.buffers.final_observations[rows]
        self._start_again(index, [self.seed, count])

    def _start_again(self, index: int, entropy: Sequence[int]) -> None:
        """Starts another process, whose environments begin new episodes."""
        rows = slice(*self._bounds[index : index + 2])
        self._members[index] = self._start(index)
        seeds = np.random.SeedSequence(entropy).generate_state(self._bounds[-1])[rows].tolist()
        self._members[index].command("reset", seeds)
        self._starting.add(index)
        self._replaced.add(index)

    def _repeat(self, index: int, error: WorkerDied, method: str, values: Sequence[object]) -> list[object] | None:
        """Returns the result of the call on a replacement for a worker that died before or during it."""
        self._replace(index, error)
        self._join(index)
        if method != "save":
            self._replaced.discard(index)
        self._members[index].command(method, *values)
        result: list[object] | None = self._members[index].wait(method, self._timeout_s, self.buffers)
        return result

    def _join(self, index: int) -> None:
        """Waits until a replacement has started its episodes; one that dies meanwhile is replaced too."""
        while index in self._starting:
            try:
                self._members[index].wait("start", START_TIMEOUT_S, self.buffers)
                self._members[index].wait("reset", self._timeout_s, self.buffers)
            except WorkerDied as error:
                self._replace(index, error)
                continue
            self._starting.discard(index)

    def _invalidate(self, index: int) -> None:
        """Ends the episodes of a worker's environments as invalid, except those of idle ones."""
        rows = slice(*self._bounds[index : index + 2])
        self.buffers.rewards[rows] = 0.0
        self.buffers.terminated[rows] = False
        self.buffers.truncated[rows] = self.buffers.invalid[rows] = ~self.buffers.idle[rows]


def _shut_down(members: list[EnvWorker]) -> None:
    for member in members:
        member.hang_up()
    for member in members:
        member.reap()
