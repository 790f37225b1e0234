"""Whole runs that generate with real SGLang, on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sglang_engine import ENGINE_ENV, needs_sglang

from rl_platform.metrics import read_metrics

pytestmark = [needs_sglang, pytest.mark.timeout(900), pytest.mark.usefixtures("forked_engines")]
CONFIGS = Path(__file__).parents[2] / "configs" / "reasoning"
WITH_SGLANG = ["rollout.backend=sglang", f"rollout.engine_env={json.dumps(ENGINE_ENV)}"]
SPAWNED = f"rollout.engine_env={json.dumps(ENGINE_ENV | {'START_METHOD': 'spawn'})}"
WAYS = {
    "two tensor-parallel processes": ["rollout.tensor_parallel_size=2"],
    # Ray's worker starts the engine, and the engine its scheduler, as for a user: neither is a fork.
    "weights by a process group": [
        SPAWNED,
        "cluster.devices_per_node=2",
        "cluster.component_placement={'actor,critic,reward': 0, rollout: 1}",
        "rollout.weight_transfer=group",
    ],
}


@pytest.mark.parametrize("overrides", WAYS.values(), ids=WAYS)
def test_a_run_learns_what_it_learns_with_the_torch_engine(learns_as_torch, overrides: list[str]) -> None:
    learns_as_torch([], [*WITH_SGLANG, *overrides], "rollout[0]-sglang.log")


def test_trajectories_of_several_calls(agents_train_as_torch) -> None:
    agents_train_as_torch([], WITH_SGLANG)


@pytest.mark.release
def test_a_language_model_learns_the_last_digit(start, folder: Path) -> None:
    process = start(CONFIGS / "ppo_tiny.yaml", *WITH_SGLANG, "runner.output_dir=out")
    _, errors = process.communicate(timeout=850)
    assert process.returncode == 0, errors
    rows = read_metrics(folder / "out")
    assert rows[0]["val/accuracy"] < 0.2
    assert rows[-1]["val/accuracy"] > 0.9
    assert max(row["mismatch/abs_logp"] for row in rows[1:]) < 1e-4


@pytest.mark.release
def test_two_steps_of_a_pretrained_model(start, folder: Path) -> None:
    small = "runner.max_steps=2", "data.val_size=20", "runner.output_dir=out"
    process = start(CONFIGS / "ppo.yaml", *WITH_SGLANG, *small)
    _, errors = process.communicate(timeout=850)
    assert process.returncode == 0, errors
    rows = read_metrics(folder / "out")[1:]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["mismatch/abs_logp"] < 1e-3
        assert row["actor/grad_norm"] > 0
