"""The Ray actor of one host: its ranks, the channels that live in its process, the weights it published.

Calls of a rank run in the order of their numbers, whatever order they arrive in. Channels and published weights are
sent by reference.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial, wraps
from typing import Any, TypeVar

import ray

from rl_platform.errors import PlatformError, WorkerDied
from rl_platform.garbage import collect_as_usual
from rl_platform.placement.inventory import VISIBLE_DEVICES
from rl_platform.placement.scheduler import Host
from rl_platform.runtime.host import RankThread, start_ranks
from rl_platform.runtime.lifecycle import RUNNER, raise_first, stop_ranks
from rl_platform.runtime.ray.fingerprint import code_fingerprint
from rl_platform.runtime.ray.host_process import (
    CallResult,
    Member,
    NamedReferences,
    ProcessInfo,
    Record,
    prepare_process,
)
from rl_platform.runtime.ray.loss_watch import watch_head
from rl_platform.runtime.ray.process_group import Rendezvous, join_group, leave_group, use_interface_of
from rl_platform.runtime.ray.serialization import NO_REFERENCES, Answer, Packed, pack, pack_error, unpack, unpack_error
from rl_platform.runtime.ray.transport import RayTransport
from rl_platform.runtime.waits import waiting_on
from rl_platform.runtime.weights.group import Absence, JoinRequest, WeightGroup
from rl_platform.runtime.weights_token import WeightsToken
from rl_platform.tracing import recorder

T = TypeVar("T")
PULSE_S = 0.5
WAITING_CALLS = 512  # threads, made as needed, of calls that wait in one process for a channel


def _answer_of(function: Callable[[], object]) -> Answer:
    try:
        return function(), None
    except Exception as error:
        return None, pack_error(error)


def _in_a_thread(method: Callable[..., object]) -> Callable[..., Awaitable[Answer]]:
    """Makes a method a coroutine that runs it in a thread, as it may wait, and returns its answer."""

    @wraps(method)
    async def run(self: HostActor, *arguments: object) -> Answer:
        call = partial(method, self, *arguments)
        return await asyncio.get_running_loop().run_in_executor(self._waiting, _answer_of, call)

    return run


class HostActor:
    """The process of one host. Its methods answer with a value or a packed error."""

    def __init__(
        self,
        name: str,
        namespace: str,
        environment: Mapping[str, str],
        threads: int,
        paths: Sequence[str],
        trace: bool,
        accelerated: bool,
    ) -> None:
        self._records = prepare_process(environment, threads, paths, trace, accelerated)
        use_interface_of(ray.util.get_node_ip_address())
        watch_head()
        self._transport = RayTransport(namespace)
        self._waiting = ThreadPoolExecutor(WAITING_CALLS, thread_name_prefix="call")
        self._listener = self._transport.listen(name, self._take)
        self._names: NamedReferences
        self._ranks: dict[Member, RankThread] = {}
        self._order = threading.Lock()
        self._next: dict[Member, int] = defaultdict(int)
        self._early: dict[Member, dict[int, Callable[[], None]]] = defaultdict(dict)
        self._rendezvous: Rendezvous | None = None

    async def ping(self) -> None:
        return None

    async def accelerators(self) -> list[str]:
        return [str(name) for name in ray.get_gpu_ids()]

    async def see(self, accelerators: str) -> None:
        os.environ[VISIBLE_DEVICES] = accelerators

    @_in_a_thread
    def greet(self) -> ProcessInfo:
        return ProcessInfo(os.getpid(), socket.gethostname(), self._transport.address(), code_fingerprint())

    @_in_a_thread
    def build(
        self, seat: Host, packed: Packed, world_sizes: Mapping[str, int], seed: int, homes: Mapping[str, str]
    ) -> None:
        self._homes = homes
        _, kwargs = unpack(packed, NO_REFERENCES, copy=True)
        components = kwargs["components"]
        receives = any(hasattr(components[component].cls, "receive") for component, _ in seat.members)
        self._names = NamedReferences(seat.name, self._transport, self._status, receives)
        self._ranks = start_ranks(seat, components, world_sizes, seed, self._on_failure)

    @_in_a_thread
    def open_group(self, world_size: int) -> tuple[str, int]:
        self._rendezvous = Rendezvous(self._transport.address(), world_size)
        return self._transport.address(), self._rendezvous.port

    @_in_a_thread
    def join(self, rendezvous: tuple[str, int], rank: int, size: int, timeout_s: float, cuda: bool) -> None:
        join_group(self._rendezvous or rendezvous, rank, size, timeout_s, cuda)

    @_in_a_thread
    def construct(self, members: Sequence[Member]) -> None:
        """Constructs these components one after the other, at the end of this process's start."""
        for member in members:
            self._ranks[member].construct().result()
        collect_as_usual()

    async def take(self, method: str, *arguments: object) -> Answer:
        return await asyncio.wrap_future(self._take(method, *arguments))

    async def fetch(self, number: int | None) -> Answer:
        """Returns the answer to a call that came through a socket."""
        lost = None, pack_error(WorkerDied("the process is alive, but its connection to another process broke"))
        return self._listener.fetch(number) or lost

    @_in_a_thread
    def fail(self, label: str | None, error: bytes, *before: int) -> list[PlatformError]:
        if not self._ranks:
            return []
        if label is not None:
            self._names.weights.lost(label)
        failure = unpack_error(error)
        assert isinstance(failure, PlatformError)
        return self._names.registry.fail(label, failure, *before)

    async def rehome(self, homes: Mapping[str, str]) -> Answer:
        self._homes = homes
        self._names.weights.restarted()
        return None, None

    async def doing(self, name: str) -> Answer:
        return self._status(name), None

    async def stacks(self) -> Answer:
        return {rank.label: rank.stack() for rank in self._ranks.values()}, None

    async def spans(self) -> Answer:
        recorder.on = False
        return recorder.drain(), None

    async def pulse(self) -> Answer:
        """Returns the state of each rank, and the records of the log since the last call."""
        await asyncio.sleep(PULSE_S)
        states = {rank.label: (rank.doing(), rank.progress()) for rank in self._ranks.values()}
        return (states, self._fetched()), None

    @_in_a_thread
    def shutdown(self, timeout: float) -> tuple[list[bytes], list[Record]]:
        failures = self._names.registry.fail(None, None) if self._ranks else []
        failures += stop_ranks(self._ranks.values(), timeout)
        leave_group()
        return [pack_error(failure) for failure in failures], self._fetched()

    def _take(self, method: str, *arguments: Any) -> Future[Answer]:
        """Starts a frequent call that came through a socket or through Ray. The future never raises."""
        if method == "call":
            return self._call(*arguments)
        if method == "export":
            return self._waiting.submit(_answer_of, partial(self._export, *arguments))
        address, operation, given, who = arguments
        at_once, failure = _answer_of(partial(self._names.registry.serve_at_once, address, operation, given))
        if at_once is None and failure is None:
            return self._waiting.submit(_answer_of, partial(self._names.registry.serve, address, operation, given, who))
        done: Future[Answer] = Future()
        done.set_result((at_once, failure))
        return done

    def _call(self, member: Member, number: int, method: str, arguments: Packed) -> Future[Answer]:
        """Queues call `number` (from 0) of a rank."""
        answer: Future[Answer] = Future()
        with self._order:
            early = self._early[member]
            early[number] = partial(self._start, self._ranks[member], method, arguments, answer)
            while (run := early.pop(self._next[member], None)) is not None:
                self._next[member] += 1
                run()
        return answer

    def _start(self, rank: RankThread, method: str, arguments: Packed, answer: Future[Answer]) -> None:
        def run(component: object) -> Packed:
            args, kwargs = unpack(arguments, self._names, copy=True)
            try:
                result = getattr(component, method)(*args, **kwargs)
            except BaseException:
                with suppress(Exception):  # else the next call would raise the errors of this one's items
                    self._names.registry.flush(rank.label)
                raise
            self._names.registry.flush(rank.label)  # before the caller learns that the items are there
            return pack(result, self._names)

        def finish(done: Future[Packed]) -> None:
            error = done.exception()
            packed = None if error is not None else done.result()
            failure = None if error is None else pack_error(error)
            answer.set_result((CallResult(packed, failure, rank.timings(), rank.memory_peak()), None))

        try:
            rank.run(method, run).add_done_callback(finish)
        except WorkerDied as error:
            answer.set_result((CallResult(None, pack_error(error), rank.timings(), rank.memory_peak()), None))

    def _export(
        self, token: WeightsToken, transfer: str, request: JoinRequest | Absence | WeightGroup | None
    ) -> object:
        """Returns weights that a rank of this process published, see `Publications.export`."""

        def run_in_turn(label: str, function: Callable[[], T]) -> Future[T]:
            rank = next(rank for rank in self._ranks.values() if rank.label == label)
            return rank.run("send weights", lambda _: function())

        return self._names.weights.export(token, transfer, request, run_in_turn)

    def _on_failure(self, name: str, error: PlatformError) -> None:
        raise_first(self._names.registry.fail(name, error))

    def _status(self, name: str) -> str:
        """Returns the state of the runner, or of a rank in any process, for the message of a missed deadline."""
        for rank in list(self._ranks.values()):
            if rank.label == name:
                return rank.doing()
        if name == RUNNER:  # it waits here in a thread that bears its name
            waiting = [waiting_on(thread.ident) for thread in threading.enumerate() if thread.name == RUNNER]
            return f"waiting on {waiting[0]}" if any(waiting) else "busy"
        try:
            return str(self._transport.call(self._homes[name], "doing", name, limit=1.0))
        except PlatformError:
            return "dead"

    def _fetched(self) -> list[Record]:
        return [self._records.popleft() for _ in range(len(self._records))]
