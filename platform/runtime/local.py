"""The local runtime: every host of the placement runs in this process, as threads.

For a laptop or one GPU: breakpoints work and nothing is serialised. Python code of all components shares one
interpreter lock, so components overlap where they compute in native code or wait. Not covered: ranks that need a
process of their own.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rl_platform.errors import PlatformError, WorkerDied
from rl_platform.placement.scheduler import Placement
from rl_platform.runtime import SHUTDOWN_S, START_S, ComponentSpec, Runtime
from rl_platform.runtime.channel import Channel
from rl_platform.runtime.host import RankThread, start_ranks
from rl_platform.runtime.lifecycle import (
    RUNNER,
    check_components,
    close_channels,
    in_stages,
    labels_of,
    raise_first,
    runner_status,
    stop_ranks,
)
from rl_platform.runtime.worker_group import Handle, WorkerGroup, worker_groups
from rl_platform.tracing import TraceSpan

logger = logging.getLogger(__name__)


class LocalRuntime(Runtime):
    """Runs a placement's components as threads.

    placement: which component ranks share a host; deadline_s: the longest wait for a call or a channel, in seconds;
    seed: the run's; start_timeout_s: the longest construction of a rank.
    """

    restarts = 0

    def __init__(self, placement: Placement, deadline_s: float, seed: int, start_timeout_s: float = START_S) -> None:
        self._placement, self._start_timeout_s = placement, min(start_timeout_s, threading.TIMEOUT_MAX)
        self._deadline_s = min(deadline_s, threading.TIMEOUT_MAX)
        self._seed = seed
        self._members = [member for host in placement.hosts for member in host.members]
        self._ranks: dict[tuple[str, int], RankThread] = {}
        self._channels: dict[str, Channel[Any]] = {}
        self._stopped = False

    def start(self, components: Mapping[str, ComponentSpec]) -> dict[str, WorkerGroup]:
        """Constructs every component rank in the order of `in_stages`, each in its own thread.

        Ranks that are constructed `beside` others start first; the others follow one after the other.

        Raises PlacementError if `components` and the placement name different components, and what a constructor
        raised, typed as a call's error; whatever was started is closed then.
        """
        if self._stopped or self._ranks:
            raise RuntimeError("a runtime starts its components once: make a new one")
        check_components({name for name, _ in self._members}, components)
        world_sizes = {name: self._placement.world_size(name) for name in components}
        try:
            for placed in self._placement.hosts:
                self._ranks |= start_ranks(placed, components, world_sizes, self._seed, self._on_failure)
            groups = worker_groups(components, self._ranks, self._deadline_s)
            for stage in in_stages(self._placement.hosts):
                members = [*itertools.chain(*stage.values())]
                beside = [self._construct(*member) for member in members if components[member[0]].beside]
                for member in members:
                    if not components[member[0]].beside:
                        self._construct(*member).wait()
                for handle in beside:
                    handle.wait()
        except BaseException as error:
            self.shutdown_after(error)
            raise
        return groups

    def _construct(self, name: str, rank: int) -> Handle[None]:
        thread = self._ranks[name, rank]
        return Handle(f"{name}.__init__", [thread], [thread.construct()], self._start_timeout_s)

    def channel(
        self, name: str, capacity: int, producers: Iterable[str] = (), consumers: Iterable[str] = ()
    ) -> Channel[Any]:
        """Returns a new channel of `capacity` items. A closed channel's name may be used again.

        producers and consumers: components (all their ranks), single ranks as `rollout[1]`, or `runner`, the main
        thread. They are named in messages; when a call of one of them fails, the channel is closed with its error.
        Raises ValueError for a name that is not placed or a channel that is still open.
        """
        if self._stopped:
            raise WorkerDied(f"channel '{name}' was requested after the runtime was shut down")
        if name in self._channels and not self._channels[name].closed:
            raise ValueError(f"channel '{name}' exists already and is open: close it first or choose another name")
        puts, gets = (labels_of(name, names, self._members) for names in (producers, consumers))
        channel: Channel[Any] = Channel(name, capacity, self._deadline_s, puts, gets, self._status)
        self._channels[name] = channel
        return channel

    def restartable(self, component: str) -> bool:
        """Returns False: threads end with their process."""
        return False

    def restart(self, error: WorkerDied, settle: Callable[[], None]) -> list[tuple[str, int]]:
        raise error

    def fail(self, error: PlatformError) -> None:
        """Closes every channel with `error`, so that no rank waits for data that will not come."""
        raise_first(close_channels(list(self._channels.values()), error))

    def spans(self) -> list[TraceSpan]:
        """Returns nothing: all threads record in this process."""
        return []

    def shutdown(self, timeout: float = SHUTDOWN_S) -> None:
        """Closes channels, calls the components' `close` in reverse order of construction and joins all threads.

        Queued calls fail with WorkerDied. Waits at most `timeout` seconds for running calls and as long again for
        `close`; then raises the first error of a `close`, or Deadline naming the threads that are still busy and were
        abandoned. Calling it again does nothing.
        """
        if self._stopped:
            return
        self._stopped = True
        failures = close_channels(list(self._channels.values()), None)
        failures += stop_ranks(self._ranks.values(), timeout)
        for channel in self._channels.values():
            if depth := channel.depth:
                logger.warning("channel '%s' was shut down with %d items that were not received", channel.name, depth)
        raise_first(failures)

    def _status(self, name: str) -> str:
        if name == RUNNER:
            return runner_status()
        return next((rank.doing() for rank in list(self._ranks.values()) if rank.label == name), "not started")

    def _on_failure(self, name: str, error: PlatformError) -> None:
        channels = list(self._channels.values())
        theirs = [channel for channel in channels if name in channel.producers or name in channel.consumers]
        raise_first(close_channels(theirs, error))
