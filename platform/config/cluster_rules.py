"""Rules between the keys that say how large a cluster is."""

from __future__ import annotations

from collections.abc import Iterator

from rl_platform.config.rules import BrokenRule
from rl_platform.config.schema import Config


def broken_cluster_rules(config: Config) -> Iterator[BrokenRule]:
    """The rules that `config` breaks."""
    cluster, inventory = config.cluster, config.cluster.inventory
    if inventory is None:
        return
    for key, own, declared in (
        ("num_nodes", cluster.num_nodes, ("nodes", inventory.nodes)),
        ("gpus_per_node", cluster.gpus_per_node, ("gpus_per_node", inventory.gpus_per_node)),
    ):
        if own != declared[1]:
            message = f"cluster.inventory.{declared[0]} says {declared[1]}: they speak of the same cluster"
            involved = f"cluster.inventory.{declared[0]}"
            yield BrokenRule(
                f"cluster.{key}", message, (involved,), f"leave out cluster.{key}, or set it to null: it follows"
            )
    if inventory.gpu is not None and inventory.gpus_per_node == 0:
        message = "these nodes have no GPU (cluster.inventory.gpus_per_node is 0)"
        yield BrokenRule("cluster.inventory.gpu", message, ("cluster.inventory.gpus_per_node",), "remove it")
