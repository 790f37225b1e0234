"""A runtime whose hosts are processes: starts them together, connects their ranks by channels, ends them all.

Which system starts the processes and carries calls is a `Fleet`'s business. Not covered: starting a process again.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from rl_platform.errors import Deadline, PlacementError, PlatformError, Problem, WorkerDied
from rl_platform.placement.scheduler import LEARNERS
from rl_platform.runtime import ComponentSpec, Placement
from rl_platform.runtime.channel import waiting_on
from rl_platform.runtime.fingerprint import code_fingerprint
from rl_platform.runtime.group import WorkerGroup
from rl_platform.runtime.host import PlacedHost
from rl_platform.runtime.lifecycle import (
    RUNNER,
    SHUTDOWN_S,
    ShutsDown,
    check_components,
    labels_of,
    raise_first,
    stop_after,
)
from rl_platform.runtime.process import Names
from rl_platform.runtime.remote_channel import Address, Link, RemoteChannel
from rl_platform.runtime.remote_worker import RemoteHost, RemoteWorker, Send, SharedArguments, relay
from rl_platform.runtime.wire import pack_error, unpack_error
from rl_platform.tracing import Span

START_S = 300.0  # for a process to come up and import its libraries
NOTICE_S = 3.0  # for processes to hear that the run failed


@dataclass(frozen=True)
class Greeting:
    """What a process says of itself when it has come up."""

    pid: int
    address: str
    code: str


class Fleet(Protocol):
    """The system that runs the processes."""

    link: Link

    def start(self, hosts: Sequence[PlacedHost]) -> Mapping[str, Send]:
        """One process for each host, by its name; ways to call it. Raises PlacementError or Deadline."""

    def stop(self, timeout: float) -> None:
        """Ends every process it started and gives back what it reserved; again: does nothing."""


class RemoteRuntime(ShutsDown):
    """Runs a placement's hosts as processes of `fleet`; a context manager that shuts down at its end.

    deadline_s: the longest wait for a call or a channel, in seconds; seed: the run's.
    """

    def __init__(self, placement: Placement, deadline_s: float, seed: int, fleet: Fleet) -> None:
        self._placement, self._seed, self._fleet = placement, seed, fleet
        self._deadline_s = min(deadline_s, threading.TIMEOUT_MAX)
        self._members = [member for host in placement.hosts for member in host.members]
        self._names = Names(RUNNER, fleet.link, self._status)
        self._numbers = itertools.count()
        self._channels: dict[str, RemoteChannel] = {}
        self._closed: set[int] = set()
        self._hosts: dict[str, RemoteHost] = {}
        self._death = threading.Event()
        self._started = self._stopped = False

    def start(self, components: Mapping[str, ComponentSpec]) -> dict[str, WorkerGroup]:
        """Starts all processes and constructs every rank, hosts side by side, the ranks of a host in order.

        Raises PlacementError if the processes cannot be placed or `components` and the placement name different ones,
        and what a constructor raised, typed as a call's error; whatever was started is ended then.
        """
        if self._started:
            raise RuntimeError("a runtime starts its components once: make a new one")
        check_components({name for name, _ in self._members}, components)
        self._started = True
        try:
            sends = self._fleet.start(self._placement.hosts)
            for placed in self._placement.hosts:
                self._hosts[placed.name] = RemoteHost(placed.name, placed.members, sends[placed.name], self._on_death)
            self._greet()
            self._build(components)
            self._form_groups()
            self._all("construct", dict.fromkeys(self._hosts, ()), START_S)
            for host in self._hosts.values():
                host.watch()
        except BaseException as error:
            stop_after(error, self.fail, self.shutdown)
            raise
        packed = SharedArguments(self._names)
        workers = {
            member: RemoteWorker(host, member, self._names, packed, self._on_failure, self._peers_of(member[0]))
            for host in self._hosts.values()
            for member in host.members
        }
        return {
            name: WorkerGroup(
                name,
                spec.cls,
                {rank: workers[name, rank] for rank in range(self._placement.world_size(name))},
                self._deadline_s,
            )
            for name, spec in components.items()
        }

    def channel(
        self, name: str, capacity: int, producers: Iterable[str] = (), consumers: Iterable[str] = ()
    ) -> RemoteChannel:
        """A new channel of `capacity` items. A closed channel's name may be used again.

        It lives with its first consumer, else its first producer, else in the first host: between components of one
        host it passes references. Names are those of `LocalRuntime.channel`, and so are the errors.
        """
        if self._stopped:
            raise WorkerDied(f"channel '{name}' was asked for after the runtime was shut down")
        if capacity < 1:
            raise ValueError(f"channel '{name}': capacity {capacity} must be at least 1")
        sides = [labels_of(name, names, self._members) for names in (producers, consumers)]
        before = self._channels.get(name)
        if before is not None:
            if not before.closed:
                raise ValueError(f"channel '{name}' exists already and is open: close it first or choose another name")
            self._hosts[before.address.home].send("forget", before.address)
        home = self._home(sides[1], sides[0])
        address = Address(next(self._numbers), name, home, capacity, self._deadline_s, sides[0], sides[1])
        channel = self._channels[name] = RemoteChannel(address, self._names.exchange)
        return channel

    def fail(self, error: PlatformError) -> None:
        """Closes every channel with `error`, so that nobody waits for data that will not come."""
        alive = [host for host in self._hosts.values() if host.death is None]
        answers = [host.send("fail", None, pack_error(error)) for host in alive]
        raise_first([failure for found in _answers(answers, NOTICE_S) for failure in found])

    def spans(self) -> list[Span]:
        """What the hosts recorded for the timeline; they record no more then."""
        alive = [] if self._stopped else [host for host in self._hosts.values() if host.death is None]
        return [span for found in _answers([host.send("spans") for host in alive], NOTICE_S) for span in found]

    def shutdown(self, timeout: float = SHUTDOWN_S) -> None:
        """Closes channels and components, then ends every process; at most about 2 * `timeout` seconds.

        Raises the first error of a `close`, or Deadline naming ranks that were still busy when their process was ended.
        """
        if self._stopped:
            return
        self._stopped = True
        hosts = [host for host in self._hosts.values() if host.death is None]
        for host in self._hosts.values():
            host.stopping = True
        failures: list[PlatformError] = []
        try:
            asked = {host: host.send("shutdown", timeout) for host in hosts}
            for found, records in _answers(list(asked.values()), 2 * timeout + NOTICE_S):
                failures += [failure for data in found for failure in _platform_errors(unpack_error(data))]
                relay(records)
            late = [name for host, answer in asked.items() if not answer.done() for name in host.labels]
            failures += [Deadline(f"{name} did not stop in time; its process was ended") for name in late]
        finally:
            self._fleet.stop(timeout)
        raise_first(failures)

    def _greet(self) -> None:
        greetings: dict[str, Greeting] = self._all("greet", dict.fromkeys(self._hosts, ()), START_S)
        own = code_fingerprint()
        problems = [
            Problem("cluster.address", f"{name} at {found.address} runs other code", value=found.code, allowed=own)
            for name, found in greetings.items()
            if found.code != own
        ]
        if problems:
            raise PlacementError(problems)

    def _build(self, components: Mapping[str, ComponentSpec]) -> None:
        world_sizes = {name: self._placement.world_size(name) for name in components}
        homes = {name: host.name for host in self._hosts.values() for name in host.labels}
        packed = SharedArguments(self._names)((), {"components": dict(components)})
        self._all(
            "build",
            {placed.name: (placed, packed, world_sizes, self._seed, homes) for placed in self._placement.hosts},
            START_S,
        )

    def _form_groups(self) -> None:
        """A process group for every set of hosts whose learners have several ranks."""
        groups: dict[tuple[str, ...], list[PlacedHost]] = {}
        for placed in self._placement.hosts:
            names = tuple(name for name, _ in placed.members)
            if set(names) & set(LEARNERS):
                groups.setdefault(names, []).append(placed)
        for hosts in groups.values():
            if len(hosts) > 1:
                self._form_group(hosts)

    def _form_group(self, hosts: Sequence[PlacedHost]) -> None:
        first, size = hosts[0].name, len(hosts)
        meeting = self._all("meet", {first: (size,)}, START_S)[first]
        cuda = bool(hosts[0].accelerators)
        self._all(
            "join",
            {placed.name: (meeting, rank, size, self._deadline_s, cuda) for rank, placed in enumerate(hosts)},
            START_S,
        )

    def _all(self, method: str, arguments: Mapping[str, tuple[Any, ...]], timeout: float) -> dict[str, Any]:
        """The answers of these hosts by name. Raises the first error, or Deadline naming who did not answer."""
        asked = {name: self._hosts[name].send(method, *values) for name, values in arguments.items()}
        concurrent.futures.wait(asked.values(), timeout, concurrent.futures.FIRST_EXCEPTION)
        for future in asked.values():
            if future.done() and (error := future.exception()) is not None:
                raise error
        late = [name for name, future in asked.items() if not future.done()]
        if late:
            raise Deadline(f"{', '.join(late)} did not answer to {method} within {timeout:g} s")
        return {name: future.result() for name, future in asked.items()}

    def _home(self, *sides: Sequence[str]) -> str:
        for labels in sides:
            for host in self._hosts.values():
                if set(host.labels) & set(labels):
                    return host.name
        return next(iter(self._hosts))

    def _status(self, name: str) -> str:
        if name == RUNNER:
            waiting = waiting_on(threading.main_thread().ident)
            return f"waiting on {waiting}" if waiting else "busy"
        return next((host.doing(name) for host in self._hosts.values() if name in host.labels), "not started")

    def _on_failure(self, name: str, error: PlatformError) -> None:
        """Tells all processes; waits for none, as this runs where answers arrive."""
        data = pack_error(error)
        for host in self._hosts.values():
            if host.death is None:
                host.send("fail", name, data)

    def _on_death(self, host: RemoteHost, error: WorkerDied) -> None:
        self._death.set()
        for name in host.labels:
            self._on_failure(name, error)

    def _peers_of(self, component: str) -> Callable[[float], WorkerDied | None]:
        """How ranks of this component learn that one they compute with has died."""
        together = component in LEARNERS and self._placement.world_size(component) > 1
        return self._lost_peer if together else lambda patience: None

    def _lost_peer(self, patience: float) -> WorkerDied | None:
        """The death of a process of this run, if one becomes known within `patience` seconds."""
        if not self._death.wait(patience):
            return None
        return next((host.death for host in self._hosts.values() if host.death is not None), None)


def _answers(asked: Sequence[Future[Any]], timeout: float) -> list[Any]:
    """What those who answered in time said; a process that is gone says nothing."""
    until = time.monotonic() + timeout
    concurrent.futures.wait(asked, max(0.0, until - time.monotonic()))
    done = [future for future in asked if future.done()]
    for future in done:
        if (error := future.exception()) is not None and not isinstance(error, WorkerDied):
            raise error
    return [future.result() for future in done if future.exception() is None]


def _platform_errors(error: BaseException) -> list[PlatformError]:
    return [error] if isinstance(error, PlatformError) else []
