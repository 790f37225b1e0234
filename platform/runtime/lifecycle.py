"""Start and end of a runtime: checks of components, labels of a channel's users, stopping ranks, closing channels."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from rl_platform.errors import Deadline, PlacementError, PlatformError, Problem
from rl_platform.placement.layout import LEARNERS
from rl_platform.placement.scheduler import Host
from rl_platform.runtime.channel import Channel
from rl_platform.runtime.host import ComponentSpec, RankThread, label
from rl_platform.runtime.waits import waiting_on
from rl_platform.suggest import nearest

T = TypeVar("T")
RUNNER = "runner"


def check_components(placed: Collection[str], components: Mapping[str, ComponentSpec]) -> None:
    """Raises PlacementError if `components` and the placement name different ones."""
    unknown = [
        Problem(f"cluster.component_placement.{name}", "placed, but this run has no such component", hint=hint)
        for name in sorted(set(placed) - set(components))
        for hint in [f"components of this run: {', '.join(sorted(components))}"]
    ]
    missing = [
        Problem(f"cluster.component_placement.{name}", "this run needs the component, but it has no place")
        for name in sorted(set(components) - set(placed))
    ]
    if unknown or missing:
        raise PlacementError(unknown + missing)


def in_stages(hosts: Sequence[Host]) -> list[dict[str, list[tuple[str, int]]]]:
    """Returns the ranks of hosts in one or two stages of construction, by host in order.

    Learners come before the other ranks on their accelerators. SGLang and vLLM divide the memory that is free when they
    start. A model that is loaded at the same time would change their share, or would have no memory left.
    """
    places = {host.name: {(host.node, number) for number in host.accelerators} for host in hosts}
    learning = [places[host.name] for host in hosts if any(name in LEARNERS for name, _ in host.members)]
    first: dict[str, list[tuple[str, int]]] = {host.name: [] for host in hosts}
    later: dict[str, list[tuple[str, int]]] = {}
    for host in hosts:
        shares = any(places[host.name] & others for others in learning)
        for member in host.members:
            waits = shares and member[0] not in LEARNERS
            (later.setdefault(host.name, []) if waits else first[host.name]).append(member)
    return [stage for stage in ({name: own for name, own in first.items() if own}, later) if stage]


def labels_of(channel: str, names: Iterable[str], members: Sequence[tuple[str, int]]) -> tuple[str, ...]:
    """Returns the labels of the named components' ranks, single ranks or `runner`.

    Raises ValueError for a name that is not placed.
    """
    labels: list[str] = []
    for name in [names] if isinstance(names, str) else names:
        ranks = [label(*member) for member in members if name in (member[0], label(*member))]
        if not ranks and name != RUNNER:
            known = [RUNNER, *dict.fromkeys(component for component, _ in members)]
            close = nearest(name, known)
            hint = f"did you mean '{close}'?" if close else f"there are: {', '.join(known)}"
            raise ValueError(f"channel '{channel}': no component '{name}' in the placement; {hint}")
        labels += ranks or [RUNNER]
    return tuple(labels)


def runner_status() -> str:
    """Returns what the runner, the main thread, does."""
    waiting = waiting_on(threading.main_thread().ident)
    return f"waiting on {waiting}" if waiting else "busy"


def stop_ranks(ranks: Iterable[RankThread], timeout: float) -> list[PlatformError]:
    """Fails queued calls, calls the components' `close` in reverse order of construction and joins all threads.

    Waits at most `timeout` seconds for running calls and as long again for `close`. Returns the errors of `close`, and
    Deadline for each thread that is still busy and was abandoned.
    """
    idle = {rank: rank.retire() for rank in reversed(list(ranks))}
    concurrent.futures.wait(idle.values(), timeout)
    stuck_last = sorted(idle, key=lambda rank: not idle[rank].done())
    until = time.monotonic() + timeout
    return [failure for rank in stuck_last for failure in _close(rank, until)]


def close_channels(channels: Iterable[Channel[T]], error: PlatformError | None) -> list[PlatformError]:
    """Closes all channels with `error` and returns the errors of their integrity checks."""
    failures: list[PlatformError] = []
    for channel in channels:
        try:
            channel.close(error)
        except PlatformError as failure:
            failures.append(failure)
    return failures


def raise_first(failures: Sequence[PlatformError]) -> None:
    """Raises the first failure with the others as its notes; returns if there is none."""
    if failures:
        for other in failures[1:]:
            failures[0].add_note(str(other))
        raise failures[0]


def _close(rank: RankThread, until: float) -> list[PlatformError]:
    """Closes a rank and returns its error, if any; waits for its thread up to the time `until` (monotonic)."""
    closing = rank.close()
    if not rank.join(max(0.0, until - time.monotonic())):
        return [Deadline(f"{rank.label} did not stop in time ({rank.doing()}); its thread was abandoned")]
    error = closing.exception()
    return [error] if isinstance(error, PlatformError) else []
