"""The Ray actor of one host: passes calls on to `HostProcess` and answers when they are done."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import ray

from rl_platform.errors import PlatformError, WorkerDied
from rl_platform.placement.inventory import VISIBLE_DEVICES
from rl_platform.runtime.lifecycle import RUNNER
from rl_platform.runtime.process_group import Rendezvous, join_group, leave_group
from rl_platform.runtime.ray import reservation
from rl_platform.runtime.ray.channel_proxy import ChannelAddress, ChannelRegistry
from rl_platform.runtime.ray.fingerprint import code_fingerprint
from rl_platform.runtime.ray.host_process import HostProcess, ProcessInfo, Record, prepare_process
from rl_platform.runtime.ray.loss_watch import watch_head
from rl_platform.runtime.ray.serialization import NO_REFERENCES, Answer, Packed, pack_error, unpack, unpack_error
from rl_platform.runtime.ray.transport import RayTransport
from rl_platform.runtime.waits import waiting_on
from rl_platform.runtime.weights.base import WeightsToken
from rl_platform.tracing import recorder

PULSE_S = 0.5
WAITING_CALLS = 512  # threads, made as needed, of calls that wait in one process for a channel


class HostActor:
    """The process of one host: passes calls on to `HostProcess` and answers when they are done."""

    def __init__(
        self, name: str, namespace: str, environment: Mapping[str, str], threads: int, paths: Sequence[str], trace: bool
    ) -> None:
        self._records = prepare_process(environment, threads, paths, trace)
        watch_head()
        self._transport = RayTransport(namespace)
        self._waiting = ThreadPoolExecutor(WAITING_CALLS, thread_name_prefix="call")
        self._listener = self._transport.listen(name, self._take)
        self._process: HostProcess
        self._rendezvous: Rendezvous | None = None

    async def ping(self) -> None:
        return None

    async def accelerators(self) -> list[str]:
        return [str(name) for name in ray.get_gpu_ids()]

    async def see(self, accelerators: str) -> None:
        os.environ[VISIBLE_DEVICES] = accelerators

    async def greet(self) -> Answer:
        return await self._answer(lambda: ProcessInfo(os.getpid(), self._transport.address(), code_fingerprint()))

    async def build(
        self,
        seat: reservation.HostView,
        packed: Packed,
        world_sizes: Mapping[str, int],
        seed: int,
        homes: Mapping[str, str],
    ) -> Answer:
        def build() -> None:
            self._homes = homes
            _, kwargs = unpack(packed, NO_REFERENCES, copy=True)
            transport, components = self._transport, kwargs["components"]
            self._process = HostProcess(seat, components, world_sizes, seed, transport, self._remote_status)

        return await self._answer(build)

    async def open_group(self, world_size: int) -> Answer:
        def open_group() -> tuple[str, int]:
            self._rendezvous = Rendezvous(self._transport.address(), world_size)
            return self._transport.address(), self._rendezvous.port

        return await self._answer(open_group)

    async def join(self, rendezvous: tuple[str, int], rank: int, size: int, timeout_s: float, cuda: bool) -> Answer:
        return await self._answer(partial(join_group, self._rendezvous or rendezvous, rank, size, timeout_s, cuda))

    async def construct(self) -> Answer:
        return await self._answer(self._process.construct)

    async def call(self, member: tuple[str, int], number: int, method: str, arguments: Packed) -> Answer:
        return await asyncio.wrap_future(self._take("call", member, number, method, arguments))

    async def channel(self, address: ChannelAddress, operation: str, arguments: tuple[object, ...], who: str) -> Answer:
        return await asyncio.wrap_future(self._take("channel", address, operation, arguments, who))

    async def fetch(self, number: int | None) -> Answer:
        """The answer to a call that came through a socket."""
        lost = None, pack_error(WorkerDied("it lives, but its connection to another process broke"))
        return self._listener.fetch(number) or lost

    async def fail(self, label: str | None, error: bytes, *before: int) -> Answer:
        if not hasattr(self, "_process"):
            return [], None
        return await self._answer(lambda: self._registry.fail(label, unpack_error(error), *before))

    async def export(self, token: WeightsToken, *how: object) -> Answer:
        return await asyncio.wrap_future(self._take("export", token, *how))

    async def rehome(self, homes: Mapping[str, str]) -> Answer:
        self._homes = homes
        return None, None

    async def doing(self, name: str) -> Answer:
        return self._process.status(name), None

    async def spans(self) -> Answer:
        recorder.on = False
        return recorder.drain(), None

    async def pulse(self) -> Answer:
        await asyncio.sleep(PULSE_S)
        return (self._process.pulse(), self._fetched()), None

    async def shutdown(self, timeout: float) -> Answer:
        def shutdown() -> tuple[list[bytes], list[Record]]:
            failures = self._process.shutdown(timeout) if hasattr(self, "_process") else []
            leave_group()
            return [pack_error(failure) for failure in failures], self._fetched()

        return await self._answer(shutdown)

    @property
    def _registry(self) -> ChannelRegistry:
        return self._process.names.registry

    def _take(self, method: str, *arguments: object) -> Future[Answer]:
        """One of the frequent calls, whichever way it came."""
        if method == "call":
            return self._process.call(*arguments)
        if method == "export":
            return self._waiting.submit(_answer_of, partial(self._process.export, *arguments))
        address, operation, given, who = arguments
        done: Future[Answer] = Future()
        try:
            at_once = self._registry.serve_at_once(address, operation, given)
        except PlatformError as error:
            done.set_result((None, pack_error(error)))
            return done
        if at_once is None:
            return self._waiting.submit(_answer_of, partial(self._registry.serve, address, operation, given, who))
        done.set_result((at_once, None))
        return done

    async def _answer(self, function: Callable[[], object]) -> Answer:
        """Runs in a thread, as it may wait."""
        return await asyncio.get_running_loop().run_in_executor(self._waiting, _answer_of, function)

    def _remote_status(self, name: str) -> str:
        """For the message of a missed deadline: what the runner or a rank of another host does."""
        if name == RUNNER:  # it waits here in a thread that bears its name
            waiting = [waiting_on(thread.ident) for thread in threading.enumerate() if thread.name == RUNNER]
            return f"waiting on {waiting[0]}" if any(waiting) else "busy"
        try:
            return str(self._transport.call(self._homes[name], "doing", name, limit=1.0))
        except PlatformError:
            return "dead"

    def _fetched(self) -> list[Record]:
        return [self._records.popleft() for _ in range(len(self._records))]


def _answer_of(function: Callable[[], object]) -> Answer:
    try:
        return function(), None
    except Exception as error:
        return None, pack_error(error)
