"""What a run wants of the nodes of a cluster, and whether they can give it."""

from __future__ import annotations

import pytest

from rl_platform.config.schema.cluster import Cluster, NodeGroup
from rl_platform.placement.inventory import Inventory
from rl_platform.placement.scheduler import schedule
from rl_platform.runtime.ray.reservation import NodeResources, by_node, fits, listed, resources_for, threads_for


def place(gpus: int, **labels: str) -> NodeResources:
    return NodeResources({"GPU": float(gpus)}, labels)


CPU, GPU = {"pool": "cpu"}, {"pool": "gpu"}


@pytest.mark.parametrize(
    ("wanted", "there", "possible"),
    [
        ([place(4), place(8)], [place(8), place(4), place(0)], True),
        ([place(8), place(8)], [place(8), place(4)], False),
        ([place(1), place(1)], [place(8)], False),
        ([place(0, **CPU)], [place(8, **GPU), place(0, **CPU)], True),
        ([place(0, **CPU)], [place(8, **GPU), place(0)], False),
        # the first could have either node: it must leave the labelled one to the second
        ([place(0), place(0, **CPU)], [place(0, **CPU), place(0)], True),
        ([place(0), place(0, **CPU), place(1)], [place(0, **CPU), place(1), place(0)], True),
        ([place(1), place(0, **CPU), place(1)], [place(1, **CPU), place(1), place(0)], False),
    ],
)
def test_each_place_is_a_node_of_its_own(
    wanted: list[NodeResources], there: list[NodeResources], possible: bool
) -> None:
    assert fits(wanted, there) is possible


def test_places_are_listed_with_their_gpus_and_labels() -> None:
    nodes = [place(8), NodeResources({"CPU": 4.0}, {"pool": "cpu", "ray.io/node-id": "1f"})]
    assert listed(nodes) == "2 nodes with 8, 0 (pool=cpu) GPUs"


def test_hosts_want_the_labels_of_their_node_group() -> None:
    cluster = Cluster(
        num_nodes=2,
        node_groups=[NodeGroup(label="cpu", node_ranks="1", accelerators=0, ray_labels=CPU)],
        component_placement={
            "actor,critic,rollout": "all",
            "reward": {"node_group": "cpu", "placement": "all:0-1"},
        },
    )
    parts = by_node(schedule(cluster, Inventory.declared(2, 2)).hosts)
    assert [[host.name for host in part] for part in parts] == [
        ["actor,critic,rollout[0]", "actor,critic,rollout[1]"],
        ["reward[0]", "reward[1]"],
    ]
    assert [resources_for(part).labels for part in parts] == [{}, CPU]
    assert [resources_for(part).resources.get("GPU") for part in parts] == [2.0, None]


def test_a_host_that_owns_two_cpu_workers_has_twice_the_threads() -> None:
    cluster = Cluster(component_placement={"actor,critic": "0-1", "rollout": "2-5:0-1", "reward": "6"})
    hosts = schedule(cluster, Inventory.emulated(1, 8)).hosts
    threads = {host.name: threads_for(host, hosts, 14) for host in hosts}
    assert threads == {
        "actor,critic[0]": 2,
        "actor,critic[1]": 2,
        "rollout[0]": 4,
        "rollout[1]": 4,
        "reward[0]": 2,
    }
    assert {threads_for(host, hosts, 2) for host in hosts} == {1}
