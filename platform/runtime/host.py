"""Hosts: the component ranks that live together in one process, each with a thread of its own.

A runtime decides in which process a host runs; this module runs the components and types their errors. Not covered:
process groups, devices and the transport of calls.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rl_platform.errors import (
    ChannelClosed,
    CheckpointError,
    ConfigError,
    PlatformError,
    WorkerDied,
    WorkerError,
    message_of,
)
from rl_platform.runtime.cpu import release_team
from rl_platform.runtime.peak_memory import memory_peak
from rl_platform.runtime.waits import stack_of, waiting_on
from rl_platform.tracing import recorder

if TYPE_CHECKING:
    from rl_platform.placement.scheduler import Host

logger = logging.getLogger(__name__)

T = TypeVar("T")
FailureHook = Callable[[str, PlatformError], None]


@dataclass
class Progress:
    """The progress of a rank's current call, written by the component and read by the caller."""

    done: int = 0
    total: int = 0
    unit: str = ""
    stopped: bool = False

    def update(self, done: int, total: int, unit: str) -> None:
        """Raises WorkerDied when the run is being stopped, so that a long call does not hold it up."""
        self.done, self.total, self.unit = done, total, unit
        if self.stopped:
            raise WorkerDied(f"stopped at {done} of {total} {unit}")


@dataclass(frozen=True)
class ComponentContext:
    """The identity of a component rank.

    name: the component's name in the placement; rank of world_size; accelerators: the ones it owns on its node,
    possibly none; seed: the run's, the same for all, so that random numbers of a component depend on its name and rank
    and not on the placement; shared: objects of the host, the same dict for all its components; progress: to be updated
    in long calls.
    """

    name: str
    rank: int
    world_size: int
    accelerators: tuple[int, ...]
    seed: int
    shared: dict[str, object] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)

    @property
    def label(self) -> str:
        return label(self.name, self.rank)


@dataclass(frozen=True)
class ComponentSpec:
    """The constructor call of a component on each of its ranks: `cls(context, **kwargs)`.

    beside: the constructor computes nothing and only waits for processes, so others of its host may run meanwhile.
    """

    cls: type
    kwargs: Mapping[str, object] = field(default_factory=dict)
    beside: bool = False


def label(component: str, rank: int) -> str:
    """Returns the name of a rank in messages, which is also its thread's name: `critic[2]`."""
    return f"{component}[{rank}]"


@dataclass
class _QueuedCall(Generic[T]):
    future: Future[T]
    method: str
    function: Callable[[], T]
    control: bool = False  # from the runtime: runs although the rank is retired
    last: bool = False


