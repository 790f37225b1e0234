"""What runs inside the process of one host: its ranks, the channels that live here, the weights it published.

Knows nothing of how calls arrive. Calls of a rank run in the order of their numbers, whatever order they arrive in.
Published weights are sent by reference: in this process they stay the very tensors, another process asks for a copy,
which is made between two calls of the rank that published them.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rl_platform.accel.crowded_cores import wait_passively_when_crowded
from rl_platform.errors import PlatformError, WorkerDied, WorkerError
from rl_platform.garbage import collect_as_usual, collect_rarely
from rl_platform.records import Weights
from rl_platform.runtime.channel import Channel
from rl_platform.runtime.cpu import keep_freed_memory
from rl_platform.runtime.host import ComponentSpec, Host, PlacedHost
from rl_platform.runtime.lifecycle import RUNNER, raise_first, stop_ranks
from rl_platform.runtime.ray.channel_proxy import ChannelAddress, ChannelProxy, ChannelRegistry
from rl_platform.runtime.ray.serialization import Answer, Packed, pack, pack_error, unpack
from rl_platform.runtime.waits import caller
from rl_platform.runtime.weights.base import (
    MemoryManifest,
    StoreManifest,
    WeightsToken,
    publish,
    publish_gathered,
    read,
    receive,
    show,
)
from rl_platform.runtime.weights.group import WeightGroup, WeightSender, WeightsOffer, described
from rl_platform.runtime.weights.memory import MemoryReader, MemoryWriter, node_name
from rl_platform.tracing import recorder

if TYPE_CHECKING:
    from rl_platform.runtime.ray.transport import RayTransport

logger = logging.getLogger(__name__)

Member = tuple[str, int]
Timings = dict[str, tuple[int, float]]
Record = tuple[str, int, str]  # logger, level, message
EXPORT_S = 600.0  # longest wait for a rank to hand out its weights


@dataclass(frozen=True)
class ProcessInfo:
    """What a process reports when it has started."""

    pid: int
    address: str
    code: str


@dataclass(frozen=True)
class CallResult:
    """How a call ended: its packed result or its packed error, and the rank's timings so far."""

    result: Packed | None
    error: bytes | None
    timings: Timings


