"""The small configs learn what they promise, as shipped and through the real command."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_platform.metrics import read_metrics

CONFIGS = Path(__file__).parents[2] / "configs"


def trained(start, folder: Path, config: str, *overrides: str) -> list[dict[str, float]]:
    """The metrics of a whole run."""
    process = start(CONFIGS / config, "runner.output_dir=out", *overrides)
    _, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors
    return read_metrics(folder / "out")


@pytest.mark.slow
def test_a_language_model_learns_the_last_digit(start, folder: Path):
    rows = trained(start, folder, "reasoning/ppo_tiny.yaml")
    assert rows[0]["val/accuracy"] < 0.2
    assert rows[-1]["val/accuracy"] > 0.9


@pytest.mark.slow
def test_a_language_model_learns_to_use_a_calculator(start, folder: Path):
    rows = trained(start, folder, "reasoning/multi_turn.yaml", "runner.max_steps=150")
    assert rows[0]["val/accuracy"] == 0.0
    assert rows[-1]["tool/calls"] > 0.9
    assert rows[-1]["val/accuracy"] > 0.3


def test_a_policy_balances_the_pole(start, folder: Path):
    rows = trained(start, folder, "embodied/cartpole.yaml")
    assert rows[0]["val/return"] < 100
    assert rows[-1]["val/return"] >= 475