class RankThread:
    """One component rank and the thread that constructs it and runs its calls in order.

    A call that raises fails its future with a PlatformError, is logged and passed to `on_failure`; the thread
    continues.
    """

    def __init__(self, host: str, context: ComponentContext, spec: ComponentSpec, on_failure: FailureHook) -> None:
        self.label = context.label
        self._host = host
        self._spec = spec
        self._context = context
        self._on_failure = on_failure
        self._component: object = None
        self._calls: queue.SimpleQueue[_QueuedCall[Any]] = queue.SimpleQueue()
        self._admission = threading.Lock()
        self._retired = False
        self._current: tuple[str, float] | None = None
        self._timings: dict[str, tuple[int, float]] = {}
        self._thread = threading.Thread(target=self._serve, name=self.label, daemon=True)
        self._thread.start()

    def construct(self) -> Future[None]:
        """Constructs the component in its own thread."""
        return self._enqueue("__init__", self._construct)

    def submit(self, method: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Future[object]:
        """Queues a call. Raises WorkerDied after `retire`."""
        return self._enqueue(method, partial(getattr(self._component, method), *args, **kwargs))

    def run(self, name: str, function: Callable[[object], T]) -> Future[T]:
        """Queues `function(component)` as a call of this name. Raises WorkerDied after `retire`."""
        return self._enqueue(name, lambda: function(self._component))

    def doing(self) -> str:
        current = self._current
        if not self._thread.is_alive():
            return "dead"
        if current is None:
            return "idle"
        waiting = waiting_on(self._thread.ident)
        behind = self._calls.qsize()
        return (
            f"busy in {current[0]} for {time.monotonic() - current[1]:.3g} s"
            + (f" waiting on {waiting}" if waiting else "")
            + (f" with {behind} more queued" if behind else "")
        )

    def stack(self) -> str:
        return stack_of(self._thread.ident)

    def timings(self) -> dict[str, tuple[int, float]]:
        return self._timings.copy()

    def memory_peak(self) -> int:
        return memory_peak(self._context.accelerators)

    def progress(self) -> Progress:
        return self._context.progress

    def retire(self) -> Future[None]:
        """Refuses new calls and fails the queued ones; the future is done when the running call has ended."""
        with self._admission:
            self._retired = self._context.progress.stopped = True
            idle = _QueuedCall(Future(), "retire", lambda: None, control=True)
            self._calls.put(idle)
        return idle.future

    def close(self) -> Future[None]:
        """Calls the component's `close`, if it has one, and ends the thread. Called after `retire`."""
        call = _QueuedCall(Future(), "close", self._close_component, control=True, last=True)
        self._calls.put(call)
        return call.future

    def join(self, timeout: float) -> bool:
        """Waits at most `timeout` seconds, and returns whether the thread has ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _construct(self) -> None:
        self._component = self._spec.cls(self._context, **self._spec.kwargs)

    def _close_component(self) -> None:
        if close := getattr(self._component, "close", None):
            close()

    def _enqueue(self, method: str, function: Callable[[], T]) -> Future[T]:
        call = _QueuedCall(Future(), method, function)
        with self._admission:
            if self._retired:
                raise WorkerDied(f"{self.label} was shut down and takes no call of {method}")
            self._calls.put(call)
        return call.future

    def _serve(self) -> None:
        recorder.settle(self._host, self.label)
        last = False
        while not last:
            call = self._calls.get()
            last = call.last
            if self._retired and not call.control:
                call.future.set_exception(WorkerDied(f"{self.label} was shut down before {call.method} ran"))
            else:
                self._execute(call)
            del call  # an idle thread must not keep the last call's arguments alive

    def _execute(self, call: _QueuedCall[Any]) -> None:
        start = time.monotonic()
        self._current = (call.method, start)
        self._context.progress.done = self._context.progress.total = 0
        self._context.progress.unit = ""
        result, failure = None, None
        try:
            result = call.function()
        except BaseException as error:  # SystemExit in a component must fail the call, not end the thread silently
            failure = _typed(error, self.label, call.method)
            # a closed channel is the consequence of another failure; the other two are shown when the run ends
            if not self._retired and not isinstance(error, ChannelClosed | CheckpointError | ConfigError):
                headline = message_of(error).partition("\n")[0]
                logger.error("%s.%s raised %s: %s", self.label, call.method, type(error).__name__, headline)
        count, seconds = self._timings.get(call.method, (0, 0.0))
        self._timings[call.method] = (count + 1, seconds + time.monotonic() - start)
        self._current = None
        recorder.add("call", call.method, start)
        release_team()
        if failure is None:
            call.future.set_result(result)
            return
        try:
            self._on_failure(self.label, failure)
        finally:
            call.future.set_exception(failure)


def start_ranks(
    placed: Host, specs: Mapping[str, ComponentSpec], world_sizes: Mapping[str, int], seed: int, on_failure: FailureHook
) -> dict[tuple[str, int], RankThread]:
    """Starts the threads of a host's ranks, in the order of `placed.members`; their components share one dict."""
    shared: dict[str, object] = {}
    ranks = {}
    for name, rank in placed.members:
        context = ComponentContext(name, rank, world_sizes[name], placed.accelerators, seed, shared=shared)
        ranks[name, rank] = RankThread(placed.name, context, specs[name], on_failure)
    return ranks


def _typed(error: BaseException, label: str, method: str) -> PlatformError:
    """Returns the error for the caller: PlatformErrors as they are, others as WorkerError with the traceback."""
    if isinstance(error, ChannelClosed) and isinstance(error.__cause__, PlatformError):
        error = error.__cause__  # the channel was closed by another failure, which is the cause
    if isinstance(error, PlatformError):
        error.add_note(f"raised in {label}.{method}")
        return error
    own = error.__traceback__.tb_next if error.__traceback__ else None
    remote = "".join(traceback.format_exception(type(error), error, own))
    typed = WorkerError(
        f"{label}.{method} raised {type(error).__name__}: {message_of(error)}\nRemote traceback:\n{remote}"
    )
    typed.__cause__ = error
    return typed
