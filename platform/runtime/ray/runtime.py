"""The Ray runtime: every host of the placement is a Ray actor. Starts them together, connects their ranks by channels,
ends them all.

`RayActors` starts the processes, `RayTransport` carries calls, `Restarts` decides which processes are started again
when they die. Not covered: what the ranks of such a process were doing and the weights they had, which the callers
give again; and starting or joining Ray, see `cluster_start.py`.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

from rl_platform.errors import Deadline, PlacementError, PlatformError, Problem, WorkerDied
from rl_platform.placement.layout import LEARNERS
from rl_platform.placement.scheduler import Host, Placement
from rl_platform.runtime import SHUTDOWN_S, START_S, ComponentSpec, Runtime
from rl_platform.runtime.lifecycle import (
    RUNNER,
    check_components,
    in_stages,
    labels_of,
    raise_first,
    runner_status,
)
from rl_platform.runtime.ray.actors import RayActors
from rl_platform.runtime.ray.channel_proxy import ChannelAddress, ChannelProxy
from rl_platform.runtime.ray.fingerprint import code_fingerprint
from rl_platform.runtime.ray.host_process import Member, NamedReferences, ProcessInfo
from rl_platform.runtime.ray.loss_watch import LauncherWatch
from rl_platform.runtime.ray.process_group import unreachable
from rl_platform.runtime.ray.restarts import Restarts
from rl_platform.runtime.ray.serialization import pack_error, unpack_error
from rl_platform.runtime.ray.worker_proxy import DEATH_NOTICE_S, ArgumentPacker, HostProxy, WorkerProxy, relay
from rl_platform.runtime.worker_group import WorkerGroup, worker_groups
from rl_platform.tracing import TraceSpan

log = logging.getLogger(__name__)

T = TypeVar("T")

STARTING_S = 60.0  # after which a warning says who is still starting; then after twice that, and so on
NOTICE_S = 3.0  # for processes to hear that the run failed
LOOK_S = 0.05
LOOK_AT_OTHERS_S = 1.0  # while a process starts
RESERVE_S = 60.0  # how long to wait for resources that others hold


class RayRuntime(Runtime):
    """Runs a placement's hosts as Ray actors.

    Ray is initialised already. Several runs on one cluster are independent. deadline_s: the longest wait for a call
    or a channel, in seconds; seed: the run's; trace: hosts record spans for the timeline until `spans`; restarts: see
    `Restarts`; start_timeout_s: the longest wait for a process to come up, import its libraries and build its models;
    collective_timeout_s: of a collective operation, None: deadline_s.
    """

    def __init__(
        self,
        placement: Placement,
        deadline_s: float,
        seed: int,
        trace: bool = False,
        restarts: int = 0,
        start_timeout_s: float = START_S,
        collective_timeout_s: float | None = None,
    ) -> None:
        self._placement, self._seed = placement, seed
        self._start_timeout_s, self._collective_timeout_s = start_timeout_s, collective_timeout_s or deadline_s
        self._actors = RayActors(min(deadline_s, RESERVE_S), trace)
        self._deadline_s = min(deadline_s, threading.TIMEOUT_MAX)
        self._members = [member for host in placement.hosts for member in host.members]
        self._names = NamedReferences(RUNNER, self._actors.transport, self._status)
        self._numbers = itertools.count()
        self._channels: dict[str, ChannelProxy] = {}
        self._hosts: dict[str, HostProxy] = {}
        self._workers: dict[Member, WorkerProxy] = {}
        self._notices: list[Future[object]] = []
        self._restarts = Restarts(restarts)
        self._started = self._stopped = False
        self._watch = LauncherWatch()

    def start(self, components: Mapping[str, ComponentSpec]) -> dict[str, WorkerGroup]:
        """Starts all processes and constructs every rank in the stages of `in_stages`.

        Hosts construct at the same time, the ranks of a host one after the other.

        A process without a learner that dies meanwhile is started again (`Restarts`). Raises PlacementError if the
        processes cannot be placed or `components` and the placement name different ones, and what a constructor raised,
        typed as a call's error; whatever was started is ended then.
        """
        if self._started:
            raise RuntimeError("a runtime starts its components once: make a new one")
        check_components({name for name, _ in self._members}, components)
        self._started = True
        try:
            sends = self._actors.start(self._placement.hosts)
            for placed in self._placement.hosts:
                self._hosts[placed.name] = HostProxy(placed.name, placed, sends[placed.name], self._on_death)
            packed = ArgumentPacker(self._names)
            self._workers = {
                member: WorkerProxy(host, member, self._names, packed, self._on_failure, self._peers_of(member[0]))
                for host in self._hosts.values()
                for member in host.members
            }
            self._packed = ArgumentPacker(self._names)((), {"components": dict(components)})
            self._greet(self._hosts)
            self._build(self._hosts.values())
            self._form_groups()
            for stage in in_stages(self._placement.hosts):
                self._all("construct", {name: (members,) for name, members in stage.items()})
            self._watch_over(self._hosts.values())
            self._start_again()
        except BaseException as error:
            self.shutdown_after(error)
            raise
        return worker_groups(components, self._workers, self._deadline_s)

    def channel(  # type: ignore[override]  # a proxy has the methods of a channel
        self, name: str, capacity: int, producers: Iterable[str] = (), consumers: Iterable[str] = ()
    ) -> ChannelProxy:
        """Returns a new channel of `capacity` items. A closed channel's name may be used again.

        It lives with its first consumer, else its first producer, else in the first host: between components of one
        host it passes references. Names are those of `LocalRuntime.channel`, and so are the errors.
        """
        if self._stopped:
            raise WorkerDied(f"channel '{name}' was requested after the runtime was shut down")
        if capacity < 1:
            raise ValueError(f"channel '{name}': capacity {capacity} must be at least 1")
        sides = [labels_of(name, names, self._members) for names in (producers, consumers)]
        before = self._channels.get(name)
        if before is not None and not before.closed:
            raise ValueError(f"channel '{name}' exists already and is open: close it first or choose another name")
        home = self._home(sides[1], sides[0])
        address = ChannelAddress(next(self._numbers), name, home, capacity, self._deadline_s, sides[0], sides[1])
        channel = self._channels[name] = ChannelProxy(address, self._names.registry)
        return channel

    def fail(self, error: PlatformError) -> None:
        """Closes every channel with `error`, so that no rank waits for data that will not come."""
        alive = [host for host in self._hosts.values() if host.death is None]
        answers = [host.send("fail", None, pack_error(error)) for host in alive]
        raise_first([failure for failures in _answers(answers, NOTICE_S) for failure in failures])

    @property
    def restarts(self) -> int:
        return self._restarts.count

    def restartable(self, component: str) -> bool:
        hosts = [host for host in self._hosts.values() if any(name == component for name, _ in host.members)]
        return any(self._restarts.possible(host) for host in hosts)

    def restart(self, error: WorkerDied, settle: Callable[[], None]) -> list[Member]:
        """Starts the processes that died, after `settle()`; returns their ranks, as their constructors left them.

        Raises `error` if no process of this run died, and the death of a process that is not started again.
        """
        if self._stopped or self._lost_peer(DEATH_NOTICE_S) is None:
            raise error
        self._check_others()
        settle()
        return self._start_again()

    def _check_others(self) -> None:
        """Raises the death of a process that is not started again, or WorkerDied after the shutdown."""
        if self._stopped:
            raise WorkerDied("the runtime was shut down")
        for host in self._hosts.values():
            self._restarts.check(host)

    def _start_again(self) -> list[Member]:
        """Starts the processes that died; returns their ranks. Raises the death of one that is not started again."""
        members: list[Member] = []
        while any(host.death is not None for host in self._hosts.values()):
            notices, self._notices = self._notices, []
            concurrent.futures.wait(notices, NOTICE_S)  # that a rank failed closes channels: none that come from now on
            self._check_others()
            lost = [host for host in self._hosts.values() if host.death is not None]  # of a node one after the other
            started = [self._replace(host) for host in lost]
            self._side_by_side(started, lambda host: self._greet([host.name]))
            self._actors.show_again([host.placed.name for host in started if host.death is None])
            self._side_by_side(started, self._prepare)
            self._watch_over(started)
            members += [member for host in lost for member in host.members]
        for host in self._hosts.values() if members else ():
            host.send("rehome", self._homes())  # for messages only, so no answer is awaited
        return list(dict.fromkeys(members))

    def _replace(self, lost: HostProxy) -> HostProxy:
        """Starts a process in place of one that died; returns before it takes calls."""
        name = self._restarts.spend(lost)
        self._actors.end(lost.name)  # it may live: also a broken connection counts as a death
        host = HostProxy(name, lost.placed, self._actors.launch(lost.placed.name, name), self._on_death)
        self._hosts = {other.name: other for old in self._hosts.values() for other in [host if old is lost else old]}
        self._channels = {key: channel for key, channel in self._channels.items() if channel.address.home != lost.name}
        for member in lost.members:
            self._workers[member].move(host)
        return host

    def _side_by_side(self, hosts: Sequence[HostProxy], work: Callable[[HostProxy], None]) -> None:
        """Returns when `work` has ended for all hosts that live, or they have died in it. Raises the death of another
        host that is not started again."""

        def try_it(host: HostProxy) -> None:
            if host.death is not None:
                return
            try:
                work(host)
            except WorkerDied as error:
                self._check_others()
                host.died(error)

        pool = ThreadPoolExecutor(len(hosts))
        try:
            list(pool.map(try_it, hosts))
        finally:
            pool.shutdown(wait=False)  # an interrupt must not wait for processes that start

    def _prepare(self, host: HostProxy) -> None:
        self._build([host])
        self._all("construct", {host.name: (host.members,)})

    def _watch_over(self, hosts: Iterable[HostProxy]) -> None:
        for host in hosts:
            if host.death is None:
                host.watch()

    def spans(self) -> list[TraceSpan]:
        """Returns what the hosts recorded for the timeline; they record no more then."""
        alive = [] if self._stopped else [host for host in self._hosts.values() if host.death is None]
        return [span for recorded in _answers([host.send("spans") for host in alive], NOTICE_S) for span in recorded]

    def shutdown(self, timeout: float = SHUTDOWN_S) -> None:
        """Closes channels and components, then ends every process; at most about 2 * `timeout` seconds.

        Raises the first error of a `close`, or Deadline naming ranks that were still busy when their process was ended.
        Does nothing if Ray itself is gone: its processes cannot be reached then.
        """
        try:
            if self._watch.lost is None and not self._stopped:
                self._stop(timeout)
        finally:
            self._watch.stop()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raises RayLost, whatever its consequences were, if Ray itself is gone."""
        try:
            if self._watch.lost is None:
                super().__exit__(kind, error, trace)
        finally:
            self._watch.stop()
            if self._watch.lost is not None:
                raise self._watch.lost from error

    def _stop(self, timeout: float) -> None:
        self._stopped = True
        hosts = [host for host in self._hosts.values() if host.death is None]
        for host in self._hosts.values():
            host.stopping = True
        failures: list[PlatformError] = []
        try:
            pending = {host: host.send("shutdown", timeout) for host in hosts}
            for errors, records in _answers(list(pending.values()), 2 * timeout + NOTICE_S):
                failures += [error for error in map(unpack_error, errors) if isinstance(error, PlatformError)]
                relay(records)
            late = [name for host, answer in pending.items() if not answer.done() for name in host.labels]
            failures += [Deadline(f"{name} did not stop in time; its process was ended") for name in late]
        finally:
            self._actors.stop()
        raise_first(failures)

    def _greet(self, hosts: Iterable[str]) -> None:
        greetings: dict[str, ProcessInfo] = self._all("greet", dict.fromkeys(hosts, ()))
        for name, info in greetings.items():
            self._hosts[name].pid = info.pid
        own = code_fingerprint()
        problems = [
            Problem("cluster.address", f"{name} at {info.address} runs other code", value=info.code, allowed=own)
            for name, info in greetings.items()
            if info.code != own
        ]
        problems += unreachable({name: (info.machine, info.address) for name, info in greetings.items()})
        if problems:
            raise PlacementError(problems)

    def _build(self, hosts: Iterable[HostProxy]) -> None:
        world_sizes = {name: self._placement.world_size(name) for name, _ in self._members}
        given = self._packed, world_sizes, self._seed, self._homes()
        seats = {}
        for host in hosts:  # a process numbers the accelerators that it sees from 0
            accelerators = tuple(range(len(host.placed.accelerators)))
            seats[host.name] = replace(host.placed, name=host.name, accelerators=accelerators)
        self._all("build", {name: (seat, *given) for name, seat in seats.items()})

    def _homes(self) -> dict[str, str]:
        """Returns the name of the process of every rank."""
        return {name: host.name for host in self._hosts.values() for name in host.labels}

    def _form_groups(self) -> None:
        """Forms a process group for every set of hosts whose learners have several ranks."""
        groups: dict[tuple[str, ...], list[Host]] = {}
        for placed in self._placement.hosts:
            names = tuple(name for name, _ in placed.members)
            if set(names) & set(LEARNERS):
                groups.setdefault(names, []).append(placed)
        for hosts in groups.values():
            first, size, cuda = hosts[0].name, len(hosts), bool(hosts[0].accelerators)
            if size > 1:
                rendezvous = self._all("open_group", {first: (size,)})[first]
                given = size, self._collective_timeout_s, cuda
                self._all("join", {placed.name: (rendezvous, rank, *given) for rank, placed in enumerate(hosts)})

    def _all(self, method: str, arguments: Mapping[str, tuple[object, ...]]) -> dict[str, Any]:
        """Returns the answers of these hosts by name, except those that died and may be started again.

        Raises the first error of the others, the death of another process that is not started again, or Deadline naming
        those without an answer.
        """
        alive = {name: values for name, values in arguments.items() if self._hosts[name].death is None}
        pending = {name: self._hosts[name].send(method, *values) for name, values in alive.items()}
        began, patience = time.monotonic(), STARTING_S
        while pending:
            until = began + min(patience, self._start_timeout_s)
            left = min(max(0.0, until - time.monotonic()), LOOK_AT_OTHERS_S)
            concurrent.futures.wait(pending.values(), left, concurrent.futures.FIRST_EXCEPTION)
            late = [name for name, future in pending.items() if not future.done()]
            ended = {name: future.exception() for name, future in pending.items() if future.done()}
            failed = {name: error for name, error in ended.items() if error is not None}
            for name, error in failed.items():
                if not (isinstance(error, WorkerDied) and self._restarts.possible(self._hosts[name])):
                    raise error
                self._hosts[name].died(error)
                del pending[name]
            if failed:
                continue
            if not late:
                break
            self._check_others()
            if time.monotonic() < until:
                continue
            who, limit = ", ".join(label for name in late for label in self._hosts[name].labels), self._start_timeout_s
            if patience >= limit:
                raise Deadline(f"{who} did not start within {limit:g} s (cluster.start_timeout_s), in {method}")
            log.warning("%s: starting for %g s, in %s (cluster.start_timeout_s: %g)", who, patience, method, limit)
            patience *= 2
        return {name: future.result() for name, future in pending.items()}

    def _home(self, *sides: Sequence[str]) -> str:
        for labels in sides:
            for host in self._hosts.values():
                if set(host.labels) & set(labels):
                    return host.name
        return next(iter(self._hosts))

    def _status(self, name: str) -> str:
        if name == RUNNER:
            return runner_status()
        return next((host.doing(name) for host in self._hosts.values() if name in host.labels), "not started")

    def _on_failure(self, name: str | None, error: PlatformError) -> None:
        """Notifies all processes without waiting, as this runs in the thread that receives answers."""
        data, number = pack_error(error), next(self._numbers)
        for host in self._hosts.values():
            if host.death is None:
                self._notices.append(host.send("fail", name, data, number))

    def _on_death(self, host: HostProxy, error: WorkerDied) -> None:
        # None: the run ends, and all channels are closed
        for name in host.labels if self._restarts.possible(host) else [None]:
            self._on_failure(name, error)

    def _peers_of(self, component: str) -> Callable[[float], WorkerDied | None]:
        """Returns a function that returns the death of a rank with which a rank of this component computes."""
        together = component in LEARNERS and self._placement.world_size(component) > 1
        return self._lost_peer if together else lambda patience: None

    def _lost_peer(self, patience: float) -> WorkerDied | None:
        """Returns the death of a process of this run, if one becomes known within `patience` seconds."""
        until = time.monotonic() + patience
        while True:
            death = next((host.death for host in self._hosts.values() if host.death is not None), None)
            if death is not None or time.monotonic() >= until:
                return death
            time.sleep(LOOK_S)


def _answers(pending: Sequence[Future[T]], timeout: float) -> list[T]:
    """Returns the answers that arrived in time; dead processes are left out."""
    concurrent.futures.wait(pending, timeout)
    done = [future for future in pending if future.done()]
    for future in done:
        if (error := future.exception()) is not None and not isinstance(error, WorkerDied):
            raise error
    return [future.result() for future in done if future.exception() is None]
