"""Malformed and impossible placements as the command line tells them: the key, what is wrong, the piece, what to do.

Each row changes a placement that works (8 GPUs on one node) in one way.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rl_platform.errors import ConfigError
from rl_platform.launch.cli import load

ROOT = Path(__file__).parents[3]
WORKS = {"actor,critic": "0-3", "rollout": "4-6", "reward": "7"}
GRAMMAR = (
    'segments resources[:ranks] separated by commas, each side n or a-b, or all: "0-3", "0-7:0-3", "0-3,8-11", "all"'
)
NAMES = "actor, critic, actor_critic, reference, rollout, reward, env"
AWAY = object()  # the key is taken out
NOTHING = dict.fromkeys(WORKS, AWAY)


class Bad(NamedTuple):
    """Changes to the placement and to `cluster`, and the one problem they make. `key` is below `cluster`."""

    placement: dict[str, Any]
    cluster: dict[str, Any]
    key: str
    message: str
    value: str
    allowed: str
    hint: str


BAD = [
    Bad(
        {"actor,critic": "3-0"},
        {},
        "component_placement.actor,critic",
        "the range runs backwards",
        '"3-0", character 1: "3-0"',
        GRAMMAR,
        "write 0-3",
    ),
    Bad(
        {"rollout": "-1"},
        {},
        "component_placement.rollout",
        "numbers cannot be negative",
        '"-1", character 1: "-1"',
        GRAMMAR,
        "",
    ),
    Bad(
        {"rollout": "4-"},
        {},
        "component_placement.rollout",
        "a range needs both ends",
        '"4-", character 1: "4-"',
        GRAMMAR,
        "as 0-3",
    ),
    Bad(
        {"rollout": "4-5-6"},
        {},
        "component_placement.rollout",
        "a range has two ends, not more",
        '"4-5-6", character 1: "4-5-6"',
        GRAMMAR,
        "as 0-3",
    ),
    Bad(
        {"rollout": "4-6,"},
        {},
        "component_placement.rollout",
        "a segment is empty",
        '"4-6,", character 5',
        GRAMMAR,
        "there is a comma too many",
    ),
    Bad(
        {"rollout": "4 5"},
        {},
        "component_placement.rollout",
        "a comma is missing between the numbers",
        '"4 5", character 1: "4 5"',
        GRAMMAR,
        "",
    ),
    Bad(
        {"rollout": "4..6"},
        {},
        "component_placement.rollout",
        "ranges are written with a hyphen",
        '"4..6", character 1: "4..6"',
        GRAMMAR,
        "as 0-3",
    ),
    Bad(
        {"rollout": "gpu4"},
        {},
        "component_placement.rollout",
        "this is neither a number nor a range",
        '"gpu4", character 1: "gpu4"',
        GRAMMAR,
        "",
    ),
    Bad(
        {"rollout": "4;5"},
        {},
        "component_placement.rollout",
        "this is neither a number nor a range",
        '"4;5", character 1: "4;5"',
        GRAMMAR,
        "",
    ),
    Bad(
        {"rollout": "04"},
        {},
        "component_placement.rollout",
        "numbers have no leading zeros",
        '"04", character 1: "04"',
        GRAMMAR,
        "YAML 1.1 takes 010 for octal",
    ),
    Bad(
        {"rollout": "ALL"},
        {},
        "component_placement.rollout",
        "`all` is lower case and stands alone, on the resource side",
        '"ALL", character 1: "ALL"',
        GRAMMAR,
        "as all or all:0-3",
    ),
    Bad(
        {"rollout": "4-6:all"},
        {},
        "component_placement.rollout",
        "`all` is lower case and stands alone, on the resource side",
        '"4-6:all", character 5: "all"',
        GRAMMAR,
        "as all or all:0-3",
    ),
    Bad(
        {"rollout": "all,4"},
        {},
        "component_placement.rollout",
        "`all` leaves nothing for other segments",
        '"all,4", character 1: "all"',
        "all, or all:ranks, alone",
        "",
    ),
    Bad(
        {"rollout": "4-6:"},
        {},
        "component_placement.rollout",
        "no ranks stand after the colon",
        '"4-6:", character 1: "4-6:"',
        GRAMMAR,
        "leave out the colon for one rank on each resource",
    ),
    Bad(
        {"rollout": ":0-2"},
        {},
        "component_placement.rollout",
        "no resources stand before the colon",
        '":0-2", character 1: ":0-2"',
        GRAMMAR,
        "",
    ),
    Bad(
        {"rollout": "4:0:0"},
        {},
        "component_placement.rollout",
        "a segment has one colon at most",
        '"4:0:0", character 1: "4:0:0"',
        GRAMMAR,
        "resources, a colon, ranks",
    ),
    Bad(
        {"rollout": "4-99999999999"},
        {},
        "component_placement.rollout",
        "the number is too large",
        '"4-99999999999", character 1: "4-99999999999"',
        GRAMMAR,
        "at most nine digits",
    ),
    Bad(
        {"rollout": "4:0-999999"},
        {},
        "component_placement.rollout",
        "1000000 ranks are too many",
        '"4:0-999999", character 1: "4:0-999999"',
        "at most 100000 ranks",
        "",
    ),
    Bad(
        {"actor,critic": "2-3,0-1"},
        {},
        "component_placement.actor,critic",
        "resources must ascend",
        '"2-3,0-1", character 5: "0-1"',
        "ascending resources, each once",
        "",
    ),
    Bad(
        {"actor,critic": "0-3,2"},
        {},
        "component_placement.actor,critic",
        "resource 2 is named twice",
        '"0-3,2", character 5: "2"',
        "ascending resources, each once",
        "",
    ),
    Bad(
        {"rollout": "4-6:4-6"},
        {},
        "component_placement.rollout",
        "ranks must start at 0, these start at 4",
        '"4-6:4-6", character 1: "4-6:4-6"',
        "the ranks 0-2, each once",
        "ranks follow the colon; without a colon every resource gets one rank",
    ),
    Bad(
        {"rollout": "4:0,5:2"},
        {},
        "component_placement.rollout",
        "rank 1 is missing",
        '"4:0,5:2", character 5: "5:2"',
        "the ranks 0-1, each once",
        "",
    ),
    Bad(
        {"rollout": "4:0,5:0"},
        {},
        "component_placement.rollout",
        "rank 0 is named twice",
        '"4:0,5:0", character 5: "5:0"',
        "the ranks 0-1, each once",
        "",
    ),
    Bad(
        {"rollout": "4-6:0-1"},
        {},
        "component_placement.rollout",
        "3 resources and 2 ranks do not divide one another",
        '"4-6:0-1", character 1: "4-6:0-1"',
        "1, 3 ranks (a rank owns several resources), or a multiple of 3 (they share)",
        "",
    ),
    Bad(
        {"actor,critic": "all:0-2"},
        {},
        "component_placement.actor,critic",
        "8 resources and 3 ranks do not divide one another",
        '"all:0-2", character 1: "all:0-2"',
        "1, 2, 4, 8 ranks (a rank owns several resources), or a multiple of 8 (they share)",
        "",
    ),
    Bad({"rollout": ""}, {}, "component_placement.rollout", "the text is empty", '""', GRAMMAR, ""),
    Bad({"rollout": None}, {}, "component_placement.rollout", "the text is empty", "null", GRAMMAR, ""),
    Bad(
        {"rollout": [4, 5]},
        {},
        "component_placement.rollout",
        "this must be a text, not a list",
        "['4', '5']",
        GRAMMAR,
        'write "4,5"',
    ),
    Bad(
        {"rollout": 60},
        {},
        "component_placement.rollout",
        "accelerator 60 does not exist: the cluster has 8 accelerators",
        '"60", character 1: "60"',
        "0-7 or all",
        "all fits every cluster",
    ),
    Bad(
        {"rollout": True},
        {},
        "component_placement.rollout",
        "this must be a text, not a truth value",
        "True",
        GRAMMAR,
        "",
    ),
    Bad(
        {"rollout": 4.5},
        {},
        "component_placement.rollout",
        "this is neither a number nor a range",
        '"4.5", character 1: "4.5"',
        GRAMMAR,
        "",
    ),
    Bad(
        {"rolout": "4-6", "rollout": AWAY},
        {},
        "component_placement.rolout",
        "no component is called 'rolout'",
        '"rolout", character 1: "rolout"',
        NAMES,
        "did you mean rollout?",
    ),
    Bad(
        {"rollout,actor": "4-6", "rollout": AWAY},
        {},
        "component_placement.rollout,actor",
        "actor is placed by 'actor,critic' too",
        '"rollout,actor", character 9: "actor"',
        NAMES,
        "place every component once",
    ),
    Bad(
        {"rollout,rollout": "4-6", "rollout": AWAY},
        {},
        "component_placement.rollout,rollout",
        "rollout is placed twice in this key",
        '"rollout,rollout", character 9: "rollout"',
        NAMES,
        "place every component once",
    ),
    Bad(
        {"rollout,": "4-6", "rollout": AWAY},
        {},
        "component_placement.rollout,",
        "a component name is missing",
        '"rollout,", character 9',
        NAMES,
        "there is a comma too many",
    ),
    Bad(
        {"rollout": AWAY},
        {},
        "component_placement",
        "rollout without a place: reasoning needs actor, rollout and reward",
        '{"actor,critic": "0-3", "reward": "7"}',
        "",
        "add rollout to one of the keys or as keys of their own",
    ),
    Bad(
        {"actor,critic": AWAY, "actor": "0-3"},
        {},
        "component_placement",
        "critic without a place: critic.use_critic_model is true",
        '{"rollout": "4-6", "reward": "7", "actor": "0-3"}',
        "",
        "add critic to one of the keys or as keys of their own",
    ),
    Bad(
        {"reference": "0-3"},
        {},
        "component_placement.reference",
        "reference is placed, but no KL term is on: it would hold a model that nobody asks",
        '"0-3"',
        "",
        "take reference out of this key",
    ),
    Bad(
        {"env": "7"},
        {},
        "component_placement.env",
        "env is placed, but reasoning training has no such component",
        '"7"',
        "",
        "take env out of this key",
    ),
    Bad(
        {"actor_critic": "0-3"},
        {},
        "component_placement.actor_critic",
        "actor_critic and actor are two names of one component",
        "actor is placed by 'actor,critic'",
        "one of the two",
        "embodied: keep actor_critic; reasoning: keep actor",
    ),
    Bad(NOTHING, {}, "component_placement", "no component is placed", "{}", GRAMMAR, 'as "actor,critic,rollout": all'),
    Bad(
        {"rollout": "4-8"},
        {},
        "component_placement.rollout",
        "accelerator 8 does not exist: the cluster has 8 accelerators",
        '"4-8", character 1: "4-8"',
        "0-7 or all",
        "all fits every cluster",
    ),
    Bad(
        {"rollout": "12-15"},
        {},
        "component_placement.rollout",
        "accelerator 12 does not exist: the cluster has 8 accelerators",
        '"12-15", character 1: "12-15"',
        "0-7 or all",
        "all fits every cluster",
    ),
    Bad(
        {"actor,critic": "all", "rollout": "all", "reward": "2"},
        {"gpus_per_node": 0},
        "component_placement.reward",
        "node 2 does not exist: the cluster has 1 node",
        '"2", character 1: "2"',
        "0 or all",
        "the cluster has no accelerators, so its nodes are counted; all fits every cluster",
    ),
    Bad(
        {"rollout": "6-9:0"},
        {"num_nodes": 2},
        "component_placement.rollout",
        "rank 0 would own accelerators of nodes 0 and 1: a rank is one process on one node",
        '"6-9:0", character 1: "6-9:0"',
        "accelerators of one node for each rank",
        "start its accelerators at a node's first one, or give it fewer",
    ),
    Bad(
        {"reward": {"node_group": "node", "placement": "0-1:0"}},
        {"num_nodes": 2},
        "component_placement.reward.placement",
        "2 nodes for 1 rank: a rank is one process",
        '"0-1:0", character 1: "0-1:0"',
        "2 ranks, or a multiple",
        "as all, or one node",
    ),
    Bad(
        {"reward": {"node_group": "node", "placement": "1"}},
        {},
        "component_placement.reward.placement",
        "node 1 does not exist: node group 'node' has 1 node",
        '"1", character 1: "1"',
        "0 or all",
        "all fits every cluster",
    ),
    Bad(
        {"reward": {"node_group": "cpus", "placement": "0"}},
        {"node_groups": [{"label": "cpu", "node_ranks": "0"}]},
        "component_placement.reward.node_group",
        "there is no node group 'cpus'",
        "cpus",
        "cpu, node",
        "did you mean cpu?",
    ),
    Bad(
        {"reward": {"node_group": 3, "placement": "0"}},
        {},
        "component_placement.reward.node_group",
        "there is no node group '3'",
        "3",
        "node",
        "declare it under cluster.node_groups",
    ),
    Bad(
        {"reward": {"nodegroup": "node", "placement": "0"}},
        {},
        "component_placement.reward.nodegroup",
        "unknown key",
        "",
        "node_group, placement",
        "did you mean node_group?",
    ),
    Bad(
        {"reward": {"node_group": "node"}},
        {},
        "component_placement.reward",
        "the long form lacks its placement",
        "{'node_group': 'node'}",
        GRAMMAR,
        "",
    ),
    Bad(
        {},
        {"node_groups": [{"label": "cpu", "node_ranks": "1"}]},
        "node_groups[0].node_ranks",
        "node 1 does not exist",
        '"1"',
        "node 0, the only one",
        "",
    ),
    Bad(
        {},
        {"node_groups": [{"label": "cpu", "node_ranks": "0-"}]},
        "node_groups[0].node_ranks",
        "a range needs both ends",
        '"0-", character 1: "0-"',
        'n or a-b separated by commas: "0-1,3"',
        "as 0-3",
    ),
    Bad(
        {},
        {"node_groups": [{"label": "node", "node_ranks": "0"}]},
        "node_groups[0].label",
        "the label is reserved: it counts nodes",
        "node",
        "",
        "choose another name",
    ),
    Bad(
        {},
        {"node_groups": [{"label": "a", "node_ranks": "0"}, {"label": "a", "node_ranks": "0"}]},
        "node_groups[1].label",
        "the label names cluster.node_groups[0] already",
        "a",
        "",
        "choose another name",
    ),
    Bad(
        {},
        {"node_groups": [{"label": "a", "node_ranks": "0", "env_vars": {"CUDA_VISIBLE_DEVICES": "0"}}]},
        "node_groups[0].env_vars.CUDA_VISIBLE_DEVICES",
        "this variable follows from the placement",
        "0",
        "",
        "place components on other resources instead",
    ),
    Bad(
        {},
        {
            "node_groups": [
                {"label": "a", "node_ranks": "0", "env_vars": {"X": "1"}},
                {"label": "b", "node_ranks": "0", "env_vars": {"X": "2"}},
            ]
        },
        "node_groups[1].env_vars.X",
        "another group gives node-0 another value",
        "2",
        "1, or nodes that are in one of the groups only",
        "",
    ),
    Bad(
        {},
        {"num_nodes": 1, "gpus_per_node": None, "inventory": {"nodes": 2, "gpus_per_node": 8}},
        "num_nodes",
        "cluster.inventory.nodes says 2: they speak of the same cluster",
        "1",
        "",
        "leave out cluster.num_nodes, or set it to null: it follows",
    ),
    Bad(
        {},
        {"gpus_per_node": 4, "inventory": {"nodes": 1, "gpus_per_node": 8}},
        "gpus_per_node",
        "cluster.inventory.gpus_per_node says 8: they speak of the same cluster",
        "4",
        "",
        "leave out cluster.gpus_per_node, or set it to null: it follows",
    ),
    Bad(
        {},
        {"gpus_per_node": 8, "inventory": {"nodes": 1, "gpus_per_node": 8, "gpu": "h1000"}},
        "inventory.gpu",
        "not one of the allowed values",
        '"h1000"',
        "a10, a100-40gb, a100-80gb, b200, h100, h20, h200, l4, l40s, mi300x, rtx4090, or null",
        "did you mean h100?",
    ),
    Bad(
        {"actor,critic": AWAY, "rollout": AWAY, "reward": AWAY, "actor,critic,rollout,reward": "all"},
        {"gpus_per_node": 0, "inventory": {"nodes": 1, "gpus_per_node": 0, "gpu": "h100"}},
        "inventory.gpu",
        "these nodes have no GPU (cluster.inventory.gpus_per_node is 0)",
        '"h100"',
        "",
        "remove it",
    ),
]


def cluster_of(changes: dict[str, Any], cluster: dict[str, Any]) -> dict[str, Any]:
    placement = {key: value for key, value in {**WORKS, **changes}.items() if value is not AWAY}
    return {"gpus_per_node": 8, **cluster, "component_placement": placement}


def test_there_are_many_and_they_differ() -> None:
    assert len(BAD) >= 40
    assert len({(bad.key, bad.message, bad.value) for bad in BAD}) == len(BAD)


def test_what_they_change_works() -> None:
    load(str(ROOT / "configs/reasoning/ppo.yaml"), [f"cluster={json.dumps(cluster_of({}, {}))}"])


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: f"{bad.key}: {bad.message}"[:80])
def test_bad_placement(bad: Bad) -> None:
    with pytest.raises(ConfigError) as caught:
        load(
            str(ROOT / "configs/reasoning/ppo.yaml"), [f"cluster={json.dumps(cluster_of(bad.placement, bad.cluster))}"]
        )
    (problem,) = caught.value.problems
    found = (problem.key, problem.message, problem.value, problem.allowed, problem.hint)
    assert found == (f"cluster.{bad.key}", *bad[3:])
    assert caught.value.exit_code == 2
