"""The resources that a run reserves on each node of a cluster, and whether the cluster has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl_platform.errors import PlacementError, Problem
from rl_platform.placement.scheduler import Host

NODE_SHARE = 0.01  # of a CPU: reserves a node without taking its cores from others
OWN_LABEL = "ray.io/"  # with it begin the labels that Ray gives its nodes itself


@dataclass(frozen=True)
class NodeResources:
    """The resources, by Ray's names, and labels that a run needs of a node, or that a node has."""

    resources: Mapping[str, float]
    labels: Mapping[str, str]

    def fits(self, node: NodeResources) -> bool:
        has_gpus = self.resources.get("GPU", 0.0) <= node.resources.get("GPU", 0.0)
        return has_gpus and self.labels.items() <= node.labels.items()

    def __str__(self) -> str:
        labels = [f"{key}={value}" for key, value in self.labels.items() if not key.startswith(OWN_LABEL)]
        return f"{self.resources.get('GPU', 0):g}" + (f" ({', '.join(labels)})" if labels else "")


def by_node(hosts: Sequence[Host]) -> list[list[Host]]:
    """Returns the hosts of each node that has any."""
    nodes = sorted({placed.node for placed in hosts})
    return [[placed for placed in hosts if placed.node == node] for node in nodes]


def resources_for(hosts: Sequence[Host]) -> NodeResources:
    """Returns the needs of the hosts of one node: its accelerators as a whole, however many ranks share one."""
    owned = {local for placed in hosts for local in placed.accelerators}
    resources = {"CPU": NODE_SHARE} | ({"GPU": float(len(owned))} if owned else {})
    labels = {key: value for placed in hosts for key, value in placed.ray_labels.items()}
    return NodeResources(resources, labels)


def threads_for(placed: Host, hosts: Sequence[Host], cores: int) -> int:
    """Returns the number of threads: hosts of a node share its cores by the accelerators or CPU workers they own."""
    owned = {other.name: other.owned for other in hosts}
    return max(1, cores * owned[placed.name] // sum(owned.values()))


def fits(wanted: Sequence[NodeResources], nodes: Sequence[NodeResources]) -> bool:
    """Returns whether each request can get a node of its own on a cluster without other users."""
    taken: dict[int, int] = {}  # node -> index of the request

    def assign(index: int, tried: set[int]) -> bool:
        """Finds a node for one, moving others where that helps: an augmenting path of the bipartite matching."""
        for number, node in enumerate(nodes):
            if number not in tried and wanted[index].fits(node):
                tried.add(number)
                if number not in taken or assign(taken[number], tried):
                    taken[number] = index
                    return True
        return False

    return all(assign(index, set()) for index in range(len(wanted)))


def too_large(bundles: Sequence[NodeResources], nodes: Sequence[NodeResources]) -> PlacementError:
    """Returns the error of a placement that `fits` refuses."""
    message = f"needs {listed(bundles)}, but the Ray cluster has {listed(nodes)}"
    hint = "other resources, or cluster.address of a larger cluster"
    return PlacementError([Problem("cluster.component_placement", message, hint=hint)])


def listed(nodes: Sequence[NodeResources]) -> str:
    """Returns a text as `2 nodes with 8, 4 (pool=cpu) GPUs`."""
    counts = ", ".join(str(node) for node in nodes)
    return f"{len(nodes)} node{'s' if len(nodes) != 1 else ''} with {counts or 'no'} GPUs"
