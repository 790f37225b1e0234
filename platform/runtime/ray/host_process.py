"""The parts of a host's process: its preparation, the objects that are sent by name, its replies. See `host_actor`."""

from __future__ import annotations

import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rl_platform import acceleration, numerics
from rl_platform.garbage import collect_rarely
from rl_platform.records import Weights
from rl_platform.runtime.channel import Channel
from rl_platform.runtime.cpu import keep_freed_memory
from rl_platform.runtime.host import Progress
from rl_platform.runtime.ray.channel_proxy import ChannelAddress, ChannelProxy, ChannelRegistry
from rl_platform.runtime.ray.publications import Publications
from rl_platform.runtime.ray.serialization import Packed
from rl_platform.runtime.weights_token import WeightsToken
from rl_platform.tracing import recorder

if TYPE_CHECKING:
    from rl_platform.runtime.ray.transport import RayTransport

Member = tuple[str, int]
Timings = dict[str, tuple[int, float]]
Record = tuple[str, int, str]  # logger, level, message
RankState = tuple[str, Progress]  # the call of a rank, and its progress


@dataclass(frozen=True)
class ProcessInfo:
    """The report of a process that has started. machine: the name of its machine or container."""

    pid: int
    machine: str
    address: str
    code: str


@dataclass(frozen=True)
class CallResult:
    """The end of a call: its packed result or its packed error; the rank's timings and peak of memory so far."""

    result: Packed | None
    error: bytes | None
    timings: Timings
    memory_peak: int


class NamedReferences:
    """The objects that are sent by name: channels and published weights. `here`: this host, or `runner`, which hosts
    nothing. `receives`: a component of this process may read what is published here."""

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

    def resolve(self, token: object) -> object:
        if isinstance(token, ChannelAddress):
            return self.registry.channel(token)
        assert isinstance(token, WeightsToken)
        return self.weights.resolve(token)


class RecordBuffer(logging.Handler):
    """Keeps warnings and errors until the runner fetches them."""

    def __init__(self, records: deque[Record]) -> None:
        super().__init__(logging.WARNING)
        self._records = records

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append((record.name, record.levelno, record.getMessage()))


def prepare_process(
    environment: Mapping[str, str], threads: int, paths: Sequence[str], trace: bool, accelerated: bool
) -> deque[Record]:
    """Sets environment, torch's threads, search paths (the first one is the run's folder) and garbage collection.

    Called once, before anything is computed here. Returns where this process's warnings and errors will be.

    accelerated: the process has accelerators, so it computes little on CPUs. It returns freed memory; otherwise each
    process of a node would hold its peak memory.
    """
    collect_rarely()
    os.environ.update(environment)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if torch.get_num_threads() != threads:  # set_num_threads makes MKL share the smallest product among all threads
        torch.set_num_threads(threads)
    if accelerated:
        numerics.apply()
    else:
        keep_freed_memory()
    acceleration.find("wait_passively_when_crowded")
    recorder.on = trace
    sys.path += [path for path in paths if path not in sys.path]
    if Path(paths[0]).is_dir():
        os.chdir(paths[0])
    records: deque[Record] = deque(maxlen=1000)
    logging.getLogger("rl_platform").addHandler(RecordBuffer(records))
    return records
