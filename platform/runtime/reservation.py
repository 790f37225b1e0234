"""What a run reserves on each node of a cluster, and whether the cluster could ever give it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl_platform.errors import PlacementError, Problem
from rl_platform.runtime.host import PlacedHost

NODE_SHARE = 0.01  # of a CPU: what holds a place on a node without keeping others off its cores

Bundle = Mapping[str, float]  # resources by Ray's names


@dataclass(frozen=True)
class Seat:
    """A host as its own process sees it: it numbers the accelerators that it sees from 0."""

    name: str
    node: int
    accelerators: tuple[int, ...]
    members: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, placed: PlacedHost) -> Seat:
        return cls(placed.name, placed.node, tuple(range(len(placed.accelerators))), tuple(placed.members))


def environment_of(placed: PlacedHost) -> Mapping[str, str]:
    """What the placement adds to the host's environment; nothing for placements of threads."""
    found: Mapping[str, str] = getattr(placed, "env", {})
    return found


def bundle_for(hosts: Sequence[PlacedHost]) -> Bundle:
    """Resources of the hosts of one node: their accelerators as a whole, however many ranks share one."""
    owned = {local for placed in hosts for local in placed.accelerators}
    return {"CPU": NODE_SHARE} | ({"GPU": float(len(owned))} if owned else {})


def fits(bundles: Sequence[Bundle], nodes: Sequence[Bundle]) -> bool:
    """Whether each bundle can have a node of its own when nobody else uses the cluster."""
    wanted = sorted((bundle.get("GPU", 0.0) for bundle in bundles), reverse=True)
    there = sorted((node.get("GPU", 0.0) for node in nodes), reverse=True)
    return len(there) >= len(wanted) and all(need <= has for need, has in zip(wanted, there, strict=False))


def too_large(bundles: Sequence[Bundle], nodes: Sequence[Bundle]) -> PlacementError:
    """Of a placement that `fits` refuses."""
    message = f"needs {listed(bundles)}, but the Ray cluster has {listed(nodes)}"
    hint = "other resources, or cluster.address of a larger cluster"
    return PlacementError([Problem("cluster.component_placement", message, hint=hint)])


def listed(nodes: Sequence[Bundle]) -> str:
    """`2 nodes with 8, 4 GPUs`."""
    counts = ", ".join(f"{node.get('GPU', 0):g}" for node in nodes)
    return f"{len(nodes)} node{'s' if len(nodes) != 1 else ''} with {counts or 'no'} GPUs"
