"""The `cluster` section: machines, and the placement of components on them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from rl_platform.config.schema.base import Section, key

GPU = Literal["a10", "a100-40gb", "a100-80gb", "b200", "h100", "h20", "h200", "l4", "l40s", "mi300x", "rtx4090"]
MAX_NODES, MAX_GPUS = 10_000, 20_000  # of a cluster; of a node


class NodeGroup(Section):
    """`cluster.node_groups[]`: nodes by label, with what sets them apart."""

    label: str = Field(min_length=1, description="name used as node_group in component_placement")
    node_ranks: str = Field(description="nodes of the cluster in this group, as 0-1,3")
    env_vars: dict[str, str] = Field(default_factory=dict, description="environment of the workers on these nodes")
    accelerators: int | None = key(
        None, "GPUs of each of these nodes; 0: CPU nodes; null: as the cluster's other nodes", ge=0, le=MAX_GPUS
    )
    ray_labels: dict[str, str] = Field(
        default_factory=dict, description="these nodes are Ray nodes with these labels (ray start --labels)"
    )


class ClusterInventory(Section):
    """`cluster.inventory`: equal machines that need not exist, for --plan."""

    nodes: int = Field(ge=1, le=MAX_NODES, description="machines; cluster.num_nodes follows from it")
    gpus_per_node: int = Field(ge=0, le=MAX_GPUS, description="GPUs of each; cluster.gpus_per_node follows from it")
    gpu: GPU | None = key(None, "kind of GPU, for estimates of memory and time; null: memory and speed not known")


class Cluster(Section):
    """`cluster`: the only section that changes between a laptop and a cluster."""

    num_nodes: int = key(1, "machines", ge=1, le=MAX_NODES)
    gpus_per_node: int | None = key(
        None, "null: what this machine has; a number declares the inventory for --plan", ge=0, le=MAX_GPUS
    )
    devices_per_node: int | None = key(
        None, "CPU workers that stand for this many GPUs on each machine; null: none", ge=1, le=MAX_GPUS
    )
    component_placement: dict[str, Any] = Field(
        description="component names -> resources[:ranks], or {node_group, placement}"
    )
    node_groups: list[NodeGroup] = Field(default_factory=list, description="groups of nodes by label")
    runtime: Literal["auto", "local", "ray"] = key(
        "auto", "local: threads of one process; ray: a process per host; auto: local where the placement allows it"
    )
    address: str | None = key(None, "Ray cluster to join, as auto or HOST:PORT; null: one is started", min_length=1)
    restarts: int = key(3, "how often a process without a learner is started again when it dies; 0: never", ge=0)
    inventory: ClusterInventory | None = key(None, "declares a whole cluster for --plan")

    @model_validator(mode="before")
    @classmethod
    def _follow_inventory(cls, values: Any) -> Any:
        """`num_nodes` and `gpus_per_node` that were not written are those of the inventory."""
        inventory = values.get("inventory") if isinstance(values, dict) else None
        if not isinstance(inventory, dict):
            return values
        implied = {"num_nodes": inventory.get("nodes"), "gpus_per_node": inventory.get("gpus_per_node")}
        written = {name: value for name, value in values.items() if value is not None}
        smallest = {"num_nodes": 1, "gpus_per_node": 0}
        sizes = {name: size for name, size in implied.items() if type(size) is int and size >= smallest[name]}
        return sizes | written
