"""Worker groups: all ranks of one component, called as one.

A runtime provides one `Worker` per rank, in this or another process. Not covered: data between ranks, which channels
transfer; the types of a component's calls, see `runners/component_groups.py`.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from rl_platform.errors import Deadline
from rl_platform.runtime.cpu import release_team
from rl_platform.runtime.host import ComponentSpec, Progress
from rl_platform.runtime.waits import caller, clock_before
from rl_platform.suggest import nearest

R = TypeVar("R", covariant=True)
OnProgress = Callable[[int, int, str], None]
PROGRESS_INTERVAL_S = 0.25


class Worker(Protocol):
    """One rank of a component, in this or another process."""

    @property
    def label(self) -> str:
        """The rank's name in messages, `critic[2]`."""

    def submit(self, method: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Future[object]:
        """Starts a call after those submitted before. The future raises PlatformErrors only."""

    def doing(self) -> str:
        """Returns `idle`, `busy in update for 12 s`, `silent since the call of update 12 s ago` or `dead`.

        Never blocks.
        """

    def stack(self) -> str:
        """Returns the stack of the rank's thread, for messages; waits a few seconds at most."""

    def timings(self) -> dict[str, tuple[int, float]]:
        """Returns for each method the number of calls and their seconds."""

    def memory_peak(self) -> int:
        """Returns the peak of the rank's memory in bytes, see `rl_platform.runtime.peak_memory`."""

    def progress(self) -> Progress:
        """Returns the progress of the current call, as the component reports it."""


class Handle(Generic[R]):
    """One call on every rank of a group, and its results when the ranks have finished."""

    def __init__(self, call: str, workers: Sequence[Worker], futures: Sequence[Future[R]], deadline_s: float) -> None:
        self._call = call
        self._workers = workers
        self._futures = futures
        self._deadline_s = deadline_s
        self._submitted = time.monotonic()

    def done(self) -> bool:
        """Returns whether every rank has finished or failed."""
        return all(future.done() for future in self._futures)

    def wait(self, timeout: float | None = None, on_progress: OnProgress | None = None) -> list[R]:
        """Returns one result per rank, in the group's order. timeout: in seconds; None: the runtime's deadline.

        `on_progress(done, total, unit)` is called a few times a second with the progress of the rank that is least far;
        total 0: not known.

        Raises the first failing rank's error as soon as it fails, without waiting for the other ranks. A PlatformError
        is raised unchanged, anything else as WorkerError with the remote traceback. Raises Deadline if ranks are still
        busy.
        """
        limit = self._deadline_s if timeout is None else timeout
        self._wait(limit, on_progress)
        for future in self._futures:
            if future.done() and (error := future.exception()) is not None:
                raise error
        if not self.done():
            raise Deadline(self._deadline_message(limit))
        return [future.result() for future in self._futures]

    def _wait(self, limit: float, on_progress: OnProgress | None) -> None:
        pending, until, done_before = set(self._futures), time.monotonic() + limit, 0
        while pending and (left := until - time.monotonic()) > 0:
            interval = left if on_progress is None else min(left, PROGRESS_INTERVAL_S)
            done, pending = concurrent.futures.wait(pending, interval, concurrent.futures.FIRST_EXCEPTION)
            if any(future.exception() is not None for future in done):
                return
            progress = min((worker.progress() for worker in self._workers), key=lambda progress: progress.done)
            if progress.done != done_before:  # the deadline limits the time without progress
                done_before, until = progress.done, time.monotonic() + limit
            if on_progress is not None and progress.unit:
                on_progress(progress.done, progress.total, progress.unit)

    def settle(self) -> None:
        """Waits until every rank has finished or failed, and raises only Deadline."""
        concurrent.futures.wait(self._futures, self._deadline_s)
        if not self.done():
            raise Deadline(self._deadline_message(self._deadline_s))

    def _deadline_message(self, limit: float) -> str:
        late = [worker for worker, future in zip(self._workers, self._futures, strict=True) if not future.done()]
        states = ", ".join(f"{worker.label} {worker.doing()}" for worker in late)
        since = clock_before(time.monotonic() - self._submitted)
        return (
            f"{caller()} waited {limit:g} s for {self._call} ({len(late)} of {len(self._workers)} ranks unfinished: "
            f"{states}), submitted at {since}"
        )


class WorkerGroup:
    """All ranks of the component `name`: `group.update(...)` submits the call on every rank and returns a Handle.

    `cls` is the component's class; a name that is no public method of it raises AttributeError at once. Calls of one
    rank run in the order they were submitted, and that order is the same on all ranks.
    """

    def __init__(self, name: str, cls: type, workers: Mapping[int, Worker], deadline_s: float) -> None:
        taken = [method for method in _public_methods(cls) if hasattr(WorkerGroup, method)]
        if taken:
            raise TypeError(
                f"{cls.__name__} has methods named {', '.join(taken)}: worker groups use these names themselves"
            )
        self.name = name
        self._cls = cls
        self._workers = dict(workers)
        self._deadline_s = deadline_s
        self._order = threading.Lock()

    @property
    def world_size(self) -> int:
        """The number of ranks in this group."""
        return len(self._workers)

    @property
    def workers(self) -> Sequence[Worker]:
        """The workers, in order of rank."""
        return list(self._workers.values())

    def on(self, ranks: Iterable[int]) -> WorkerGroup:
        """Returns the group of these ranks only; its results have this order."""
        chosen = list(ranks)
        wrong = [rank for rank in chosen if rank not in self._workers]
        if wrong or not chosen or len(set(chosen)) != len(chosen):
            raise ValueError(f"{self.name}: ranks {chosen} are not distinct ranks out of {list(self._workers)}")
        part = WorkerGroup(self.name, self._cls, {rank: self._workers[rank] for rank in chosen}, self._deadline_s)
        part._order = self._order
        return part

    def rank(self, rank: int) -> WorkerGroup:
        """Returns the group of one rank."""
        return self.on([rank])

    def timings(self) -> dict[str, tuple[int, float]]:
        """Returns calls and total seconds of each method, of the slowest rank: a step waits for that rank."""
        slowest: dict[str, tuple[int, float]] = {}
        for worker in self._workers.values():
            for method, timing in worker.timings().items():
                slowest[method] = max(slowest.get(method, (0, 0.0)), timing, key=lambda entry: entry[1])
        return slowest

    def memory_peak(self) -> int:
        """Returns the largest memory peak of the ranks, in bytes."""
        return max((worker.memory_peak() for worker in self._workers.values()), default=0)

    def __getattr__(self, method: str) -> Callable[..., Handle[Any]]:
        if method.startswith("_") or not callable(getattr(self._cls, method, None)):
            raise AttributeError(self._unknown(method))
        return partial(self._submit, method)

    def _submit(self, method: str, /, *args: object, **kwargs: object) -> Handle[Any]:
        workers = list(self._workers.values())
        release_team()  # the caller will wait while the ranks compute
        with self._order:
            futures = [worker.submit(method, args, kwargs) for worker in workers]
        return Handle(f"{self.name}.{method}", workers, futures, self._deadline_s)

    def _unknown(self, method: str) -> str:
        if method.startswith("_"):
            return f"worker group has no attribute '{method}'"
        methods = _public_methods(self._cls)
        close = nearest(method, methods)
        hint = f"did you mean '{close}'?" if close else f"it has: {', '.join(methods)}"
        return f"component '{self.name}' ({self._cls.__name__}) has no method '{method}'; {hint}"


def worker_groups(
    components: Mapping[str, ComponentSpec], workers: Mapping[tuple[str, int], Worker], deadline_s: float
) -> dict[str, WorkerGroup]:
    """Returns one group for each component; the keys of `workers` are (component, rank)."""
    ranks: dict[str, dict[int, Worker]] = {name: {} for name in components}
    for name, rank in sorted(workers):
        ranks[name][rank] = workers[name, rank]
    return {name: WorkerGroup(name, spec.cls, ranks[name], deadline_s) for name, spec in components.items()}


def _public_methods(cls: type) -> list[str]:
    return [name for name in dir(cls) if not name.startswith("_") and callable(getattr(cls, name))]
