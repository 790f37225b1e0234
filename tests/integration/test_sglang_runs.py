"""Whole runs that generate with real SGLang, on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from sglang_engine import ENGINE_ENV, needs_sglang
from tiny_configs import GAME, OPENAI_AGENT

from rl_platform.metrics import read_metrics

pytestmark = [needs_sglang, pytest.mark.timeout(900)]
CONFIGS = Path(__file__).parents[2] / "configs" / "reasoning"
WITH_SGLANG = ["rollout.backend=sglang", f"rollout.engine_env={json.dumps(ENGINE_ENV)}"]
WAYS = {
    "two tensor-parallel processes": ["rollout.tensor_parallel_size=2"],
    "weights by a process group": [
        "cluster.devices_per_node=2",
        "cluster.component_placement={'actor,critic,reward': 0, rollout: 1}",
        "rollout.weight_transfer=group",
    ],
}
AGENT = (
    "rollout.agent={environment: {type: 'game.py:Game'}, tools: [{type: 'game.py:Echo'}], tool_format: hermes, "
    "num_workers: 1}",
    "data.max_prompt_length=400",
    "data.max_response_length=16",
    "actor.model.random_init.max_positions=512",
)
CLIENT = ("rollout.agent={function: 'my_agent.py:solve'}", *AGENT[1:])


@pytest.mark.parametrize("overrides", WAYS.values(), ids=WAYS)
def test_a_run_learns_what_it_learns_with_the_torch_engine(learns_as_torch, overrides: list[str]) -> None:
    learns_as_torch([], [*WITH_SGLANG, *overrides], "rollout[0]-sglang.log")


@pytest.mark.parametrize("agent", [AGENT, CLIENT], ids=["a text environment", "an openai client"])
def test_trajectories_of_several_calls(command, folder: Path, final_state, agent: tuple[str, ...]) -> None:
    """The engine generates the calls that arrived since its last batch together."""
    (folder / "game.py").write_text(GAME)
    (folder / "my_agent.py").write_text(OPENAI_AGENT)
    steps = ["runner.max_steps=2", *agent, "rollout.sampling={max_new_tokens: 2, top_k: 1}"]
    assert command("reasoning.yaml", *steps, "rollout.backend=torch", "runner.output_dir=torch").code == 0
    ended = command("reasoning.yaml", *steps, *WITH_SGLANG)
    assert ended.code == 0, ended.err
    torch.testing.assert_close(final_state("out", 2)["actor"], final_state("torch", 2)["actor"], rtol=0, atol=1e-6)
    for expected, found in zip(read_metrics("torch")[1:], read_metrics("out")[1:], strict=True):
        assert found["reward/mean"] == expected["reward/mean"]
        assert (found["turns/mean"], found["tool/errors"]) == (2, 0)
        assert found["mismatch/abs_logp"] < 1e-4


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
