"""Scores responses in processes that can be killed: a verifier that hangs, crashes or raises costs one sample.

One thread serves all processes: it distributes work, collects scores, kills processes that exceed the timeout and
starts replacements. Scores are checked here again (`score.py`), because code in a process may have replaced the checks
there.
Not covered: the scoring itself (`verifiers.py`), and the worker's end of the socket (`scoring_worker.py`).
"""

from __future__ import annotations

import math
import socket
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Generic, TypeVar

from rl_platform.envs.reasoning.score import DIED, REFUSED, TIMEOUT, Score, decode, unscored
from rl_platform.envs.reasoning.scoring_process import Job, ScoringProcess, ScoringSpec
from rl_platform.envs.reasoning.scoring_worker import started
from rl_platform.errors import WorkerDied

Item = TypeVar("Item")
START_LIMIT_S = 60.0
FAILED_STARTS = 3  # in a row, after which the pool raises


class ScoringPool(Generic[Item]):
    """Scores responses in `num_workers` processes; thread-safe. A response that takes over `timeout_s` is invalid.

    If responses are queued and a process has worked on one for half the timeout, the pool starts a substitute, so that
    a few hanging responses do not block others. It has up to twice `num_workers` processes.
    Raises ConfigError or WorkerError at construction if the verifier cannot be loaded.
    """

    def __init__(self, spec: ScoringSpec[Item], *, num_workers: int, timeout_s: float) -> None:
        self._spec = spec
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._pending: deque[Job] = deque()
        self._workers: list[ScoringProcess] = []
        self._failed_starts = 0
        self._closing = False
        self._failure: BaseException | None = None
        self._started = threading.Event()
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._thread = threading.Thread(target=self._serve, name="scoring", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            self.close()
            raise self._failure

    def submit(self, items: Sequence[Item]) -> list[Future[Score]]:
        """Queues responses; the futures complete in any order. Raises WorkerDied on a closed pool."""
        jobs = [Job(item, Future()) for item in items]
        with self._lock:
            if self._closing or self._failure is not None:
                raise self._failure or WorkerDied("the scoring pool is closed")
            self._pending.extend(jobs)
        self._wake()
        return [job.future for job in jobs]

    def score(self, items: Sequence[Item]) -> list[Score]:
        """Returns the scores in the order of `items`."""
        return [future.result() for future in self.submit(items)]

    @property
    def process_ids(self) -> list[int]:
        """Of the processes alive now."""
        return [worker.child.pid for worker in list(self._workers)]

    def close(self) -> None:
        """Kills all processes and fails queued responses. May be called twice."""
        self._closing = True
        self._wake()
        self._thread.join()
        with self._lock:
            self._wake_in.close()
            self._wake_out.close()

    def _wake(self) -> None:
        with self._lock, suppress(BlockingIOError):  # the socket is full of wake-ups
            if self._wake_in.fileno() >= 0:
                self._wake_in.send(b"!")

    # The methods below run in the pool's thread, which owns the workers: the processes die with this thread.

    def _serve(self) -> None:
        try:
            while not self._closing:
                self._enforce_timeouts()
                self._adjust_workers()
                self._hand_out()
                self._collect()
        except BaseException as error:
            self._failure = error
        finally:
            self._shut_down()

    def _shut_down(self) -> None:
        for worker in list(self._workers):
            self._requeue(worker)
        with self._lock:
            self._closing = True
            left, self._pending = list(self._pending), deque()
        for job in left:
            job.future.set_exception(
                self._failure or WorkerDied("the scoring pool was closed before this response was scored")
            )
        self._started.set()

    def _enforce_timeouts(self) -> None:
        for worker in list(self._workers):
            limit = self._timeout_s if worker.ready else START_LIMIT_S
            if worker.waiting_s <= limit or worker.has_written:
                continue
            if worker.ready:
                self._give_up(worker, TIMEOUT, f"no answer within {self._timeout_s:g} s")
            else:
                self._failed_start(worker, f"not ready after {START_LIMIT_S:g} s")

    def _adjust_workers(self) -> None:
        capable = [worker for worker in self._workers if worker.waiting_s < self._timeout_s / 2 or not worker.ready]
        missing = self._num_workers - (len(capable) if self._pending else len(self._workers))
        for _ in range(min(missing, 2 * self._num_workers - len(self._workers))):
            self._workers.append(ScoringProcess(self._spec))
        surplus = len(self._workers) - self._num_workers
        if surplus > 0 and not self._pending:
            for worker in [worker for worker in self._workers if worker.idle][:surplus]:
                self._discard(worker)

    def _hand_out(self) -> None:
        idle = [worker for worker in self._workers if worker.idle]
        for count, worker in zip(range(len(idle), 0, -1), idle, strict=True):
            with self._lock:
                # Chunks save messages, but a response that is slow to score must not delay many others.
                size = min(math.ceil(len(self._pending) / count), worker.chunk_size)
                jobs = [self._pending.popleft() for _ in range(size)]
            if jobs and not worker.start(jobs):  # it died while idle, which no response has caused
                self._requeue(worker)

    def _collect(self) -> None:
        by_connection: dict[object, ScoringProcess] = {worker.connection: worker for worker in self._workers}
        sources = [self._wake_out, *(worker.connection for worker in self._workers)]
        for source in wait(sources, self._until_next_limit()):
            if source is self._wake_out:
                self._wake_out.recv(4096)
            else:
                self._receive(by_connection[source])

    def _until_next_limit(self) -> float | None:
        """Returns the seconds until a process exceeds its timeout or half of it; None if all are idle."""
        waits = []
        for worker in self._workers:
            if not worker.idle:
                limit = self._timeout_s if worker.ready else START_LIMIT_S
                half = limit / 2 if worker.waiting_s < limit / 2 else limit
                waits.append(max(half - worker.waiting_s, 0.0) + 0.001)
        return min(waits, default=None)

    def _receive(self, worker: ScoringProcess) -> None:
        try:
            for line in worker.read():
                if worker.ready:
                    self._accept(worker, line)
                else:
                    self._ready(worker, line)
        except (EOFError, OSError):
            self._lost(worker, DIED, "it died while the verifier was loaded")
        except ValueError as error:
            self._lost(worker, REFUSED, str(error))

    def _accept(self, worker: ScoringProcess, line: bytes) -> None:
        if not worker.jobs:
            raise ValueError("a score without a response")
        self._finish(worker, decode(line, getattr(worker.jobs[0].item, "response", "")))

    def _ready(self, worker: ScoringProcess, line: bytes) -> None:
        started(line)
        worker.ready = True
        self._failed_starts = 0
        self._started.set()

    def _finish(self, worker: ScoringProcess, score: Score) -> None:
        job = worker.jobs.popleft()
        worker.next_response()
        job.future.set_result(score)

    def _lost(self, worker: ScoringProcess, reason: str, why: str) -> None:
        """Replaces a process that died, or that sent something else than a score.

        The response gets a second process, because the first failure may have another cause. Examples are an operator,
        lack of memory, and an earlier response that changed the state of the process.
        """
        if not worker.ready:
            self._failed_start(worker, why)
            return
        if worker.jobs:
            worker.jobs[0].failures += 1
        if worker.jobs and worker.jobs[0].failures > 1:
            did = "died" if reason == DIED else f"sent something else than a score ({why})"
            self._give_up(worker, reason, f"the scoring process {did} while it scored this response, twice")
        else:
            self._requeue(worker)

    def _give_up(self, worker: ScoringProcess, reason: str, detail: str) -> None:
        """Kills a process and invalidates its current response; its other responses are queued first."""
        worker.kill()
        self._finish(worker, unscored(reason, detail))
        self._requeue(worker)

    def _requeue(self, worker: ScoringProcess) -> None:
        with self._lock:
            self._pending.extendleft(reversed(worker.jobs))
        self._discard(worker)

    def _failed_start(self, worker: ScoringProcess, why: str) -> None:
        self._discard(worker)
        self._failed_starts += 1
        if self._failed_starts >= FAILED_STARTS:
            asked = f"{self._spec.key} {self._spec.type}"
            raise WorkerDied(f"{FAILED_STARTS} scoring processes in a row did not start with {asked}: {why}")

    def _discard(self, worker: ScoringProcess) -> None:
        self._workers.remove(worker)
        worker.kill()
