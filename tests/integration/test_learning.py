"""The small configs learn what they promise, as shipped and through the real command."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rl_platform.metrics import read_metrics

CONFIGS = Path(__file__).parents[2] / "configs"
TENSOR_RANKS = (  # actor and critic on Megatron, two processes each, which share every layer
    "cluster={devices_per_node: 4, component_placement: {actor: 0-1, critic: 2-3, 'rollout,reward': 0}}",
    *(f"{role}.{key}" for role in ("actor", "critic") for key in ("training_backend=megatron", "parallel={tensor: 2}")),
)


def trained(start, folder: Path, config: str, *overrides: str, limit_s: float = 550) -> list[dict[str, float]]:
    """The metrics of a whole run."""
    process = start(CONFIGS / config, "runner.output_dir=out", *overrides)
    _, errors = process.communicate(timeout=limit_s)
    assert process.returncode == 0, errors
    return read_metrics(folder / "out")


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.release)], ids=["until it has", "whole"])
def test_a_language_model_learns_the_last_digit(start, folder: Path, whole: bool):
    """The run ends at 250 steps or, in every test run, after the first validation above 90 %: with the seeds 1, 2 and 3
    after 150, 70 and 100 steps."""
    (folder / "learned.py").write_text("def stop(step, metrics):\n    return metrics.get('val/accuracy', 0.0) > 0.9\n")
    until = [] if whole else ["runner.callbacks=[learned:stop]", "runner.val_check_interval=10", "runner.seed=2"]
    rows = trained(start, folder, "reasoning/ppo_tiny.yaml", *until)
    assert rows[0]["val/accuracy"] < 0.2
    assert rows[-1]["val/accuracy"] > 0.9


@pytest.mark.release  # that this layout computes what one process computes is tested always: test_resharding.py
@pytest.mark.skipif(torch.cuda.is_available(), reason="Megatron would compute on the GPU of this machine")
def test_a_language_model_that_four_megatron_processes_train_learns(start, folder: Path):
    """The beginning of a run that ends at 100 %. Whoever answers with any digit is right once in ten."""
    constant = (f"{role}.optim={{lr: 1.0e-3, lr_warmup_steps: 10}}" for role in ("actor", "critic"))
    short = "runner.max_steps=100", "runner.trace_steps=0", "runner.logger_backends=[]"
    rows = trained(start, folder, "reasoning/ppo_tiny.yaml", *TENSOR_RANKS, *constant, *short)
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    assert len(rewards) == 100
    assert sum(rewards[:5]) / 5 < 0.02
    assert sum(rewards[-5:]) / 5 > 0.2
    assert rows[0]["val/accuracy"] < 0.1


@pytest.mark.release
@pytest.mark.timeout(1500)
def test_a_language_model_learns_to_use_a_calculator(start, folder: Path):
    rows = trained(start, folder, "reasoning/multi_turn.yaml", limit_s=1400)
    assert rows[0]["val/accuracy"] < 0.1
    assert rows[-1]["tool/calls"] > 0.9
    assert rows[-1]["val/accuracy"] > 0.3


def test_a_policy_balances_the_pole(start, folder: Path):
    rows = trained(start, folder, "embodied/cartpole.yaml")
    assert rows[0]["val/return"] < 100
    assert rows[-1]["val/return"] >= 475


def test_a_policy_that_remembers_balances_a_pole_whose_velocities_are_hidden(start, folder: Path):
    """Without a memory, positions alone do not suffice. With one, a validation is above 400 after 20 of 30 steps."""
    (folder / "balanced.py").write_text("def stop(step, metrics):\n    return metrics.get('val/return', 0.0) > 400\n")
    brief = "runner.max_steps=30", "runner.val_check_interval=5", "runner.callbacks=[balanced:stop]"
    brief = *brief, "env.evaluation.episodes=4", "runner.trace_steps=0", "runner.logger_backends=[]"
    remembers = trained(start, folder, "embodied/masked_cartpole.yaml", *brief)
    (folder / "out").rename(folder / "recurrent")
    forgets = trained(start, folder, "embodied/masked_cartpole.yaml", *brief, "actor.model={hidden_sizes: [64, 64]}")
    assert remembers[0]["val/return"] < 100
    assert remembers[-1]["val/return"] > 400
    assert [row["step"] for row in forgets] == [*range(31)], "no validation was above 400"
    assert forgets[-1]["val/return"] < 100


def test_a_policy_without_values_balances_the_pole(start, folder: Path):
    rows = trained(start, folder, "embodied/cartpole_grpo.yaml", "runner.max_steps=12", "runner.val_check_interval=0")
    assert rows[0]["val/return"] < 60
    assert rows[-1]["val/return"] > 150  # 200 of 200 with each of the seeds 1 to 6
