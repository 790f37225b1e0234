"""`cluster.inventory` and the keys that say the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rl_platform.config import load_config
from rl_platform.config.schema import Config
from rl_platform.config.schema.cluster import Cluster
from rl_platform.errors import ConfigError
from rl_platform.placement.inventory import inventory_for

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "configs" / "reasoning" / "ppo_tiny.yaml"  # names no num_nodes
DECLARED = "cluster.inventory={nodes: 512, gpus_per_node: 8, gpu: h100}"


def test_the_size_of_the_cluster_follows() -> None:
    cluster = load_config(CONFIG, [DECLARED]).config.cluster
    assert (cluster.num_nodes, cluster.gpus_per_node) == (512, 8)
    inventory = inventory_for(cluster)
    assert (len(inventory.nodes), inventory.num_accelerators, inventory.gpu) == (512, 4096, "h100")
    assert inventory.origin == "declared by cluster.inventory"


def test_the_resolved_config_loads_again(tmp_path: Path) -> None:
    loaded = load_config(CONFIG, [DECLARED])
    (tmp_path / "again.yaml").write_text(loaded.resolved_yaml())
    assert load_config(tmp_path / "again.yaml").config == loaded.config


@pytest.mark.parametrize("keys", [["num_nodes=512"], ["gpus_per_node=8"], ["num_nodes=null", "gpus_per_node=null"]])
def test_saying_the_same_twice_is_no_contradiction(keys: list[str]) -> None:
    config: Config = load_config(CONFIG, [DECLARED, *(f"cluster.{key}" for key in keys)]).config
    assert config.cluster.num_nodes == 512


@pytest.mark.parametrize(
    ("keys", "key", "message"),
    [
        (["num_nodes=2"], "cluster.num_nodes", "cluster.inventory.nodes is 512"),
        (["gpus_per_node=4"], "cluster.gpus_per_node", "cluster.inventory.gpus_per_node is 8"),
        (["inventory={nodes: 1, gpus_per_node: 0, gpu: h100}"], "cluster.inventory.gpu", "these nodes have no GPU"),
        (["inventory={nodes: 0, gpus_per_node: 8}"], "cluster.inventory.nodes", "out of range"),
        (["inventory={nodes: 1}"], "cluster.inventory.gpus_per_node", "this key is required"),
        (["inventory={nodes: 1, gpus_per_node: 8, gpus: h100}"], "cluster.inventory.gpus", "unknown key"),
        (["inventory={nodes: 1, gpus_per_node: 8, gpu: H100}"], "cluster.inventory.gpu", "not one of the allowed"),
        (["inventory=h100"], "cluster.inventory", ""),
        (["inventory={nodes: two, gpus_per_node: 8}"], "cluster.inventory.nodes", ""),
    ],
)
def test_contradictions_and_typos(keys: list[str], key: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(CONFIG, [DECLARED, *(f"cluster.{one}" for one in keys)])
    assert [problem.key for problem in caught.value.problems] == [key]
    assert message in caught.value.problems[0].message


def test_a_cluster_made_in_code_follows_too() -> None:
    values: dict[str, Any] = {"inventory": {"nodes": 3, "gpus_per_node": 0}, "component_placement": {"actor": "all"}}
    assert Cluster.model_validate(values).num_nodes == 3
