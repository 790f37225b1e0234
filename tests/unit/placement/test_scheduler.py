"""The scheduler: who gets what, who shares a process, what runs at the same time, what cannot be met."""

from __future__ import annotations

import pickle
import time

import pytest

from rl_platform.config.schema.cluster import PLACEMENT, Cluster, NodeGroup
from rl_platform.errors import PlacementError
from rl_platform.placement.inventory import Inventory, Node
from rl_platform.placement.scheduler import Placement, schedule

LAPTOP = Inventory((Node("laptop", 0, cpus=8),))


def place(
    placement: dict[str, object], inventory: Inventory | tuple[int, int] = (1, 8), groups: list[NodeGroup] | None = None
) -> Placement:
    """Schedules on `inventory`, or on (nodes, GPUs per node)."""
    machines = inventory if isinstance(inventory, Inventory) else Inventory.declared(*inventory)
    cluster = Cluster(num_nodes=len(machines.nodes), component_placement=placement, node_groups=groups or [])
    return schedule(cluster, machines)


def owned(placement: Placement, component: str) -> list[tuple[int, tuple[int, ...]]]:
    return [(slot.node, slot.accelerators) for slot in placement.components[component]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("all", [(0, (0,)), (0, (1,)), (1, (0,)), (1, (1,))]),
        ("all:0-1", [(0, (0, 1)), (1, (0, 1))]),
        ("1-2", [(0, (1,)), (1, (0,))]),
        ("2-3:0", [(1, (0, 1))]),
        ("0:0-2", [(0, (0,))] * 3),
        ("0-1:0-3", [(0, (0,)), (0, (0,)), (0, (1,)), (0, (1,))]),
        ("0,2-3:1", [(0, (0,)), (1, (0, 1))]),
        ("0-1:2-3,2-3:0-1", [(1, (0,)), (1, (1,)), (0, (0,)), (0, (1,))]),
        ({"node_group": "node", "placement": "all"}, [(0, ()), (1, ())]),
        ({"node_group": "node", "placement": "1:0-1"}, [(1, ())] * 2),
    ],
)
def test_slots(text: object, expected: list[tuple[int, tuple[int, ...]]]) -> None:
    placement = place({"rollout": text}, (2, 2))
    assert owned(placement, "rollout") == expected
    assert [slot.rank for slot in placement.components["rollout"]] == list(range(len(expected)))
    assert placement.world_size("rollout") == len(expected)


@pytest.mark.parametrize(("text", "ranks"), [("all", 1), ("all:0-3", 4), ("0", 1), ("0:0-3", 4), (0, 1)])
def test_a_machine_without_gpus_is_one_resource(text: object, ranks: int) -> None:
    placement = place({"rollout": text}, LAPTOP)
    assert owned(placement, "rollout") == [(0, ())] * ranks
    assert placement.hosts[0].env == {}


def test_components_of_one_key_share_hosts_rank_by_rank_and_others_do_not() -> None:
    placement = place({"actor,critic": "0-1", "rollout": "1"})
    assert [(host.name, host.node, host.accelerators, host.members) for host in placement.hosts] == [
        ("actor,critic[0]", 0, (0,), (("actor", 0), ("critic", 0))),
        ("actor,critic[1]", 0, (1,), (("actor", 1), ("critic", 1))),
        ("rollout[0]", 0, (1,), (("rollout", 0),)),
    ]


def test_slots_know_whether_their_gpu_is_shared() -> None:
    placement = place(
        {"actor": "0-1", "critic": "1-2", "rollout": "4:0-1", "env": {"node_group": "node", "placement": 0}}
    )
    shared = {name: [slot.shared for slot in slots] for name, slots in placement.components.items()}
    assert shared == {"actor": [False, True], "critic": [True, False], "rollout": [True, True], "env": [False]}
    assert all(slot.shared for slot in place({"actor,critic": "0-1"}).components["actor"])


