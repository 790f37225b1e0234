"""The `cluster` section: machines, and the placement of components on them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rl_platform.config.schema.section import Section, key

GPU = Literal["a10", "a100-40gb", "a100-80gb", "b200", "h100", "h20", "h200", "l4", "l40s", "mi300x", "rtx4090"]
PLACEMENT = "cluster.component_placement"
COMPONENTS = ("actor", "critic", "actor_critic", "reference", "rollout", "reward", "env")
MAX_NODES, MAX_GPUS = 10_000, 20_000  # of a cluster; of a node


class NodeGroup(Section):
    """`cluster.node_groups[]`: a named group of nodes, with its hardware and environment."""

    label: str = Field(min_length=1, description="name for node_group in component_placement")
    node_ranks: str = Field(description="numbers of the nodes in this group, for example 0-1,3")
    env_vars: dict[str, str] = Field(
        default_factory=dict, description="environment variables of the workers on these nodes"
    )
    accelerators: int | None = key(
        None, "GPUs per node; 0: CPU nodes; null: as on the other nodes of the cluster", ge=0, le=MAX_GPUS
    )
    ray_labels: dict[str, str] = Field(
        default_factory=dict, description="Ray labels that select the nodes of this group (ray start --labels)"
    )
    gpu: GPU | None = key(None, "GPU model of these nodes, for --plan; null: that of cluster.inventory")


class ClusterInventory(Section):
    """`cluster.inventory`: equal machines that need not exist, for --plan."""

    nodes: int = Field(ge=1, le=MAX_NODES, description="machines; sets cluster.num_nodes")
    gpus_per_node: int = Field(ge=0, le=MAX_GPUS, description="GPUs per machine; sets cluster.gpus_per_node")
    gpu: GPU | None = key(None, "GPU model, for estimates of memory and time; null: no such estimates")


class Simulation(Section):
    """`cluster.simulation`: failures and slow nodes of `--plan=simulate`."""

    node_mtbf_hours: float = key(  # Llama 3: 419 unexpected interruptions of 2,048 nodes in 54 days (arXiv 2407.21783)
        6300.0, "mean hours between two failures of one node", gt=0
    )
    spread: float = key(
        0.0, "variation of a rank's time: standard deviation of its logarithm between two synchronisations", ge=0, le=2
    )
    slow_nodes: float = key(0.0, "share of the nodes that are slow", ge=0, le=1)
    slow_factor: float = key(1.5, "time of a slow node, in multiples of the others'", ge=1, le=100)


class Cluster(Section):
    """`cluster`: the only section that changes between a laptop and a cluster."""

    num_nodes: int = key(1, "machines", ge=1, le=MAX_NODES)
    gpus_per_node: int | None = key(
        None, "GPUs per machine, for --plan; null: as many as this machine has", ge=0, le=MAX_GPUS
    )
    devices_per_node: int | None = key(
        None, "CPU workers per machine that emulate GPUs; null: no emulation", ge=1, le=MAX_GPUS
    )
    component_placement: dict[str, object] = Field(
        description="component names -> resources[:ranks], or {node_group, placement}"
    )
    node_groups: list[NodeGroup] = Field(default_factory=list, description="named groups of nodes")
    runtime: Literal["auto", "local", "ray"] = key(
        "auto", "local: threads of one process; ray: a process per host; auto: local if the placement allows it"
    )
    address: str | None = key(None, "Ray cluster to join: auto or HOST:PORT; null: start one for the run", min_length=1)
    restarts: int = key(
        3,
        "Ray: largest number of restarts of a process without a learner, and of the whole run from one checkpoint to "
        "the next after the death of another process, a node or Ray; 0: none",
        ge=0,
    )
    restart_backoff_s: float = key(
        5.0, "Ray: seconds before the whole run is started again; doubled with each failure, up to a minute", ge=0
    )
    start_timeout_s: float = key(
        1800.0, "longest time for the processes to start and to download, load and shard their models, in seconds", gt=0
    )
    collective_timeout_s: float | None = key(
        None, "Ray: longest time of one collective of gloo or NCCL, in seconds; null: runner.deadline_s", gt=0
    )
    reallocate: Literal["off", "suggest", "auto"] = key(
        "off",
        "suggest: measured times of phases correct the plan, and a faster placement of the same devices is printed; "
        "auto: the run also moves to it if that pays within 10 steps",
    )
    inventory: ClusterInventory | None = key(None, "a whole cluster for --plan, which need not exist")
    simulation: Simulation = Field(default_factory=Simulation, description="failures and slow nodes of --plan=simulate")

    @model_validator(mode="before")
    @classmethod
    def _follow_inventory(cls, values: object) -> object:
        """Takes `num_nodes` and `gpus_per_node` from the inventory if they were not written."""
        if not isinstance(values, dict) or not isinstance(inventory := values.get("inventory"), dict):
            return values
        implied = {"num_nodes": inventory.get("nodes"), "gpus_per_node": inventory.get("gpus_per_node")}
        written = {name: value for name, value in values.items() if value is not None}
        smallest = {"num_nodes": 1, "gpus_per_node": 0}
        sizes = {name: size for name, size in implied.items() if type(size) is int and size >= smallest[name]}
        return sizes | written