class NamedReferences:
    """What travels by name: channels and published weights. `here`: this host, or `runner`, which hosts nothing.
    `receives`: somebody here may want to read what is published here."""

    def __init__(
        self, here: str, transport: RayTransport, status: Callable[[str], str], receives: bool = False
    ) -> None:
        self.here, self.transport, self.receives = here, transport, receives
        self._stored: dict[str, tuple[int, StoreManifest]] = {}
        self.registry = ChannelRegistry(here, transport, self, status)
        self._published: dict[str, tuple[int, Any]] = {}
        self._count = 0
        self._received: dict[tuple[str, str], dict[str, torch.Tensor]] = {}
        self._reader = MemoryReader()
        self._closed: set[str] = set()  # hosts whose memory this process may not read

    def token(self, value: Any) -> Any | None:
        if isinstance(value, Channel | ChannelProxy):
            return getattr(value, "address", None)
        if isinstance(value, WeightsToken):
            return value
        if isinstance(value, Weights):
            self._count += 1
            token = WeightsToken(self.here, caller(), self._count, value.version, value.delta, node=node_name())
            if value.gathered is not None:
                keeps = self.receives or (value.offered and value.stores)  # to send it when somebody asks
                if not keeps:
                    self._pass_on(value, value.gathered)
                    return replace(token, held=False)
                state = {name: tensor for names, tensor in value.gathered() for name in names}
                value = replace(value, state=state, gathered=None)
            self._published[caller()] = (self._count, value)
            return replace(token, **described(value.state)) if value.offered else token
        return None

    def _pass_on(self, value: Weights, gathered: Callable[[], Iterator[tuple[Sequence[str], torch.Tensor]]]) -> None:
        """Into the object store, tensor by tensor; no process keeps them. Ranks that do not store help to gather."""
        if not value.stores:
            deque(gathered(), maxlen=0)
            return
        _, before = self._stored.pop(caller(), (0, None))
        if not value.delta:
            before = None  # frees the room of the earlier ones
        manifest = publish_gathered(gathered(), self.transport, before)
        self._stored[caller()] = (self._count, manifest)

    def stored(self, token: WeightsToken) -> StoreManifest | None:
        """Where weights are that were put into the object store when they were published."""
        number, manifest = self._stored.get(token.label, (0, None))
        return manifest if number == token.number else None

    def resolve(self, token: Any) -> Any:
        if isinstance(token, ChannelAddress):
            return self.registry.channel(token)
        if (here := token.at(self.here)) is not None:
            return self.published(here)
        if self.here == RUNNER:
            return token
        return self.fetched(token) if token.tensors is None else self.offered(token)

    def published(self, token: WeightsToken) -> Any:
        """The weights themselves. Raises WorkerError if others were published since."""
        number, weights = self._published.get(token.label, (0, None))
        if number != token.number:
            raise WorkerError(f"weights version {token.version} of {token.label} were replaced before they were read")
        return weights

    def fetched(self, token: WeightsToken) -> Weights:
        """Weights that another process published: where they lie if that is on this node, else a copy; with `delta`
        it is written over by the next one."""
        near = token.node == node_name() != "" and not token.delta and token.host not in self._closed
        manifest = self._exported(token, near)
        if isinstance(manifest, MemoryManifest):
            try:
                return read(token, manifest, self._reader)
            except OSError as error:
                logger.warning(
                    "weights of %s take a slower way than memory, which cannot be read: %s", token.label, error
                )
                self._closed.add(token.host)
                manifest = self._exported(token, near=False)
        whose = caller(), token.label
        found = receive(token, manifest, self.transport, self._received.get(whose) if token.delta else None)
        if token.delta:
            self._received[whose] = dict(found.state)
        return found

    def _exported(self, token: WeightsToken, near: bool) -> Any:
        return self.transport.ask(token.host, "export", token, None, near, limit=EXPORT_S)

    def offered(self, token: WeightsToken) -> WeightsOffer:
        """The weights that another process published, to be fetched or sent."""
        fetch = partial(self.fetched, token)
        send = partial(self.transport.ask, token.host, "export", token, limit=EXPORT_S)
        return WeightsOffer(token.version, token.tensors or (), token.device, self.transport.address(), fetch, send)


class RecordBuffer(logging.Handler):
    """Keeps warnings and errors until the runner fetches them."""

    def __init__(self, kept: deque[Record]) -> None:
        super().__init__(logging.WARNING)
        self._kept = kept

    def emit(self, record: logging.LogRecord) -> None:
        self._kept.append((record.name, record.levelno, record.getMessage()))


def prepare_process(environment: Mapping[str, str], threads: int, paths: Sequence[str], trace: bool) -> deque[Record]:
    """Once, before anything is computed here: environment, torch's threads, search paths (the first one is the run's
    folder), garbage collection. Returns where this process's warnings and errors will be."""
    collect_rarely()
    os.environ.update(environment)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if torch.get_num_threads() != threads:  # set_num_threads makes MKL share the smallest product among all threads
        torch.set_num_threads(threads)
    keep_freed_memory()
    wait_passively_when_crowded()
    recorder.on = trace
    sys.path += [path for path in paths if path not in sys.path]
    if Path(paths[0]).is_dir():
        os.chdir(paths[0])
    records: deque[Record] = deque(maxlen=1000)
    logging.getLogger("rl_platform").addHandler(RecordBuffer(records))
    return records


