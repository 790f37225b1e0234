"""The Ray runtime: every host of the placement is a Ray actor on its node, inside one placement group.

Ray starts the processes, says when one died, carries calls (transport.py) and holds large data in shared memory;
everything else is in modules that do not know Ray. Actors are never restarted by Ray, which would bring them back with
the state of their constructor and say nothing: `launch` makes a new one. Ray itself is started or joined by
`launch/cluster.py`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rl_platform.errors import Deadline, PlatformError, WorkerDied
from rl_platform.placement.inventory import VISIBLE_DEVICES
from rl_platform.runtime import Placement
from rl_platform.runtime.host import PlacedHost
from rl_platform.runtime.lifecycle import RUNNER, SHUTDOWN_S
from rl_platform.runtime.process_group import Rendezvous, join_group, leave_group
from rl_platform.runtime.ray import reservation
from rl_platform.runtime.ray.channel_proxy import ChannelAddress
from rl_platform.runtime.ray.fingerprint import code_fingerprint
from rl_platform.runtime.ray.fleet import ProcessInfo
from rl_platform.runtime.ray.host_process import HostProcess, Record, prepare_process
from rl_platform.runtime.ray.loss_watch import LauncherWatch, watch_head
from rl_platform.runtime.ray.remote import RemoteRuntime
from rl_platform.runtime.ray.serialization import NO_REFERENCES, Answer, Packed, pack_error, unpack, unpack_error
from rl_platform.runtime.ray.transport import RayTransport, typed
from rl_platform.runtime.ray.worker_proxy import Send, answered
from rl_platform.runtime.waits import waiting_on
from rl_platform.runtime.weights.base import WeightsToken
from rl_platform.tracing import recorder

RESERVE_S = 60.0  # how long to wait for resources that others hold
PULSE_S = 0.5
WAITING_CALLS = 512  # threads, made as needed, of calls that wait in one process for a channel


class RayRuntime(RemoteRuntime):
    """Runs a placement as Ray actors. Ray is initialised already; several runs on one cluster do not meet.

    `trace`: hosts record spans for the timeline until they are asked for them. `restarts`: see `Restarts`.
    """

    def __init__(
        self, placement: Placement, deadline_s: float, seed: int, trace: bool = False, restarts: int = 0
    ) -> None:
        super().__init__(placement, deadline_s, seed, RayActors(min(deadline_s, RESERVE_S), trace), restarts)
        self._watch = LauncherWatch()

    def shutdown(self, timeout: float = SHUTDOWN_S) -> None:
        """See `RemoteRuntime`; without Ray nothing is left to be asked or ended."""
        try:
            if self._watch.lost is None:
                super().shutdown(timeout)
        finally:
            self._watch.stop()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raises RayLost, whatever its consequences were, if Ray itself is gone: its processes cannot be asked then."""
        try:
            if self._watch.lost is None:
                super().__exit__(kind, error, trace)
        finally:
            self._watch.stop()
            if self._watch.lost is not None:
                raise self._watch.lost from error


class HostActor:
    """The process of one host: passes calls on to `HostProcess` and answers when they are done."""

    def __init__(
        self, name: str, namespace: str, environment: Mapping[str, str], threads: int, paths: Sequence[str], trace: bool
    ) -> None:
        self._records = prepare_process(environment, threads, paths, trace)
        watch_head()
        self._link = RayTransport(namespace)
        self._waiting = ThreadPoolExecutor(WAITING_CALLS, thread_name_prefix="call")
        self._listener = self._link.listen(name, self._take)
        self._process: HostProcess
        self._meeting: Rendezvous | None = None

    async def ping(self) -> None:
        return None

    async def accelerators(self) -> list[str]:
        return [str(name) for name in ray.get_gpu_ids()]

    async def see(self, accelerators: str) -> None:
        os.environ[VISIBLE_DEVICES] = accelerators

    async def greet(self) -> Answer:
        return await self._answer(lambda: ProcessInfo(os.getpid(), self._link.address(), code_fingerprint()))

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
            link, components = self._link, kwargs["components"]
            self._process = HostProcess(seat, components, world_sizes, seed, link, self._elsewhere)

        return await self._answer(build)

    async def meet(self, world_size: int) -> Answer:
        def meet() -> tuple[str, int]:
            self._meeting = Rendezvous(self._link.address(), world_size)
            return self._link.address(), self._meeting.port

        return await self._answer(meet)

    async def join(self, meeting: tuple[str, int], rank: int, size: int, timeout_s: float, cuda: bool) -> Answer:
        return await self._answer(partial(join_group, self._meeting or meeting, rank, size, timeout_s, cuda))

    async def construct(self) -> Answer:
        return await self._answer(self._process.construct)

    async def call(self, member: tuple[str, int], number: int, method: str, arguments: Packed) -> Answer:
        return await asyncio.wrap_future(self._take("call", member, number, method, arguments))

    async def channel(self, address: ChannelAddress, operation: str, arguments: tuple[Any, ...], who: str) -> Answer:
        return await asyncio.wrap_future(self._take("channel", address, operation, arguments, who))

    async def fetch(self, number: int | None) -> Answer:
        """The answer to a call that came through a socket."""
        lost = None, pack_error(WorkerDied("it lives, but its connection to another process broke"))
        return self._listener.fetch(number) or lost

    async def fail(self, label: str | None, error: bytes, *before: int) -> Answer:
        if not hasattr(self, "_process"):
            return [], None
        return await self._answer(lambda: self._registry.fail(label, unpack_error(error), *before))

    async def export(self, token: WeightsToken, *how: Any) -> Answer:
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
    def _registry(self) -> Any:
        return self._process.names.registry

    def _take(self, method: str, *arguments: Any) -> Future[Answer]:
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

    async def _answer(self, function: Callable[[], Any]) -> Answer:
        """Runs in a thread, as it may wait."""
        return await asyncio.get_running_loop().run_in_executor(self._waiting, _answer_of, function)

    def _elsewhere(self, name: str) -> str:
        """For the message of a missed deadline: what the runner or a rank of another host does."""
        if name == RUNNER:  # it waits here in a thread that bears its name
            waiting = [waiting_on(thread.ident) for thread in threading.enumerate() if thread.name == RUNNER]
            return f"waiting on {waiting[0]}" if any(waiting) else "busy"
        try:
            return str(self._link.ask(self._homes[name], "doing", name, limit=1.0))
        except PlatformError:
            return "dead"

    def _fetched(self) -> list[Record]:
        return [self._records.popleft() for _ in range(len(self._records))]


