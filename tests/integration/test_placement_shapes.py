"""Every shipped placement learns on Ray what one process learns: same seed, same data, parameters to 1e-6."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ray_cluster import ray_cluster

CONFIGS = Path(__file__).parents[2] / "configs"
STEPS = 2  # the second one generates with updated weights
POOLS = ("other", "generate", "train", "other")  # of the four nodes
SMALL = {
    "embodied": ["env.rollout_steps=32", "algorithm.ppo_epochs=2", "env.evaluation.episodes=1"],
    "reasoning": [
        "data.train_batch_size=16",
        "data.mini_batch_size=8",
        "data.val_size=4",
        "actor.model.random_init.hidden_size=32",
        "actor.model.random_init.num_layers=2",
        "actor.model.random_init.intermediate_size=64",
    ],
}
# Each shape by one task, always; by the other one, which differs in the components only, before a release. Two nodes
# are those of the test of the process group, and test_ray_runs.py has a critic alone.
SOON = {
    "embodied": {"disjoint", "cpu_nodes", "several_ranks_per_gpu", "four_nodes", "learner_alone"},
    "reasoning": {"all_shared", "overlapping", "several_gpus_per_rank", "ray_labels"},
}


def shapes() -> list[Any]:
    found = []
    for path in sorted(CONFIGS.glob("*/placements/*.yaml")):
        task = path.parents[1].name
        marks = [] if path.stem in SOON[task] else [pytest.mark.release]
        found.append(pytest.param(path, id=f"{task}/{path.stem}", marks=marks))
    return found


@pytest.fixture(scope="module")
def four_nodes(forked_workers: None) -> Iterator[str]:
    """The address of a Ray cluster of four nodes, all on this machine."""
    with ray_cluster(*[1] * len(POOLS), store_mib=128, pools=POOLS) as address:
        yield address


Learned = Callable[..., dict[str, dict[str, torch.Tensor]]]


@pytest.fixture
def learned(command, final_state) -> Learned:
    """learned(path, *overrides): the parameters after the last step, by component and name."""

    def run(path: Path, *overrides: str) -> dict[str, dict[str, torch.Tensor]]:
        shutil.rmtree("out", ignore_errors=True)
        task = path.relative_to(CONFIGS).parts[0]
        few = f"runner.max_steps={STEPS}", "runner.output_dir=out", "runner.logger_backends=[]", "runner.trace_steps=0"
        ended = command(path, *SMALL[task], *few, *overrides)
        assert ended.code == 0, ended.err
        return {name: part["model"] for name, part in final_state("out", STEPS).items() if "model" in part}

    return run


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    """What one process learns, by task; filled by the first test that asks."""
    return {}


@pytest.mark.parametrize("path", shapes())
def test_shape(path: Path, four_nodes: str, learned: Learned, known: dict[str, Any]) -> None:
    learns_the_same(path, [], four_nodes, learned, known)


def test_weights_by_a_process_group_to_another_node(four_nodes: str, learned: Learned, known: dict[str, Any]) -> None:
    path = CONFIGS / "reasoning" / "placements" / "two_nodes.yaml"
    learns_the_same(path, ["rollout.weight_transfer=group"], four_nodes, learned, known)


def learns_the_same(path: Path, overrides: list[str], address: str, learned: Learned, known: dict[str, Any]) -> None:
    task = path.relative_to(CONFIGS).parts[0]
    if task not in known:
        base = {"embodied": "cartpole", "reasoning": "ppo_tiny"}[task]
        known[task] = learned(CONFIGS / task / f"{base}.yaml", "cluster.runtime=local")
    found, expected = learned(path, f"cluster.address={address}", "cluster.runtime=ray", *overrides), known[task]
    assert found.keys() == expected.keys()
    for part, parameters in expected.items():
        assert found[part].keys() == parameters.keys()
        for name, tensor in parameters.items():
            torch.testing.assert_close(found[part][name], tensor, rtol=1e-6, atol=1e-6, msg=f"{part} {name}")
