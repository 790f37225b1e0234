"""Computes a placement from `cluster.component_placement` and an inventory: slots of every rank, and hosts.

The module is pure: it starts, reserves and measures nothing, and does not estimate memory. All problems of a config are
reported at once; with a problem there is no placement.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from rl_platform.config.schema.cluster import Cluster
from rl_platform.errors import PlacementError, Problem
from rl_platform.placement.grammar import Entry, Segment, read, uneven
from rl_platform.placement.inventory import NODE_GROUP, VISIBLE_DEVICES, Inventory
from rl_platform.placement.layout import BESIDE, LEARNERS, Layout, Part
from rl_platform.suggest import did_you_mean

SHOWN_MISSING = 3  # resources that a message names
MAX_ACCELERATORS = 20_000  # of a cluster: a typo like 3000000 nodes must fail, not fill the memory

Resource = tuple[int, int | None]  # (node, local accelerator); None: the node as a whole
Place = tuple[int, tuple[int, ...]]  # of one rank: (node, local accelerators)


@dataclass(frozen=True, slots=True)
class Slot:
    """One rank of a component: its node and the accelerators it owns there (local numbers, none on a CPU).

    `shared`: another rank, of this or of another component, owns one of the accelerators too.
    """

    rank: int
    node: int
    accelerators: tuple[int, ...]
    shared: bool


@dataclass(frozen=True, slots=True)
class Host:
    """One process and the (component, rank) pairs in it; `env` is what its placement adds to its environment.

    accelerators: the real ones that it drives, none if CPU workers emulate them. owned: the number of real or emulated
    ones, at least 1; its share of the node's cores follows from it. ray_labels: of its node.
    """

    name: str
    node: int
    accelerators: tuple[int, ...]
    members: tuple[tuple[str, int], ...]
    env: Mapping[str, str] = field(hash=False)
    ray_labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    owned: int = 1


@dataclass(frozen=True)
class Placement:
    """Slots of every component by rank, in the config's order, and the hosts in order of construction.

    emulated: CPU workers emulate the accelerators. by_ray: the config selects Ray, also where one process would do.
    """

    components: Mapping[str, tuple[Slot, ...]]
    hosts: tuple[Host, ...]
    emulated: bool = False
    by_ray: bool = False

    def world_size(self, component: str) -> int:
        """Returns the number of ranks of the component."""
        return len(self.components[component])

    @cached_property
    def accelerators(self) -> Mapping[str, frozenset[tuple[int, int]]]:
        """Component -> the (node, local accelerator) pairs it owns."""
        owned = {id(slots): slots for slots in self.components.values()}  # components with equal slots share one set
        sets = {
            key: frozenset((slot.node, local) for slot in slots for local in slot.accelerators)
            for key, slots in owned.items()
        }
        return {name: sets[id(slots)] for name, slots in self.components.items()}

    @property
    def on_accelerators(self) -> bool:
        """Whether a component computes on real accelerators."""
        return not self.emulated and any(self.accelerators.values())

    @cached_property
    def layout(self) -> Layout:
        """Ranks, devices and nodes of every component, and which components take turns."""
        keys = {name: host.name.partition("[")[0] for host in self.hosts for name, rank in host.members if rank == 0}
        parts: dict[str, Part] = {}
        for name, slots in self.components.items():
            devices = self.accelerators[name]
            nodes = frozenset(slot.node for slot in slots)
            per_rank = max(len(slot.accelerators) for slot in slots)
            parts[name] = Part(len(slots), len(devices) or len(nodes), nodes, per_rank, keys[name])
        computing = [name for name in parts if name not in BESIDE]
        meeting = {
            name: frozenset(other for other in computing if other != name and self._meet(name, other)) for name in parts
        }
        sharing = meeting | dict.fromkeys(set(BESIDE) & parts.keys(), frozenset[str]())
        one_process = self.fits_one_process and not self.by_ray
        return Layout(parts, sharing, one_process, meeting.get("reward", frozenset()))

    def _meet(self, first: str, second: str) -> bool:
        """Returns whether two components compute on one GPU, or on the CPU of one node."""
        if self.components[first] is self.components[second]:  # named in one key
            return True
        mine, others = self.accelerators[first], self.accelerators[second]
        if mine or others:
            return not mine.isdisjoint(others)
        nodes = {slot.node for slot in self.components[first]}
        return any(slot.node in nodes for slot in self.components[second])

    def takes_turns_with(self, component: str) -> tuple[str, ...]:
        """Returns the components on an accelerator of this one: only one of them computes there at a time."""
        own = self.accelerators[component]
        return tuple(name for name, other in self.accelerators.items() if name != component and own & other)

    def runs_beside(self, component: str) -> tuple[str, ...]:
        """Returns the components that may compute at the same time: on other accelerators, or without any."""
        turns = self.takes_turns_with(component)
        return tuple(name for name in self.components if name != component and name not in turns)

    def uses_ray(self, cluster: Cluster) -> bool:
        """Returns whether hosts are processes: the config selects ray or a cluster to join, or the placement needs
        processes."""
        if cluster.runtime == "auto":
            return cluster.address is not None or not self.fits_one_process
        return cluster.runtime == "ray"

    @property
    def fits_one_process(self) -> bool:
        """Whether the launching process can hold every host as threads."""
        return not self.one_process_obstacle

    @cached_property
    def one_process_obstacle(self) -> str:
        """Why the launching process cannot hold every host as threads; empty if it can."""
        away = sorted({slot.node for slots in self.components.values() for slot in slots} - {0})
        owned = frozenset[tuple[int, int]]().union(*self.accelerators.values())
        parallel = [name for name in LEARNERS if len(self.components.get(name, ())) > 1]
        if away:
            return f"ranks are placed on node {away[0]}, outside the launching machine"
        if parallel:
            return f"{parallel[0]} has {self.world_size(parallel[0])} ranks, which train as a group of processes"
        if len(owned) > 1:
            return f"{len(owned)} accelerators are used, one process drives one"
        return ""


def schedule(cluster: Cluster, inventory: Inventory) -> Placement:
    """Places every component of `cluster` on the first `num_nodes` nodes of `inventory`.

    Components named in one key share hosts rank by rank. Raises PlacementError with all problems at once.
    """
    entries, problems = read(cluster.component_placement)
    used = Inventory(inventory.nodes[: cluster.num_nodes], inventory.origin)
    if len(used.nodes) < cluster.num_nodes:
        problems.append(_too_few_nodes(cluster, len(used.nodes)))
    used, group_problems = used.with_groups(cluster.node_groups)
    problems += group_problems
    if (total := used.num_accelerators) > MAX_ACCELERATORS:
        allowed = f"at most {MAX_ACCELERATORS} {used.noun}s on all nodes together"
        raise PlacementError([*problems, Problem("cluster", f"{total} {used.noun}s are too many", allowed=allowed)])
    declared = {group.label for group in cluster.node_groups}
    resources: dict[str | None, list[Resource]] = {}
    ranks: list[list[Place]] = []
    known: dict[object, list[Place]] = {}  # keys with equal texts have equal places
    for entry in entries:
        if entry.node_group not in resources:
            resources[entry.node_group] = used.resources(entry.node_group)
        available = resources[entry.node_group]
        if not available:
            # a declared group or a cluster without nodes has its problem already
            if used.nodes and entry.node_group not in declared:
                problems.append(_unknown_group(entry, used, declared))
            continue
        text = (entry.node_group, entry.segments)
        if text not in known or problems:  # with a problem there is no placement, and each key reports its own
            known[text] = _place(entry, available, problems)
        ranks.append(known[text])
    if problems:
        raise PlacementError(problems)
    by_ray = cluster.runtime == "ray" or (cluster.runtime == "auto" and cluster.address is not None)
    return Placement(_slots(entries, ranks), _hosts(entries, ranks, used), used.is_emulated, by_ray)


def _place(entry: Entry, resources: Sequence[Resource], problems: list[Problem]) -> list[Place]:
    """Returns the place of every rank of the entry, by rank; incomplete if there is a problem."""
    by_rank: dict[int, Place] = {}
    count = len(resources)
    missing: list[tuple[int, Segment]] = []  # the first resource of a segment that does not exist
    for segment in entry.segments:
        wanted = segment.resources if segment.resources is not None else range(count)
        if wanted.stop > count:
            missing.append((max(wanted.start, count), segment))
            continue
        ranks = segment.ranks if segment.ranks is not None else range(len(wanted))
        problem = _impossible(entry, segment, wanted, ranks, resources)
        if problem is not None:
            problems.append(problem)
            continue
        owned = max(1, len(wanted) // len(ranks))
        sharing = max(1, len(ranks) // len(wanted))
        for position, rank in enumerate(ranks):
            first = wanted.start + position // sharing * owned
            mine = resources[first : first + owned]
            by_rank[rank] = (mine[0][0], tuple(local for _, local in mine if local is not None))
            if mine[0][0] != mine[-1][0]:
                problems.append(_two_nodes(entry, segment, rank, mine))
                break
    if missing:
        problems.append(_missing(entry, missing, resources))
    return [by_rank[rank] for rank in sorted(by_rank)]


def _missing(entry: Entry, missing: Sequence[tuple[int, Segment]], resources: Sequence[Resource]) -> Problem:
    """Returns the one problem of all segments with a resource that does not exist, however many they are."""
    noun = "node" if resources[0][1] is None else "accelerator"
    where = f"node group {entry.node_group!r}" if entry.node_group else "the cluster"
    count = len(resources)
    numbers = ", ".join(str(number) for number, _ in missing[:SHOWN_MISSING])
    more = f" and {len(missing) - SHOWN_MISSING} more" if len(missing) > SHOWN_MISSING else ""
    which = f"{noun} {numbers} does not exist" if len(missing) == 1 else f"{noun}s {numbers}{more} do not exist"
    has = f"{where} has {count} {noun}{'s' if count != 1 else ''}"
    hint = "all fits every cluster"
    if noun == "node" and entry.node_group != NODE_GROUP:
        hint = f"{where} has no accelerators, so its nodes are counted; {hint}"
    allowed = f"{'0' if count == 1 else f'0-{count - 1}'} or all"
    return entry.problem(missing[0][1], f"{which}: {has}", allowed=allowed, hint=hint)


def _impossible(
    entry: Entry, segment: Segment, wanted: range, ranks: range, resources: Sequence[Resource]
) -> Problem | None:
    """Returns the problem of a segment whose ranks cannot share these resources."""
    wrong = uneven(wanted, ranks)
    if wrong is not None:
        return entry.problem(segment, wrong[0], allowed=wrong[1])
    if resources[0][1] is None and len(wanted) > len(ranks):
        message = f"{len(wanted)} nodes for {len(ranks)} rank{'s' if len(ranks) > 1 else ''}: a rank is one process"
        return entry.problem(
            segment, message, allowed=f"{len(wanted)} ranks, or a multiple", hint="as all, or one node"
        )
    return None


def _two_nodes(entry: Entry, segment: Segment, rank: int, mine: Sequence[Resource]) -> Problem:
    nodes = f"nodes {mine[0][0]} and {mine[-1][0]}"
    message = f"rank {rank} would own accelerators of {nodes}: a rank is one process on one node"
    hint = "start its accelerators at a node's first one, or give it fewer"
    return entry.problem(segment, message, allowed="accelerators of one node for each rank", hint=hint)


def _unknown_group(entry: Entry, inventory: Inventory, declared: Collection[str]) -> Problem:
    known = sorted({NODE_GROUP, *declared, *(label for node in inventory.nodes for label in node.labels)})
    name = entry.node_group or ""
    path = entry.path.removesuffix(".placement") + ".node_group"
    hint = did_you_mean(name, known) or "node has all nodes; declare others under cluster.node_groups"
    return Problem(path, f"there is no node group {name!r}", value=name, allowed=", ".join(known), hint=hint)


def _too_few_nodes(cluster: Cluster, nodes: int) -> Problem:
    allowed = f"at most {nodes}" if nodes else "a cluster with at least one node"
    message, wanted, hint = "the cluster has fewer nodes", cluster.num_nodes, ""
    if cluster.inventory is not None:
        hint = f"the config declares the nodes: cluster.inventory.nodes={wanted}, or cluster.inventory=null"
    return Problem("cluster.num_nodes", message, value=str(wanted), allowed=allowed, hint=hint)


def _slots(entries: Iterable[Entry], ranks: Iterable[Sequence[Place]]) -> dict[str, tuple[Slot, ...]]:
    """Returns the slots of every component by rank; `ranks` are the places of each entry's ranks."""
    placed = list(zip(entries, ranks, strict=True))
    owners: Counter[tuple[int, int]] = Counter()
    for entry, places in placed:
        for node, accelerators in places:
            for local in accelerators:
                owners[node, local] += len(entry.components)
    shared = {key for key, count in owners.items() if count > 1}
    components: dict[str, tuple[Slot, ...]] = {}
    equal: dict[int, tuple[Slot, ...]] = {}  # by the identity of their places
    for entry, places in placed:
        if id(places) not in equal:
            equal[id(places)] = tuple(
                Slot(rank, node, accelerators, any((node, local) in shared for local in accelerators))
                for rank, (node, accelerators) in enumerate(places)
            )
        components.update(dict.fromkeys(entry.components, equal[id(places)]))
    return components


def _hosts(entries: Iterable[Entry], ranks: Iterable[Sequence[Place]], inventory: Inventory) -> tuple[Host, ...]:
    """Returns one host for each rank of each entry; it holds this rank of all the entry's components."""
    hosts: list[Host] = []
    environments: dict[Place, dict[str, str]] = {}
    for entry, places in zip(entries, ranks, strict=True):
        label = ",".join(entry.components)
        for rank, (node, accelerators) in enumerate(places):
            members = tuple([(name, rank) for name in entry.components])
            env = environments.get((node, accelerators))
            if env is None:
                env = environments[node, accelerators] = dict(inventory.nodes[node].env_vars)
                if inventory.nodes[node].num_accelerators:  # an empty value keeps a CPU component off the GPUs
                    env[VISIBLE_DEVICES] = inventory.nodes[node].visible_devices(accelerators)
            driven = () if inventory.nodes[node].emulated else accelerators
            ray_labels, owned = inventory.nodes[node].ray_labels, max(1, len(accelerators))
            hosts.append(Host(f"{label}[{rank}]", node, driven, members, env, ray_labels, owned))
    return tuple(hosts)
