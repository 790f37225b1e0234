"""Every example of `examples/` runs as its first line says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from run_results import differences, final_state

from rl_platform.launch.saved.loaded_policy import load_policy
from rl_platform.metrics import read_metrics

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """run(name, *overrides): runs examples/NAME.yaml from the root of the repository; returns its metrics."""

    def run(name: str, *overrides: str, folder: str = "out") -> list[dict[str, float]]:
        monkeypatch.chdir(ROOT)
        ended = command(f"examples/{name}.yaml", f"runner.output_dir={tmp_path / folder}", *overrides)
        assert ended.code == 0, ended.err
        return read_metrics(tmp_path / folder)

    return run


def test_callback(run, tmp_path: Path) -> None:
    metrics = run("callback")
    assert len(metrics) < 50  # of 100
    assert [row["episode/return"] > 20 for row in metrics[-4:]] == [False, True, True, True]
    assert (tmp_path / "out" / "checkpoints").exists()


def test_environment_with_dictionaries_and_several_choices_is_learned(run) -> None:
    """A random policy gets a third of the dials right; 10 steps reward at most 1 each."""
    metrics = run("environment")
    assert metrics[0]["val/return"] < 6
    assert metrics[-1]["val/return"] > 9


@pytest.mark.parametrize(
    ("name", "trusted"), [("environment", ()), ("env_backend", ("examples/env_backend.py:Carts",))]
)
def test_a_run_that_was_stopped(run, tmp_path: Path, name: str, trusted: tuple[str, ...]) -> None:
    run(name, "runner.max_steps=2", folder="whole")
    run(name, "runner.max_steps=1", folder="parts")
    run(name, "runner.max_steps=2", "env.num_workers=2", folder="parts")
    whole, parts = (final_state(tmp_path / folder, 2, *trusted) for folder in ("whole", "parts"))
    assert differences(whole, parts) == []


def test_environment_backend_is_learned_and_acts_from_a_checkpoint(run, command, tmp_path: Path) -> None:
    metrics = run("env_backend", "runner.save_interval=10")
    assert metrics[0]["val/success_once"] < 1
    assert metrics[-1]["val/success_once"] == 1
    assert metrics[-1]["val/return"] > metrics[0]["val/return"] + 5
    policy = load_policy(tmp_path / "out", step=10)
    assert policy.act(np.zeros((3, 2))).shape == (3, 1)
    evaluated = command("--eval", str(tmp_path / "out"))
    assert evaluated.code == 0, evaluated.err
    assert "examples/env_backend.py:Carts" in evaluated.out


def test_logger(run, tmp_path: Path) -> None:
    metrics = run("logger")
    lines = (tmp_path / "out" / "returns.csv").read_text().splitlines()
    assert lines == ["step,return", *(f"{row['step']},{row['episode/return']:.1f}" for row in metrics[1:])]


def test_filter(run) -> None:
    metrics = run("filter")
    assert sum(row.get("reward/filtered", 0) for row in metrics) > 0
    assert sum(row.get("dynamic_sampling/kept", 0) for row in metrics) > 0
    assert all(row["dynamic_sampling/rounds"] >= 1 for row in metrics[1:])


def test_estimator_of_an_embodied_run_is_gae_with_lambda_0(run) -> None:
    own = run("estimator", folder="own")
    known = run("estimator", "algorithm.adv_type=gae", "algorithm.gae_lambda=0.0", folder="gae")
    names = [name for name in known[-1] if name.startswith(("actor/", "critic/", "episode/"))]
    assert [own[-1][name] for name in names] == pytest.approx([known[-1][name] for name in names], rel=1e-3)


def test_policy_loss_holds_the_ratio_and_learns(run) -> None:
    metrics = run("policy_loss")
    assert metrics[-1]["val/return"] > metrics[0]["val/return"] + 20
    assert all(0 <= row["actor/beyond_frac"] < 0.5 for row in metrics[1:])


def test_policy_network_learns_and_is_loaded(run, tmp_path: Path) -> None:
    metrics = run("policy_network")
    assert metrics[-1]["val/return"] > metrics[0]["val/return"] + 20
    policy = load_policy(tmp_path / "out" / "model")
    assert policy.act(np.zeros(4)).shape == ()


def test_rollout_engine_computes_the_log_probs_of_the_trainer(run) -> None:
    metrics = run("rollout_engine")
    assert max(row["mismatch/prob_error"] for row in metrics[1:]) < 1.001
