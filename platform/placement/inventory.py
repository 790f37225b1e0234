"""The machines that a run may use, declared or detected: nodes with accelerators, CPUs, memory and labels.

Detection runs the driver's own tools and never imports torch or initialises CUDA. The scheduler places ranks on the
nodes. The Ray runtime lists the nodes of a running cluster and builds an `Inventory` of them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rl_platform.config.schema.cluster import Cluster, NodeGroup
from rl_platform.errors import Problem
from rl_platform.placement.grammar import parse_nodes

NODE_GROUP = "node"  # reserved: its resources are the nodes themselves
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
DRIVER_TIMEOUT_S = 10.0
_GROUPS = "cluster.node_groups"


@dataclass(frozen=True)
class Node:
    """One machine. `cpus` and `memory` (bytes) are None when only declared.

    device_ids: names of its accelerators in CUDA_VISIBLE_DEVICES; empty: 0, 1, 2 ... env_vars: of its node groups, set
    for every process on the node. ray_labels: labels that it must have in Ray.
    """

    name: str
    num_accelerators: int = 0
    cpus: int | None = None
    memory: int | None = None
    labels: frozenset[str] = frozenset()
    device_ids: tuple[str, ...] = ()
    env_vars: Mapping[str, str] = field(default_factory=dict)
    ray_labels: Mapping[str, str] = field(default_factory=dict)
    emulated: bool = False  # its accelerators are CPU workers
    gpu: str = ""  # kind of its accelerators, a key of `hardware.GPUS`; empty: that of the inventory

    def visible_devices(self, accelerators: Sequence[int]) -> str:
        """Returns CUDA_VISIBLE_DEVICES of a process with these accelerators (local numbers); empty for CPU workers."""
        if self.emulated:
            return ""
        return ",".join(self.device_ids[index] if self.device_ids else str(index) for index in accelerators)


@dataclass(frozen=True)
class Inventory:
    """All nodes, in the order of their numbers and of their accelerators' numbers.

    origin: source of the inventory, in words. gpu: declared kind of the accelerators, a key of `hardware.GPUS`."""

    nodes: tuple[Node, ...]
    origin: str = ""
    gpu: str = ""

    @property
    def num_accelerators(self) -> int:
        """The number of accelerators of all nodes together."""
        return sum(node.num_accelerators for node in self.nodes)

    @property
    def is_emulated(self) -> bool:
        """Whether CPU workers emulate the accelerators."""
        return any(node.emulated for node in self.nodes)

    @property
    def noun(self) -> str:
        """The word for one accelerator."""
        return "CPU worker" if self.is_emulated else "GPU"

    @classmethod
    def declared(cls, num_nodes: int, gpus_per_node: int) -> Inventory:
        """Returns equal nodes that need not exist, for planning."""
        nodes = tuple(Node(f"node-{index}", gpus_per_node) for index in range(num_nodes))
        return cls(nodes, "declared by cluster.gpus_per_node")

    @classmethod
    def emulated(cls, num_nodes: int, devices_per_node: int) -> Inventory:
        """Returns machines whose CPU workers emulate accelerators: a placement for a cluster runs without one."""
        detected = cls.detected(num_nodes)
        nodes = tuple(
            replace(node, num_accelerators=devices_per_node, device_ids=(), emulated=True) for node in detected.nodes
        )
        return cls(nodes, f"no real GPUs: {devices_per_node} CPU workers per node by cluster.devices_per_node")

    @classmethod
    def detected(cls, num_nodes: int = 1) -> Inventory:
        """Returns this machine, repeated `num_nodes` times."""
        devices, note = detect_accelerators()
        cpus, memory = cpu_count(), _memory()
        nodes = tuple(
            Node(f"node-{index}", len(devices), cpus, memory, device_ids=devices) for index in range(num_nodes)
        )
        origin = "detected on this machine" if num_nodes == 1 else "assuming that every node is like this machine"
        return cls(nodes, f"{origin}; {note}" if note else origin)

    def resources(self, node_group: str | None) -> list[tuple[int, int | None]]:
        """Returns the resources of a group in order, as (node, local accelerator or None for a whole node).

        group None: the whole cluster. Empty if no node has the label.
        """
        chosen = [
            index
            for index, node in enumerate(self.nodes)
            if node_group in (None, NODE_GROUP) or node_group in node.labels
        ]
        accelerators: list[tuple[int, int | None]] = [
            (index, local) for index in chosen for local in range(self.nodes[index].num_accelerators)
        ]
        if node_group == NODE_GROUP or not accelerators:
            return [(index, None) for index in chosen]
        return accelerators

    def with_groups(self, groups: Sequence[NodeGroup]) -> tuple[Inventory, list[Problem]]:
        """Returns this inventory with labels and variables of `cluster.node_groups`, and all problems of the groups."""
        nodes, problems = list(self.nodes), _group_names(groups)
        counts: dict[int, int] = {}  # accelerators of a node, by the first group that declares them
        for position, group in enumerate(groups):
            path = f"{_GROUPS}[{position}]"
            spans, span_problems = parse_nodes(group.node_ranks, f"{path}.node_ranks")
            problems += span_problems
            if spans and spans[-1][-1] >= len(nodes):
                message, value = f"node {spans[-1][-1]} does not exist", f'"{group.node_ranks}"'
                allowed = "node 0, the only one" if len(nodes) == 1 else f"nodes 0-{len(nodes) - 1}"
                problems.append(Problem(f"{path}.node_ranks", message, value=value, allowed=allowed))
                continue
            for index in (index for span in spans for index in span):
                count = None if group.accelerators is None else counts.setdefault(index, group.accelerators)
                problems += _conflicts(path, group, nodes[index], count)
                nodes[index] = _joined(group, nodes[index], count)
        return replace(self, nodes=tuple(nodes)), problems


def inventory_for(cluster: Cluster) -> Inventory:
    """Returns the inventory of a config without a running cluster: declared by `inventory` or `gpus_per_node`, or this
    machine's. It has no node groups yet."""
    if (declared := cluster.inventory) is not None:
        inventory = Inventory.declared(declared.nodes, declared.gpus_per_node)
        return replace(inventory, origin="declared by cluster.inventory", gpu=declared.gpu or "")
    if cluster.devices_per_node is not None:
        return Inventory.emulated(cluster.num_nodes, cluster.devices_per_node)
    if cluster.gpus_per_node is not None:
        return Inventory.declared(cluster.num_nodes, cluster.gpus_per_node)
    return Inventory.detected(cluster.num_nodes)