class HostProcess:
    """The ranks of one host. `transport`: calls to other hosts; `status`: what a rank elsewhere does now."""

    def __init__(
        self,
        placed: PlacedHost,
        specs: Mapping[str, ComponentSpec],
        world_sizes: Mapping[str, int],
        seed: int,
        transport: RayTransport,
        status: Callable[[str], str],
    ) -> None:
        self._remote_status = status
        receives = any(hasattr(specs[component].cls, "receive") for component, _ in placed.members)
        self.names = NamedReferences(placed.name, transport, self.status, receives)
        self.host = Host(placed, specs, world_sizes, seed, self._on_failure)
        self._labels = {rank.label: rank for rank in self.host.ranks.values()}
        self._order = threading.Lock()
        self._next: dict[Member, int] = defaultdict(int)
        self._early: dict[Member, dict[int, Callable[[], None]]] = defaultdict(dict)
        self._exports: dict[int, dict[bool, Future[Any]]] = {}  # of the last publication that was asked for
        self._writers: dict[str, MemoryWriter] = defaultdict(MemoryWriter)
        self._sender = WeightSender()

    def construct(self) -> None:
        """All components, one after the other in the placement's order: the end of this process's start.

        Raises what a constructor raised, typed.
        """
        for rank in self.host.ranks.values():
            rank.construct().result()
        collect_as_usual()

    def call(self, member: Member, number: int, method: str, arguments: Packed) -> Future[Answer]:
        """Queues call `number` (from 0) of a rank; the future never raises, and has an Outcome."""
        answer: Future[Answer] = Future()
        with self._order:
            early = self._early[member]
            early[number] = partial(self._start, member, method, arguments, answer)
            while (run := early.pop(self._next[member], None)) is not None:
                self._next[member] += 1
                run()
        return answer

    def _start(self, member: Member, method: str, arguments: Packed, answer: Future[Answer]) -> None:
        rank = self.host.ranks[member]

        def run(component: Any) -> Packed:
            args, kwargs = unpack(arguments, self.names, copy=True)
            result = getattr(component, method)(*args, **kwargs)
            self.names.registry.flush(rank.label)  # before the caller learns that the items are there
            return pack(result, self.names)

        def finish(done: Future[Packed]) -> None:
            error = done.exception()
            packed = None if error is not None else done.result()
            answer.set_result((CallResult(packed, None if error is None else pack_error(error), rank.timings()), None))

        try:
            rank.run(method, run).add_done_callback(finish)
        except WorkerDied as error:
            answer.set_result((CallResult(None, pack_error(error), rank.timings()), None))

    def export(
        self, token: WeightsToken, group: WeightGroup | None = None, near: bool = False
    ) -> StoreManifest | MemoryManifest | list[bytes]:
        """Where the weights are: in memory of this node for those who are `near`, else in the object store; put there
        once, in turn with the rank's other calls. With a group they are sent to that instead: the checksums, if it
        wants any."""
        if group is not None:
            return self._labels[token.label].run("send weights", partial(self._send, token, group)).result()
        if (manifest := self.names.stored(token)) is not None:
            return manifest
        with self._order:
            before = self._exports
            if token.number not in before:
                self._exports = {token.number: {}}
            exports = self._exports[token.number]
            if near not in exports:
                last = next((of.get(False) for of in before.values()), None) if token.delta else None
                export = self._show if near else partial(self._publish, last)
                exports[near] = self._labels[token.label].run("send weights", lambda _: export(token))
            found = exports[near]
        return found.result()

    def _show(self, token: WeightsToken) -> MemoryManifest:
        return show(self.names.published(token).state, self._writers[token.label])

    def _publish(self, last: Future[StoreManifest] | None, token: WeightsToken) -> StoreManifest:
        before = last.result() if last is not None and last.exception() is None else None
        return publish(self.names.published(token).state, self.names.transport, before)

    def _send(self, token: WeightsToken, group: WeightGroup, _: Any) -> list[bytes]:
        return self._sender.send(self.names.published(token).state, token.tensors or (), group)

    def status(self, name: str) -> str:
        """What a rank does now, here or elsewhere."""
        rank = self._labels.get(name)
        return rank.doing() if rank is not None else self._remote_status(name)

    def pulse(self) -> dict[str, tuple[str, tuple[int, int, str]]]:
        """What each rank does and how far it is: (done, total, unit)."""
        found = {}
        for name, rank in self._labels.items():
            progress = rank.progress()
            found[name] = rank.doing(), (progress.done, progress.total, progress.unit)
        return found

    def shutdown(self, timeout: float) -> list[PlatformError]:
        """Closes channels and components, each within `timeout` seconds; what went wrong."""
        failures = self.names.registry.fail(None, None)
        return failures + stop_ranks(list(self.host.ranks.values()), timeout)

    def _on_failure(self, name: str, error: PlatformError) -> None:
        raise_first(self.names.registry.fail(name, error))
