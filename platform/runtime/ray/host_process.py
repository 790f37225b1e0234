"""What runs inside the process of one host: its ranks, the channels that live here, the weights it published.

Calls of a rank run in the order of their numbers, whatever order they arrive in. Channels and published weights are
sent by reference. Not covered: how calls reach the process, see `host_actor`.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from rl_platform.acceleration import wait_passively_when_crowded
from rl_platform.errors import PlatformError, WorkerDied
from rl_platform.garbage import collect_as_usual, collect_rarely
from rl_platform.records import Weights
from rl_platform.runtime.channel import Channel
from rl_platform.runtime.cpu import keep_freed_memory
from rl_platform.runtime.host import ComponentSpec, HostRanks, PlacedHost
from rl_platform.runtime.lifecycle import raise_first, stop_ranks
from rl_platform.runtime.ray.channel_proxy import ChannelAddress, ChannelProxy, ChannelRegistry
from rl_platform.runtime.ray.serialization import Answer, Packed, pack, pack_error, unpack
from rl_platform.runtime.weights.base import WeightsToken
from rl_platform.runtime.weights.publications import Publications
from rl_platform.tracing import recorder

if TYPE_CHECKING:
    from rl_platform.runtime.ray.transport import RayTransport

logger = logging.getLogger(__name__)

T = TypeVar("T")
Member = tuple[str, int]
Timings = dict[str, tuple[int, float]]
Record = tuple[str, int, str]  # logger, level, message


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
    `receives`: a component of this process may read what is published here."""

    def __init__(
        self, here: str, transport: RayTransport, status: Callable[[str], str], receives: bool = False
    ) -> None:
        self.transport = transport
        self.registry = ChannelRegistry(here, transport, self, status)
        self.weights = Publications(here, transport, receives)

    def token(self, value: object) -> object | None:
        if isinstance(value, Channel | ChannelProxy):
            return getattr(value, "address", None)
        if isinstance(value, WeightsToken):
            return value
        return self.weights.publish(value) if isinstance(value, Weights) else None

    def resolve(self, token: ChannelAddress | WeightsToken) -> object:
        return self.registry.channel(token) if isinstance(token, ChannelAddress) else self.weights.resolve(token)


class RecordBuffer(logging.Handler):
    """Keeps warnings and errors until the runner fetches them."""

    def __init__(self, records: deque[Record]) -> None:
        super().__init__(logging.WARNING)
        self._records = records

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append((record.name, record.levelno, record.getMessage()))


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
    """The ranks of one host. `transport`: calls to other hosts; `status`: the state of a rank of another process."""

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
        self.host = HostRanks(placed, specs, world_sizes, seed, self._on_failure)
        self._labels = {rank.label: rank for rank in self.host.ranks.values()}
        self._order = threading.Lock()
        self._next: dict[Member, int] = defaultdict(int)
        self._early: dict[Member, dict[int, Callable[[], None]]] = defaultdict(dict)

    def construct(self) -> None:
        """All components, one after the other in the placement's order: the end of this process's start.

        Raises what a constructor raised, typed.
        """
        for rank in self.host.ranks.values():
            rank.construct().result()
        collect_as_usual()

    def call(self, member: Member, number: int, method: str, arguments: Packed) -> Future[Answer]:
        """Queues call `number` (from 0) of a rank; the future never raises."""
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

        def run(component: object) -> Packed:
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

    def export(self, token: WeightsToken, transfer: str, request: object) -> object:
        """Hands out weights that a rank of this process published, see `Publications.export`."""
        return self.names.weights.export(token, transfer, request, self._run_in_turn)

    def _run_in_turn(self, label: str, function: Callable[[], T]) -> Future[T]:
        return self._labels[label].run("send weights", lambda _: function())

    def status(self, name: str) -> str:
        """The state of a rank, of this or another process."""
        rank = self._labels.get(name)
        return rank.doing() if rank is not None else self._remote_status(name)

    def pulse(self) -> dict[str, tuple[str, tuple[int, int, str]]]:
        """What each rank does and how far it is: (done, total, unit)."""
        states = {}
        for name, rank in self._labels.items():
            progress = rank.progress()
            states[name] = rank.doing(), (progress.done, progress.total, progress.unit)
        return states

    def shutdown(self, timeout: float) -> list[PlatformError]:
        """Closes channels and components, each within `timeout` seconds; what went wrong."""
        failures = self.names.registry.fail(None, None)
        return failures + stop_ranks(list(self.host.ranks.values()), timeout)

    def _on_failure(self, name: str, error: PlatformError) -> None:
        raise_first(self.names.registry.fail(name, error))