def cpu_count() -> int:
    """Returns the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def detect_accelerators() -> tuple[tuple[str, ...], str]:
    """Returns the names (as in CUDA_VISIBLE_DEVICES) of the GPUs that this process may use, and a note if in doubt.

    nvidia-smi respects the limits of a container or a Slurm step. Without it, the driver's device files are counted.
    """
    count, note = _physical()
    visible = os.environ.get(VISIBLE_DEVICES)
    if visible is None or count == 0:
        return tuple(map(str, range(count))), note
    names: list[str] = []
    for name in (piece.strip() for piece in visible.split(",")):
        if not name or name.startswith("-") or name in names or (name.isdigit() and int(name) >= count):
            break  # CUDA ignores everything from the first invalid name on
        names.append(name)
    return tuple(names), f'CUDA_VISIBLE_DEVICES is "{visible}"'


def ask_driver(fields: str) -> subprocess.CompletedProcess[str] | None:
    """Returns these fields of each GPU, as nvidia-smi prints them; None without that tool.

    Raises OSError if it cannot be started, TimeoutExpired after `DRIVER_TIMEOUT_S`.
    """
    if (tool := shutil.which("nvidia-smi")) is None:
        return None
    command = [tool, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, timeout=DRIVER_TIMEOUT_S, check=False)


def _physical() -> tuple[int, str]:
    """Returns the number of GPUs of this machine, whatever CUDA_VISIBLE_DEVICES is, and a note if in doubt."""
    try:
        result = ask_driver("index")
    except subprocess.TimeoutExpired:
        return 0, f"nvidia-smi gave no answer in {DRIVER_TIMEOUT_S:g} s, so no GPU is used"
    except OSError as error:
        return 0, f"nvidia-smi could not be started ({error.strerror}), so no GPU is used"
    if result is None:
        files = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia[0-9]+", path.name)]
        return len(files), ""
    lines = [line.strip() for line in result.stdout.splitlines() if line.strip()]
    if result.returncode != 0:
        return 0, f"nvidia-smi failed ({' '.join(lines) or result.stderr.strip()}), so no GPU is used"
    return sum(line.isdigit() for line in lines), ""


def _memory() -> int:
    """Returns the bytes of main memory, or the container's limit if that is lower."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(total, int(text)) if text.isdigit() else total


def _group_names(groups: Sequence[NodeGroup]) -> list[Problem]:
    """Returns problems of reserved or repeated labels, and of variables that no group may set."""
    problems: list[Problem] = []
    seen = {NODE_GROUP: "is reserved: it counts nodes"}
    for position, group in enumerate(groups):
        path = f"{_GROUPS}[{position}]"
        if group.label in seen:
            message = f"the label {seen[group.label]}"
            problems.append(Problem(f"{path}.label", message, value=group.label, hint="choose another name"))
        seen.setdefault(group.label, f"names {path} already")
        if VISIBLE_DEVICES in group.env_vars:
            message, hint = "this variable follows from the placement", "place components on other resources instead"
            value = group.env_vars[VISIBLE_DEVICES]
            problems.append(Problem(f"{path}.env_vars.{VISIBLE_DEVICES}", message, value=value, hint=hint))
    return problems


def _joined(group: NodeGroup, node: Node, count: int | None) -> Node:
    """Returns the node as a member of the group too, with `count` accelerators if a group declares them."""
    if count is not None and count != node.num_accelerators:  # the names of these accelerators are unknown
        node = replace(node, num_accelerators=count, device_ids=())
    return replace(
        node,
        gpu=group.gpu or node.gpu,
        labels=node.labels | {group.label},
        env_vars={**node.env_vars, **group.env_vars},
        ray_labels={**node.ray_labels, **group.ray_labels},
    )


def _conflicts(path: str, group: NodeGroup, node: Node, count: int | None) -> list[Problem]:
    """Returns the problems of a group whose keys contradict those of the node's earlier groups.

    count: accelerators of the node, by the first group that declares them.
    """
    once = "nodes that are in one of the groups only"
    problems = [
        Problem(
            f"{path}.{key}.{name}",
            f"another group gives {node.name} another value",
            value=value,
            allowed=f"{known[name]}, or {once}",
        )
        for key, mine, known in (
            ("env_vars", group.env_vars, node.env_vars),
            ("ray_labels", group.ray_labels, node.ray_labels),
        )
        for name, value in mine.items()
        if known.get(name, value) != value
    ]
    if group.accelerators != count:
        message, value = f"another group gives {node.name} {count}", str(group.accelerators)
        problems.append(Problem(f"{path}.accelerators", message, value=value, allowed=f"{count}, or {once}"))
    if group.gpu is not None and node.gpu not in ("", group.gpu):
        message, allowed = f"another group gives {node.name} {node.gpu}", "one kind of GPU for each node"
        problems.append(Problem(f"{path}.gpu", message, value=group.gpu, allowed=allowed))
    return problems
