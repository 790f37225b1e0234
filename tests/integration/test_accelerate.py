"""`runner.accelerate: off` trains without an import of `accel/`, to the same metrics."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from rl_platform.metrics import read_metrics

CARTPOLE = (
    Path(__file__).parents[2] / "configs" / "embodied" / "cartpole.yaml",
    "runner.logger_backends=[]",
    "env.evaluation.episodes=2",
)
HOPPER = (
    "embodied.yaml",
    "env.id=Hopper-v5",
    "env.max_episode_steps=9",
    "actor.model.initial_log_std=-1",
    "env.normalize_observations=true",
    "env.normalize_rewards=true",
)


def metrics(folder: Path, name: str) -> list[dict[str, Any]]:
    """One dictionary per PPO step."""
    return [step for step in read_metrics(folder / name / "metrics.jsonl") if step["step"] > 0]


@pytest.fixture
def without_accel(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import of a module of `accel/` fails; modules that other tests have imported are hidden."""
    for name in [name for name in sys.modules if name.startswith("rl_platform.accel.")]:
        monkeypatch.delitem(sys.modules, name)
        package, _, module = name.rpartition(".")  # else other tests would patch a module that nobody imports
        monkeypatch.delattr(sys.modules[package], module, raising=False)

    class Refuses:
        def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
            assert not name.startswith("rl_platform.accel."), f"imported {name}"

    monkeypatch.setattr(sys, "meta_path", [Refuses(), *sys.meta_path])


@pytest.mark.slow
@pytest.mark.parametrize("run", [CARTPOLE, HOPPER, ("reasoning.yaml",)], ids=["CartPole", "a robot", "reasoning"])
def test_a_run_trains_alike_without_acceleration(folder: Path, command: Any, without_accel: None, run: Any) -> None:
    assert command(*run, "runner.max_steps=3", "runner.output_dir=off", "runner.accelerate=off").code == 0
    sys.meta_path.pop(0)
    assert command(*run, "runner.max_steps=3", "runner.output_dir=auto").code == 0
    plain, accelerated = metrics(folder, "off"), metrics(folder, "auto")
    assert len(plain) == len(accelerated) == 3
    for one, other in zip(plain, accelerated, strict=True):
        assert one.keys() == other.keys()
        assert {"actor/loss", "actor/grad_norm"} < one.keys()
        for field in one:
            if not field.startswith(("time/", "perf/", "memory/")):
                assert one[field] == pytest.approx(other[field], rel=1e-3, abs=1e-3), field


@pytest.mark.slow
@pytest.mark.parametrize("first", ["auto", "off"])
def test_a_run_resumes_with_the_other_value(folder: Path, command: Any, first: str) -> None:
    second = {"auto": "off", "off": "auto"}[first]
    assert command("embodied.yaml", "runner.max_steps=1", f"runner.accelerate={first}").code == 0
    resumed = command("embodied.yaml", "runner.max_steps=3", f"runner.accelerate={second}")
    assert resumed.code == 0
    assert len(metrics(folder, "out")) == 3
