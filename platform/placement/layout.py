"""How a placement divides the work: ranks, devices and nodes of every component, and who takes turns with whom.

What memory and time are estimated from. Made of a whole placement, or of sizes alone: a search looks at thousands of
splits of a cluster and schedules only those it proposes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl_platform.placement.scheduler import LEARNERS, Placement

ON_CPU = ("reward", "env")  # compute on a CPU wherever they are placed, beside everything else


@dataclass(frozen=True)
class Part:
    """One component: its ranks, the devices and nodes they are on, accelerators of one rank (0: it has none), and the
    key whose components share its processes."""

    ranks: int
    devices: int
    nodes: frozenset[int]
    per_rank: int
    key: str


@dataclass(frozen=True)
class Layout:
    """`turns`: for every component those that wait while it computes. `one_process`: everything is threads of one."""

    parts: Mapping[str, Part]
    turns: Mapping[str, frozenset[str]]
    one_process: bool

    @property
    def policy(self) -> str:
        """The component that trains the policy."""
        return "actor" if "actor" in self.parts else "actor_critic"

    def together(self, first: str, second: str) -> bool:
        """Whether two components of one rank each live in one process and on one device."""
        one, other = self.parts[first], self.parts[second]
        if one.ranks != 1 or other.ranks != 1 or second not in self.turns[first]:
            return False
        return self.one_process or one.key == other.key


def layout_of(placement: Placement) -> Layout:
    """The layout of a placement."""
    keys = {name: host.name.partition("[")[0] for host in placement.hosts for name, rank in host.members if rank == 0}
    parts: dict[str, Part] = {}
    for name, slots in placement.components.items():
        devices = placement.accelerators[name]
        nodes = frozenset(slot.node for slot in slots)
        per_rank = max(len(slot.accelerators) for slot in slots)
        parts[name] = Part(len(slots), len(devices) or len(nodes), nodes, per_rank, keys[name])
    turns = {
        name: frozenset(
            other
            for other in parts
            if other != name and other not in ON_CPU and name not in ON_CPU and _meet(placement, name, other)
        )
        for name in parts
    }
    return Layout(parts, turns, placement.fits_one_process)


def _meet(placement: Placement, first: str, second: str) -> bool:
    """Whether two components compute on one GPU, or on the CPU of one node."""
    if placement.components[first] is placement.components[second]:  # named in one key
        return True
    mine, others = placement.accelerators[first], placement.accelerators[second]
    if mine or others:
        return not mine.isdisjoint(others)
    nodes = {slot.node for slot in placement.components[first]}
    return any(slot.node in nodes for slot in placement.components[second])


def layout_of_split(keys: Sequence[tuple[tuple[str, ...], range]], per_node: int) -> Layout:
    """The layout of keys on disjoint ranges of devices with one rank each. `per_node` 0: the devices are nodes."""
    parts: dict[str, Part] = {}
    turns: dict[str, frozenset[str]] = {}
    for components, devices in keys:
        size = max(per_node, 1)
        nodes = frozenset(range(devices.start // size, (devices.stop - 1) // size + 1))
        part = Part(len(devices), len(devices), nodes, min(per_node, 1), ",".join(components))
        for name in components:
            parts[name] = part
            meeting = frozenset(components) - {name, *ON_CPU}
            turns[name] = frozenset() if name in ON_CPU else meeting
    learners = [part for name, part in parts.items() if name in LEARNERS]
    alone = all(part.ranks == 1 for part in learners)
    used = {device for _, devices in keys for device in devices} if alone and len(keys) < 8 else {0, 1}
    return Layout(parts, turns, alone and len(used) == 1)
