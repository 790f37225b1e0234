"""Computes how much each device worked in the recorded steps of a run, from its timeline and placement."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rl_platform.launch.tools.report.facts import Busy
from rl_platform.launch.tools.timeline import Span, TimelineEvent, measured_steps, total, union
from rl_platform.placement.scheduler import Placement


def busy_devices(lanes: Mapping[str, Sequence[TimelineEvent]], placement: Placement) -> list[Busy]:
    """Returns the devices (GPUs, or the CPUs of a node) with their busy share of the recorded steps. A device is busy
    while one of its ranks runs a call and does not wait for a channel.

    The steps are those of `measured_steps`. Ranks that wait for one another inside a call, as in a collective, count as
    working.
    """
    steps = measured_steps(lanes)
    if not steps:
        return []
    window = (steps[0]["ts"], steps[-1]["ts"] + steps[-1]["dur"])
    phases = [event for event in lanes.get("runner", ()) if event["cat"] == "phase"]
    busy = []
    for device, ranks in _ranks(placement).items():
        work = union(span for rank in ranks for span in _work(lanes.get(rank, ())))
        idle = without([window], work)
        waiting: dict[str, float] = {}
        for phase in phases:
            own = overlap(idle, (phase["ts"], phase["ts"] + phase["dur"]))
            waiting[phase["name"]] = waiting.get(phase["name"], 0.0) + own / (window[1] - window[0])
        ordered = dict(
            sorted(((name, share) for name, share in waiting.items() if share > 0.01), key=lambda kv: -kv[1])
        )
        components = tuple(dict.fromkeys(rank.partition("[")[0] for rank in ranks))
        share = 1 - total(idle) / (window[1] - window[0])
        busy.append(Busy(device, components, share, ordered))
    return busy


def rank_seconds(lanes: Mapping[str, Sequence[TimelineEvent]]) -> dict[str, dict[str, float]]:
    """Returns component and method -> seconds of each rank, for components with several ranks."""
    seconds: dict[str, dict[str, float]] = {}
    for lane, events in lanes.items():
        component = lane.partition("[")[0]
        for event in events:
            if event["cat"] == "call" and "[" in lane:
                of_method = seconds.setdefault(f"{component}.{event['name']}", {})
                of_method[lane] = of_method.get(lane, 0.0) + event["dur"] / 1e6
    return {method: ranks for method, ranks in seconds.items() if len(ranks) > 1 and not method.endswith("__init__")}


def _ranks(placement: Placement) -> dict[str, list[str]]:
    """Returns the ranks on each device, by its name."""
    ranks: dict[str, list[str]] = {}
    for component, slots in placement.components.items():
        for rank, slot in enumerate(slots):
            devices = [f"GPU {local} of node {slot.node}" for local in slot.accelerators] or [f"node {slot.node}"]
            for device in devices:
                ranks.setdefault(device, []).append(f"{component}[{rank}]")
    return ranks


def _work(events: Iterable[TimelineEvent]) -> list[Span]:
    """Returns when a lane was called, without its waits."""
    spans = {
        kind: union((event["ts"], event["ts"] + event["dur"]) for event in events if event["cat"] == kind)
        for kind in ("call", "wait")
    }
    return without(spans["call"], spans["wait"])


def without(spans: Iterable[Span], removed: Sequence[Span]) -> list[Span]:
    """Returns `spans` less the time of `removed`; both disjoint and in order."""
    left: list[Span] = []
    for begin, end in spans:
        for first, last in removed:
            if last <= begin:
                continue
            if first >= end:
                break
            if first > begin:
                left.append((begin, first))
            begin = max(begin, last)
        if begin < end:
            left.append((begin, end))
    return left


def overlap(spans: Iterable[Span], other: Span) -> float:
    """Returns the time that disjoint spans share with another one."""
    return sum(max(0.0, min(end, other[1]) - max(begin, other[0])) for begin, end in spans)
