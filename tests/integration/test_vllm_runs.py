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
LIKELIEST = "rollout.sampling={top_k: 1}"  # drawn from one token: both engines draw the same
APART = ["cluster.devices_per_node=2", "cluster.component_placement={'actor,critic,reward': 0, rollout: 1}"]
WAYS = {"weights of the same process": [], "only differences of the weights": [*APART, "rollout.sync=delta"]}


@pytest.mark.parametrize("overrides", WAYS.values(), ids=WAYS)
def test_a_run_learns_what_it_learns_with_the_torch_engine(
    command, folder: Path, final_state, scored: str, overrides: list[str]
) -> None:
    """The trainer's numbers depend on the engine by its tokens alone; processes apart round in another way."""
    steps = ["runner.max_steps=3", HEADS_OF_32, scored, LIKELIEST]
    assert command("reasoning.yaml", *steps, "rollout.backend=torch", "runner.output_dir=torch").code == 0
    ended = command("reasoning.yaml", *steps, *WITH_VLLM, *overrides)
    assert ended.code == 0, ended.err
    expected, actual = final_state("torch", 3), final_state("out", 3)
    for learner in ("actor", "critic"):
        torch.testing.assert_close(actual[learner], expected[learner], rtol=0, atol=1e-6)
    rows = read_metrics("out")[1:]
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:  # the trainer's log-probs of these tokens, under the weights of this very step
        assert row["mismatch/abs_logp"] < 1e-4
        assert row["staleness/max"] == 0
        assert row["actor/grad_norm"] > 0, "else nothing is learned and nothing compared"
    assert (folder / "out" / "logs" / "rollout[0]-vllm.log").exists()


def test_a_seeded_run_repeats_to_the_bit(command, folder: Path, final_state, differences, scored: str) -> None:
    """A response depends on the seed of its request."""
    for name in ("one", "two"):
        ended = command(
            "reasoning.yaml", "runner.max_steps=2", HEADS_OF_32, scored, *WITH_VLLM, f"runner.output_dir={name}"
        )
        assert ended.code == 0, ended.err
    assert differences(final_state("one", 2), final_state("two", 2)) == []
