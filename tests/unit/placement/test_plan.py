"""The plan as text: compared whole where it is small, by its promises where it is large."""

from __future__ import annotations

import textwrap

from hypothesis import given
from hypothesis import strategies as st

from rl_platform.config.schema.cluster import Cluster, NodeGroup
from rl_platform.placement.inventory import Inventory, Node
from rl_platform.placement.scheduler import schedule
from rl_platform.planner.placement_text import render


def plan(
    placement: dict[str, object], inventory: Inventory | tuple[int, int], groups: list[NodeGroup] | None = None
) -> str:
    machines = inventory if isinstance(inventory, Inventory) else Inventory.declared(*inventory)
    cluster = Cluster(num_nodes=len(machines.nodes), component_placement=placement, node_groups=groups or [])
    return render(schedule(cluster, machines), machines)


def rows(text: str) -> dict[str, list[str]]:
    """First word of every line -> the other words."""
    return {words[0]: words[1:] for words in map(str.split, reversed(text.splitlines())) if words}


def test_a_laptop() -> None:
    laptop = Inventory((Node("laptop", 0, cpus=8, memory=16 * 2**30),), "detected on this machine")
    assert plan({"actor,critic": "all", "rollout": "all:0-3"}, laptop) == textwrap.dedent(
        """\
        Cluster: 1 node, no GPU, 8 CPUs, 16.0 GiB of memory (detected on this machine)

                 laptop
                 cpu
        actor    0
        critic   0
        rollout  0-3

        Processes: 5 (under the local runtime: threads of the launching one)
          process          node
          actor,critic[0]  laptop
          rollout[0]       laptop
          rollout[1]       laptop
          rollout[2]       laptop
          rollout[3]       laptop

        At the same time:
          no rank has a GPU: all of them compute on the CPU of laptop and share its cores
        """
    )


def test_two_nodes_with_everything() -> None:
    groups = [NodeGroup(label="second", node_ranks="1", env_vars={"MUJOCO_GL": "egl"})]
    placement: dict[str, object] = {
        "actor,critic": "0-1",
        "rollout": "1-2:0-3",
        "env": {"node_group": "second", "placement": "1"},
        "reward": {"node_group": "node", "placement": "0"},
    }
    assert plan(placement, (2, 3), groups) == textwrap.dedent(
        """\
        Cluster: 2 nodes, 6 GPUs (declared by cluster.gpus_per_node)

                 node-0       node-1   node-0
        GPU      0  1    2    3  4  5  cpu
        actor    0  1    .    .  .  .  .
        critic   0  1    .    .  .  .  .
        rollout  .  0-1  2-3  .  .  .  .
        env      .  .    .    .  0  .  .
        reward   .  .    .    .  .  .  0
        Used by no component: GPU 3,5

        Processes: 8 (no local runtime: ranks are placed on node 1, outside the launching machine)
          process          node    CUDA_VISIBLE_DEVICES  variables
          actor,critic[0]  node-0  0
          actor,critic[1]  node-0  1
          rollout[0]       node-0  1
          rollout[1]       node-0  1
          rollout[2]       node-0  2
          rollout[3]       node-0  2
          env[0]           node-1  1                     MUJOCO_GL=egl
          reward[0]        node-0  (empty)

        At the same time:
          actor    takes turns with critic, rollout; runs beside env, reward
          critic   takes turns with actor, rollout; runs beside env, reward
          rollout  up to 2 of its ranks share a GPU; takes turns with actor, critic; runs beside env, reward
          env      runs beside actor, critic, rollout, reward
          reward   on the CPU of node-0; runs beside actor, critic, rollout, env
        """
    )


def test_hundreds_of_gpus_collapse_to_the_columns_that_differ() -> None:
    groups = [NodeGroup(label="sim", node_ranks="0-3", env_vars={"MUJOCO_GL": "egl"})]
    placement: dict[str, object] = {
        "actor,critic": "0-127",
        "rollout": "128-255:0-31",
        "env": {"node_group": "sim", "placement": "all:0-63"},
        "reward": {"node_group": "node", "placement": "all:0-127"},
    }
    text = plan(placement, (32, 8), groups)
    assert "GPU      0-31              32-127             128-255             cpu\n" in text
    assert "rollout  .                 .                  0-31 (4 GPUs each)  .\n" in text
    assert "env      0-63 (2 per GPU)  .                  .                   .\n" in text
    assert "reward   .                 .                  .                   0-127 (4 per node)\n" in text
    assert "node-0 .. node-3  node-4 .. node-15  node-16 .. node-31  node-0 .. node-31\n" in text
    assert "  actor,critic[0-127]  node-0 .. node-15   0 | 1 | 2 | 3 | 4 | 5 | 6 | 7  MUJOCO_GL=egl | (none)\n" in text
    assert "  rollout[0-31]        node-16 .. node-31  0,1,2,3 | 4,5,6,7\n" in text
    assert len(text.splitlines()) < 30


def test_columns_join_only_where_ranks_go_on() -> None:
    header = rows(plan({"actor": "0-15:16-31,16-31:0-15"}, (4, 8)))
    assert header["GPU"] == ["0-15", "16-31"]
    assert header["actor"] == ["16-31", "0-15"]


def test_wide_grids_are_wrapped_between_columns() -> None:
    odd = ",".join(str(8 * node + gpu) for node in range(16) for gpu in (0, 2, 4, 6))
    text = plan({"actor": odd}, (16, 8))
    grids = [line for line in text.splitlines() if line.startswith("GPU")]
    assert len(grids) > 1
    assert sum(len(line.split()) - 1 for line in grids) == 128
    assert max(map(len, text.splitlines())) <= 120
    assert "Used by no component: GPU 1,3,5,7,9,11,13,15,17,19,21,23,... (64 in all)" in text


@given(st.integers(1, 40), st.integers(0, 8), st.booleans(), st.sampled_from(["all", "0", "all:0-319"]))
def test_every_component_has_a_row_and_lines_stay_short(nodes: int, gpus: int, apart: bool, rollout: str) -> None:
    total = nodes * gpus if gpus else nodes
    if rollout.endswith("319") and total and 320 % total:
        rollout = "all"
    key = {"actor": "all", "critic": "all"} if apart else {"actor,critic": "all"}
    text = plan({**key, "rollout": rollout}, (nodes, gpus))
    titles = rows(text.split("Processes")[0])
    assert {"actor", "critic", "rollout"} <= set(titles)
    assert ("GPU" in titles) == (gpus > 0)
    assert ("cpu" in text) == (gpus == 0)
    assert max(map(len, text.splitlines())) <= 120
    assert len(text.splitlines()) < 60
