"""Whole runs that generate with real vLLM, on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from vllm_engine import ENGINE_ENV, VLLM_PYTHON, needs_vllm

from rl_platform.metrics import read_metrics

pytestmark = [needs_vllm, pytest.mark.timeout(900)]
WITH_VLLM = [
    "rollout.backend=vllm",
    f"rollout.vllm.python={VLLM_PYTHON}",
    f"rollout.engine_env={json.dumps(ENGINE_ENV)}",
]
HEADS_OF_32 = "actor.model.random_init.hidden_size=64"  # vLLM's attention on a CPU has no smaller ones
APART = ["cluster.devices_per_node=2", "cluster.component_placement={'actor,critic,reward': 0, rollout: 1}"]
WAYS = {"weights of the same process": [], "only differences of the weights": [*APART, "rollout.sync=delta"]}


@pytest.mark.parametrize("overrides", WAYS.values(), ids=WAYS)
def test_a_run_learns_what_it_learns_with_the_torch_engine(learns_as_torch, overrides: list[str]) -> None:
    learns_as_torch([HEADS_OF_32], [*WITH_VLLM, *overrides], "rollout[0]-vllm.log")


def test_trajectories_of_several_calls(agents_train_as_torch) -> None:
    agents_train_as_torch([HEADS_OF_32], WITH_VLLM)


def test_two_updates_ahead_a_run_learns_what_it_learns_with_the_torch_engine(
    command, folder: Path, final_state, scored: str
) -> None:
    ahead = "runner.max_staleness=2", "algorithm.rollout_is={}", "rollout.sampling={top_k: 1}"
    for name, engine in {"torch": ["rollout.backend=torch"], "vllm": WITH_VLLM}.items():
        ended = command("reasoning.yaml", *ahead, HEADS_OF_32, scored, *engine, f"runner.output_dir={name}")
        assert ended.code == 0, ended.err
        assert [row["staleness/max"] for row in read_metrics(folder / name)[1:]] == [0, 1, 2, 2]
    torch.testing.assert_close(final_state("vllm", 4)["actor"], final_state("torch", 4)["actor"], rtol=0, atol=1e-6)


def test_a_seeded_run_repeats_to_the_bit(command, folder: Path, final_state, differences, scored: str) -> None:
    """A response depends on the seed of its request."""
    for name in ("one", "two"):
        ended = command(
            "reasoning.yaml", "runner.max_steps=2", HEADS_OF_32, scored, *WITH_VLLM, f"runner.output_dir={name}"
        )
        assert ended.code == 0, ended.err
    assert differences(final_state("one", 2), final_state("two", 2)) == []
