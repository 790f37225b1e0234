"""Rules between the keys that say which machines a run has."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rl_platform.config.rules import BrokenRule
from rl_platform.config.schema import Config

_ADDRESS = re.compile(r"auto|[\w.-]+:\d+|\[[0-9a-fA-F:.]+\]:\d+")


def broken_cluster_rules(config: Config) -> Iterator[BrokenRule]:
    """The rules that `config` breaks."""
    yield from _inventory(config)
    cluster = config.cluster
    if cluster.devices_per_node is not None and cluster.gpus_per_node:
        message = f"CPU workers or GPUs: cluster.gpus_per_node says that there are {cluster.gpus_per_node} GPUs"
        yield BrokenRule("cluster.devices_per_node", message, ("cluster.gpus_per_node",), "keep one of them")
    if cluster.address is not None and not _ADDRESS.fullmatch(cluster.address):
        yield BrokenRule(
            "cluster.address", "neither auto nor HOST:PORT of a Ray cluster's head", (), "as 10.0.0.1:6379"
        )


def _inventory(config: Config) -> Iterator[BrokenRule]:
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