def test_visible_devices_are_local_to_the_node_and_hide_gpus_from_cpu_components() -> None:
    placement = place({"rollout": "2-5:0-1", "reward": {"node_group": "node", "placement": "0"}}, (2, 4))
    assert [(host.node, host.env) for host in placement.hosts] == [
        (0, {"CUDA_VISIBLE_DEVICES": "2,3"}),
        (1, {"CUDA_VISIBLE_DEVICES": "0,1"}),
        (0, {"CUDA_VISIBLE_DEVICES": ""}),
    ]


def test_visible_devices_keep_the_names_this_process_was_given() -> None:
    inventory = Inventory((Node("a", 2, device_ids=("5", "GPU-77")),))
    assert [host.env["CUDA_VISIBLE_DEVICES"] for host in place({"actor": "all"}, inventory).hosts] == ["5", "GPU-77"]


def test_node_groups_number_their_own_gpus_and_give_their_variables() -> None:
    groups = [
        NodeGroup(label="train", node_ranks="0,2", env_vars={"NCCL_DEBUG": "WARN"}),
        NodeGroup(label="sim", node_ranks="1"),
    ]
    placement = place(
        {"actor": {"node_group": "train", "placement": "1-2"}, "env": {"node_group": "sim", "placement": "all"}},
        (3, 2),
        groups,
    )
    assert owned(placement, "actor") == [(0, (1,)), (2, (0,))]
    assert owned(placement, "env") == [(1, (0,)), (1, (1,))]
    assert placement.hosts[0].env == {"NCCL_DEBUG": "WARN", "CUDA_VISIBLE_DEVICES": "1"}
    assert placement.hosts[2].env == {"CUDA_VISIBLE_DEVICES": "0"}


def test_nodes_of_different_size_and_a_group_without_gpus() -> None:
    inventory = Inventory((Node("a", 1), Node("b", 0, labels=frozenset({"cpu"})), Node("c", 3)))
    placement = place({"actor": "all", "reward": {"node_group": "cpu", "placement": "all:0-3"}}, inventory)
    assert owned(placement, "actor") == [(0, (0,)), (2, (0,)), (2, (1,)), (2, (2,))]
    assert owned(placement, "reward") == [(1, ())] * 4


def test_only_the_nodes_asked_for_are_used() -> None:
    cluster = Cluster(num_nodes=1, component_placement={"actor": "all"})
    assert schedule(cluster, Inventory.declared(3, 2)).world_size("actor") == 2


def test_who_takes_turns_and_who_runs_beside() -> None:
    node = {"node_group": "node", "placement": "0"}
    placement = place({"actor": "0-3", "critic": "2-5", "rollout": "4-7", "reward": node})
    assert placement.takes_turns_with("actor") == ("critic",)  # they overlap in part
    assert placement.takes_turns_with("critic") == ("actor", "rollout")
    assert placement.takes_turns_with("reward") == ()
    assert placement.runs_beside("actor") == ("rollout", "reward")
    assert placement.runs_beside("reward") == ("actor", "critic", "rollout")


@pytest.mark.parametrize(
    ("placement", "inventory", "obstacle"),
    [
        ({"actor,critic,rollout,reward": "all"}, LAPTOP, ""),
        ({"actor_critic,env,rollout": "all"}, (1, 1), ""),
        ({"actor,critic": "all", "rollout": "all:0-3", "reward": "all:0-7"}, LAPTOP, ""),
        ({"actor": "3", "rollout": "3", "env": {"node_group": "node", "placement": "0:0-3"}}, (1, 8), ""),
        ({"actor": "all", "rollout": "all"}, LAPTOP, ""),
        ({"actor": "all:0-1"}, LAPTOP, "actor has 2 ranks, which train as a group of processes"),
        ({"actor": "0", "critic": "0:0-1"}, (1, 1), "critic has 2 ranks"),
        ({"actor": "0", "reference": "0:0-1"}, (1, 1), "reference has 2 ranks"),
        ({"actor_critic": "0:0-3"}, (1, 1), "actor_critic has 4 ranks"),
        ({"actor": "0", "rollout": "1"}, (1, 2), "2 accelerators are used"),
        ({"actor": "0-1:0"}, (1, 2), "2 accelerators are used"),
        ({"actor": "0", "rollout": "1"}, (2, 1), "ranks are placed on node 1"),
        ({"actor": "1"}, (2, 1), "ranks are placed on node 1"),
    ],
)
def test_whether_one_process_is_enough(
    placement: dict[str, object], inventory: Inventory | tuple[int, int], obstacle: str
) -> None:
    placed = place(placement, inventory)
    assert placed.fits_one_process is (not obstacle)
    assert obstacle in placed.one_process_obstacle


