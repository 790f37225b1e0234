"""Proxies of hosts and ranks in other processes: they send calls and hold the last known state of each process.

The state and the progress of each rank arrive a few times a second, so reading them never blocks. A rank's timings
arrive with each of its results. Not covered: the transport of calls (`Send`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from rl_platform.errors import HostDied, PlatformError, WorkerDied, WorkerError
from rl_platform.placement.scheduler import Host
from rl_platform.runtime.host import FailureHook, Progress, label
from rl_platform.runtime.ray.host_process import CallResult, NamedReferences, RankState, Record
from rl_platform.runtime.ray.serialization import SHARED, pack, unpack, unpack_error

Send = Callable[..., "Future[Any]"]
IDLE = "idle", Progress()
STACK_S = 3.0
DEATH_NOTICE_S = 5.0  # how long after a rank's own error the death of another process may become known


class HostProxy:
    """One host's process; `name` is the name of the process.

    `send(method, *arguments)` raises WorkerDied in its future.
    """

    def __init__(self, name: str, placed: Host, send: Send, on_death: Callable[..., None]) -> None:
        self.name, self.placed, self.members, self.send = name, placed, tuple(placed.members), send
        self.labels = tuple(label(*member) for member in self.members)
        self.death: WorkerDied | None = None
        self.pid = 0
        self.stopping = False
        self._on_death = on_death
        self._states: dict[str, RankState] = {}

    def watch(self) -> None:
        """Requests the state of the ranks again and again until the process ends."""
        if not self.stopping:
            self.send("pulse").add_done_callback(self._on_pulse)

    def _on_pulse(self, answer: Future[tuple[dict[str, RankState], list[Record]]]) -> None:
        error = answer.exception()
        if error is not None:
            self.died(error)
            return
        self._states, records = answer.result()
        try:
            relay(records)
        finally:
            self.watch()  # also if a logger of the user raises

    def died(self, error: BaseException) -> None:
        """Records that the process is gone; reports it to the runtime once, and not while it is being stopped."""
        if self.death is None and not self.stopping:
            self.death = error if isinstance(error, WorkerDied) else HostDied(f"{self.name}: {error}")
            self._on_death(self, self.death)

    def doing(self, name: str) -> str:
        return "dead" if self.death is not None else self._states.get(name, IDLE)[0]

    def progress(self, name: str) -> Progress:
        return self._states.get(name, IDLE)[1]


class WorkerProxy:
    """A rank in another process. `lost_peer`: waits for the death of a process of the run."""

    def __init__(
        self,
        host: HostProxy,
        member: tuple[str, int],
        names: NamedReferences,
        packed: ArgumentPacker,
        on_failure: FailureHook,
        lost_peer: Callable[[float], WorkerDied | None],
    ) -> None:
        self.label = label(*member)
        self._host, self._member, self._names, self._packed = host, member, names, packed
        self._on_failure, self._lost_peer = on_failure, lost_peer
        self._count = 0
        self._open: dict[Future[object], tuple[str, float]] = {}  # calls without a result: method, time
        self._order, self._arriving = threading.Lock(), threading.Lock()  # receiving must not wait for sending
        self._timings: dict[str, tuple[int, float]] = {}
        self._memory_peak = 0
        self._latest = -1  # number of the latest result: results may overtake each other
        self._finished = ""  # the method of the last result

    def submit(self, method: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Future[object]:
        """Raises pickle's error for arguments that cannot be serialised."""
        arguments = self._packed(args, kwargs)
        future: Future[object] = Future()
        with self._order:
            host = self._host
            if host.death is not None:
                future.set_exception(host.death)
                return future
            number = self._count
            sent = host.send("call", self._member, number, method, arguments)
            self._count += 1
            self._open[future] = method, time.monotonic()
        sent.add_done_callback(lambda done: self._finish(host, number, done, future))
        return future

    def move(self, host: HostProxy) -> None:
        """Calls go to the process that was started in place of the one that died."""
        with self._order, self._arriving:
            self._host, self._count, self._latest = host, 0, -1

    def doing(self) -> str:
        state, calls = self._host.doing(self.label), list(self._open.values())
        finished = self._finished
        outdated = state.startswith(f"busy in {finished} ") and all(method != finished for method, _ in calls)
        if not calls or (state != "idle" and not outdated):
            return state
        method, since = calls[0]  # a process that stops soon after a call never reports it
        return f"silent since the call of {method} {time.monotonic() - since:.3g} s ago"

    def stack(self) -> str:
        try:
            stacks: dict[str, str] = self._host.send("stacks").result(STACK_S)
        except (TimeoutError, PlatformError):
            return (
                f"process {self._host.pid} did not answer within {STACK_S:g} s: it is dead, stopped, or computes in "
                "native code that holds the interpreter's lock"
            )
        return stacks[self.label]

    def timings(self) -> dict[str, tuple[int, float]]:
        return self._timings.copy()

    def memory_peak(self) -> int:
        return self._memory_peak

    def progress(self) -> Progress:
        return self._host.progress(self.label)

    def _finish(self, host: HostProxy, number: int, done: Future[CallResult], future: Future[object]) -> None:
        self._finished, _ = self._open.pop(future, ("", 0.0))
        try:
            error = done.exception()
            if error is not None:
                host.died(error)
                self._fail(host.death or error, future)
                return
            outcome = done.result()
            with self._arriving:
                if host is self._host and number > self._latest:
                    self._latest, self._timings = number, outcome.timings
                    self._memory_peak = outcome.memory_peak
            if outcome.error is not None:
                self._fail_or_lost(unpack_error(outcome.error), future)
                return
            assert outcome.result is not None
            future.set_result(unpack(outcome.result, self._names, copy=True))
        except BaseException as error:  # the caller would wait for ever
            self._fail(WorkerError(f"the result of {self.label} cannot be read: {error}"), future)

    def _fail_or_lost(self, error: BaseException, future: Future[object]) -> None:
        """A rank whose partner in a collective died fails too, often first; then the death is reported."""
        if not isinstance(error, WorkerError):
            self._fail(error, future)
            return

        def decide() -> None:
            death = self._lost_peer(DEATH_NOTICE_S)
            if death is not None:
                death.__cause__ = death.__cause__ or error
            self._fail(death or error, future)

        threading.Thread(target=decide, daemon=True).start()

    def _fail(self, error: BaseException, future: Future[object]) -> None:
        try:
            if isinstance(error, PlatformError):
                self._on_failure(self.label, error)
        finally:
            future.set_exception(error)


class ArgumentPacker:
    """Packs a call's arguments, once for all ranks of a group; large ones are put where every process can read them."""

    def __init__(self, names: NamedReferences) -> None:
        self._names = names
        self._last: tuple[object, object, object] = (None, None, None)

    def __call__(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        last_args, last_kwargs, packed = self._last
        if args is not last_args or kwargs is not last_kwargs:
            packed = pack((args, dict(kwargs)), self._names)
            if packed.size >= SHARED:
                packed = self._names.transport.store(packed)
            self._last = args, kwargs, packed
        return packed


def relay(records: Sequence[Record]) -> None:
    """Logs records of another process as if they were written here."""
    for name, level, message in records:
        logging.getLogger(name).log(level, message)
