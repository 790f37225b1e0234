"""Every example of `examples/` runs as its first line says."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_results import differences, final_state

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


def test_a_run_with_several_choices_that_was_stopped(run, tmp_path: Path) -> None:
    run("environment", "runner.max_steps=2", folder="whole")
    run("environment", "runner.max_steps=1", folder="parts")
    run("environment", "runner.max_steps=2", "env.num_workers=2", folder="parts")
    whole, parts = (final_state(tmp_path / folder, 2) for folder in ("whole", "parts"))
    assert differences(whole, parts) == []