CPU = NodeGroup(label="cpu", node_ranks="1")
IMPOSSIBLE = [  # placement, inventory, groups, message, allowed; `bad_placements.yaml` has the usual mistakes
    ({"actor": "0-999999998:0"}, (1, 8), [], "accelerator 8 does not exist", "0-7 or all"),
    ({"actor": "1"}, (1, 1), [], "the cluster has 1 accelerator", "0 or all"),
    ({"actor": "all:0-2"}, (2, 0), [], "2 resources and 3 ranks do not divide", "multiple of 2"),
    ({"actor": "0-3:0-1"}, (4, 0), [], "4 nodes for 2 ranks", "4 ranks, or a multiple"),
    ({"actor": "0-2:0,6-7:1"}, (2, 3), [], "accelerator 6 does not exist", "0-5 or all"),
    ({"actor": "0-1,2-5:2-3"}, (2, 3), [], "rank 2 would own accelerators of nodes 0 and 1", "one node"),
    ({"env": {"node_group": "cpu", "placement": "4"}}, (2, 4), [CPU], "'cpu' has 4 accelerators", "0-3 or all"),
    ({"env": {"node_group": "Node", "placement": "0"}}, (2, 4), [], "there is no node group 'Node'", "node"),
]


@pytest.mark.parametrize(("placement", "inventory", "groups", "message", "allowed"), IMPOSSIBLE)
def test_impossible_placement(
    placement: dict[str, object], inventory: tuple[int, int], groups: list[NodeGroup], message: str, allowed: str
) -> None:
    with pytest.raises(PlacementError) as caught:
        place(placement, inventory, groups)
    (problem,) = caught.value.problems
    assert problem.key.startswith(f"{PLACEMENT}.{next(iter(placement))}")
    assert message in problem.message
    assert allowed in problem.allowed


def test_all_problems_at_once_and_none_twice() -> None:
    groups = [NodeGroup(label="sim", node_ranks="9"), NodeGroup(label="cpu", node_ranks="0")]
    placement: dict[str, object] = {
        "actor,critic": "0-3:4-7",
        "rollout": "0-99",
        "env": {"node_group": "sim", "placement": "all"},
        "reward": {"node_group": "cpus", "placement": "all"},
    }
    with pytest.raises(PlacementError) as caught:
        place(placement, (1, 8), groups)
    assert [problem.key for problem in caught.value.problems] == [
        f"{PLACEMENT}.actor,critic",
        "cluster.node_groups[0].node_ranks",
        f"{PLACEMENT}.rollout",
        f"{PLACEMENT}.reward.node_group",
    ]


def test_a_placement_and_its_error_can_be_sent_to_another_process() -> None:
    placement = place({"actor,critic": "0-1", "rollout": "2"})
    assert pickle.loads(pickle.dumps(placement)) == placement
    with pytest.raises(PlacementError) as caught:
        place({"actor": "9"})
    assert pickle.loads(pickle.dumps(caught.value)).problems == caught.value.problems


def test_ten_thousand_gpus_are_no_problem() -> None:
    names = ("actor", "critic", "reference", "rollout", "reward", "env")
    start = time.process_time()
    placement = place(dict.fromkeys(names, "all"), (1250, 8))
    assert len(placement.hosts) == 60_000
    assert time.process_time() - start < 3


def test_cpu_workers_are_placed_like_accelerators_and_drive_none() -> None:
    placed = place({"actor,critic": "0-1", "rollout": "2-3:0"}, Inventory.emulated(1, 4))
    assert owned(placed, "actor") == [(0, (0,)), (0, (1,))]
    assert owned(placed, "rollout") == [(0, (2, 3))]
    assert placed.emulated
    assert {host.accelerators for host in placed.hosts} == {()}
    assert {host.env["CUDA_VISIBLE_DEVICES"] for host in placed.hosts} == {""}