class RayActors:
    """The actors of one run. `patience`: seconds to wait for what other runs hold; `trace`: see `RayRuntime`."""

    def __init__(self, patience: float, trace: bool) -> None:
        self.link = RayTransport(f"rl-platform-{uuid.uuid4().hex[:12]}")
        self._patience, self._trace = patience, trace
        self._group: PlacementGroup | None = None
        self._actors: dict[str, Any] = {}
        self._recipes: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {}  # by host: of its actor
        self._visible: dict[str, str] = {}

    def start(self, hosts: Sequence[PlacedHost]) -> Mapping[str, Send]:
        parts = reservation.by_node(hosts)
        wanted = [reservation.resources_for(part) for part in parts]
        bundles, labels = ([getattr(place, name) for place in wanted] for name in ("resources", "labels"))
        strategy = "STRICT_SPREAD" if len(parts) > 1 else "STRICT_PACK"
        self._group = placement_group(bundles, strategy, bundle_label_selector=labels if any(labels) else None)
        self._reserve(wanted)
        for index, part in enumerate(parts):
            self._start_node(part, index)
        for part in parts:
            self._show_accelerators(part)
        return {name: partial(self._send, name) for name in self._actors}

    def _start_node(self, hosts: Sequence[PlacedHost], bundle: int) -> None:
        """The hosts of one node share its cores; the first one stands for all accelerators that the run has there."""
        gpus = reservation.resources_for(hosts).resources.get("GPU", 0.0)
        for placed in hosts:
            environment = dict(reservation.environment_of(placed))
            own = {name: value for name, value in environment.items() if name != VISIBLE_DEVICES}
            options = {
                "namespace": self.link.namespace,
                "num_cpus": 0,
                "num_gpus": gpus if placed is hosts[0] else 0,
                "max_restarts": 0,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, bundle),
                "runtime_env": {"env_vars": own} if own else None,  # before the process starts, for its loader
            }
            paths = [os.getcwd(), *sys.path]
            threads = reservation.threads_for(placed, hosts, torch.get_num_threads())
            self._recipes[placed.name] = options, (self.link.namespace, environment, threads, paths, self._trace)
            self.launch(placed.name, placed.name)

    def launch(self, host: str, name: str) -> Send:
        options, arguments = self._recipes[host]
        actor = self._actors[name] = ray.remote(HostActor).options(**options | {"name": name}).remote(name, *arguments)
        if host in self._visible:
            actor.see.remote(self._visible[host])  # before the calls that follow
        return partial(self._send, name)

    def _show_accelerators(self, hosts: Sequence[PlacedHost]) -> None:
        """The plan counts accelerators, Ray says which of the node's are this run's."""
        used = sorted({local for placed in hosts for local in placed.accelerators})
        if not used:
            return
        try:
            names = dict(zip(used, ray.get(self._actors[hosts[0].name].accelerators.remote()), strict=True))
        except RayActorError as error:
            raise typed(hosts[0].name, error) from error
        for placed in hosts:
            if placed.accelerators:
                self._visible[placed.name] = shown = ",".join(names[local] for local in placed.accelerators)
                self._actors[placed.name].see.remote(shown)  # before the calls that follow

    def stop(self, timeout: float) -> None:
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors = {}
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    def _send(self, host: str, method: str, *arguments: Any) -> Future[Any]:
        """Never blocks and never raises: the future does."""
        future: Future[Any] = Future()
        actor = self._actors.get(host)
        if actor is None:
            future.set_exception(WorkerDied(f"the process of {host} was ended"))
        else:
            self.link.send(host, actor, method, arguments, partial(answered, future, partial(typed, host)))
        return future

    def _reserve(self, wanted: Sequence[reservation.NodeResources]) -> None:
        """Waits for the placement group: one that cannot be met would stay pending for ever."""
        assert self._group is not None
        nodes = [
            reservation.NodeResources(node["Resources"], node.get("Labels", {}))
            for node in ray.nodes()
            if node["Alive"]
        ]
        if not reservation.fits(wanted, nodes):
            self.stop(0)
            raise reservation.too_large(wanted, nodes)
        if not self._group.wait(self._patience):
            self.stop(0)
            free = f"{ray.available_resources().get('GPU', 0):g} GPUs of the cluster are free"
            needed = f"the placement needs {reservation.listed(wanted)}"
            raise Deadline(f"{needed}, which others still hold after {self._patience:g} s: {free}")


def _answer_of(function: Callable[[], Any]) -> Answer:
    try:
        return function(), None
    except Exception as error:
        return None, pack_error(error)
