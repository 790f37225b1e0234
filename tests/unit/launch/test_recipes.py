"""Recipes plan, fit, pass their check and agree with the planner without GPU, network or model; a start says what it
misses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from plans import different_mathematics

from rl_platform.config import load_config
from rl_platform.launch.placed_config import load
from rl_platform.planner.report import plan_report
from rl_platform.planner.search import search

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "configs" / "reasoning" / "recipes"
GSM8K, DAPO = RECIPES / "qwen2.5_1.5b_gsm8k_8gpu.yaml", RECIPES / "deepseek_r1_7b_dapo_64gpu.yaml"
ALL = sorted(ROOT.glob("configs/*/recipes/*.yaml"))
ON_THIS_CPU = "cluster={component_placement: {'actor,critic': 'all:0-1', 'rollout,reward': all}}"
TORCH = "rollout={backend: torch}"
BETTER = 0.9  # of the recipe's predicted step: a placement that takes less is worth a change


@pytest.fixture
def without_models(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(folder))  # the models are known without their files
    monkeypatch.setenv("RL_PLATFORM_CACHE", str(folder))  # and no rates were measured here


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
@pytest.mark.usefixtures("without_models")
def test_it_fits_and_the_planner_finds_nothing_much_better(path: Path) -> None:
    loaded, placement, inventory = load(str(path), [])
    report = plan_report(loaded.config, placement, inventory)
    assert report.warnings == ()
    assert not report.unknown
    best, *_ = candidates = search(loaded.config, inventory).candidates
    own = report.overlap.seconds if report.overlap else report.seconds
    assert best.seconds <= own * (1 + 1e-9)
    peaks = [use.usage.peak for use in report.devices if use.number is not None]
    if not peaks:
        return
    assert report.device.memory is not None
    assert max(peaks) < 0.9 * report.device.memory
    assert all(division.even for division in report.divisions)
    wide = placement.layout.parts["rollout"].per_rank  # splits and micro-batches of the models are those of the source
    placed = [one for one in candidates if not one.changes and one.rollout_devices == wide]
    assert placed[0].seconds > BETTER * report.seconds


@pytest.mark.slow
@pytest.mark.parametrize("path", different_mathematics(ALL), ids=lambda path: path.stem)
def test_it_passes_its_check(command, path: Path) -> None:
    ended = command(path, "--check")
    assert ended.code == 0
    assert ", 0 failed, " in ended.out


def test_variants_are_short() -> None:
    for path in ALL:
        lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
        assert len(lines) < 32 or not lines[0].startswith("extends:"), path


@pytest.fixture
def table(script: Callable[[Path], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return script(ROOT / "benchmarks" / "recipes.py")


@pytest.mark.usefixtures("without_models")
def test_the_page_has_the_plans_of_now(table: ModuleType) -> None:
    """Otherwise: python benchmarks/recipes.py."""
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert table.written(page) == page
    for recipe in table.recipes():
        assert recipe.what, recipe
        assert recipe.source, recipe


def test_every_limit_belongs_to_a_recipe_that_measures_it_at_that_step(table: ModuleType) -> None:
    runners = {config.runner.experiment_name: config.runner for config in (load_config(path).config for path in ALL)}
    for name, limits in table.ACCEPTANCE.items():
        for limit in limits:
            assert limit.step <= runners[name].max_steps
            assert limit.step % runners[name].val_check_interval == 0


@pytest.fixture
def accept(script: Callable[[Path], ModuleType]) -> ModuleType:
    return script(ROOT / "benchmarks" / "acceptance.py")


def run_of(folder: Path, name: str, accuracy: float, steps: int) -> str:
    rows = [{"step": step, "reward/raw_mean": 0.9, "val/accuracy": accuracy} for step in range(10, steps + 1, 10)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text(f"runner: {{experiment_name: {name}}}\n")
    return str(folder)


def test_acceptance_compares_the_run_with_its_limits(accept: ModuleType, tmp_path: Path, capsys: Any) -> None:
    name = "qwen2.5_1.5b_gsm8k_vapo"
    assert accept.main([run_of(tmp_path, name, 0.71, 100)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[1].startswith("passed  `val/accuracy` > 0.7 at step 100: 0.71 ")
    assert accept.main([run_of(tmp_path, name, 0.7, 100)]) == 1
    assert "failed  `val/accuracy`" in capsys.readouterr().out
    assert accept.main([run_of(tmp_path, name, 0.9, 90)]) == 1
    assert "not measured there; the last step is 90" in capsys.readouterr().out


def test_acceptance_of_what_is_no_run_of_a_recipe(accept: ModuleType, tmp_path: Path, capsys: Any) -> None:
    assert accept.main([]) == 2
    assert accept.main([str(tmp_path)]) == 65
    assert "not the output folder of a run" in capsys.readouterr().err
    assert accept.main([run_of(tmp_path, "mine", 1.0, 100)]) == 2
    assert "mine: no limits are known" in capsys.readouterr().err


@pytest.mark.parametrize(("path", "cluster"), [(GSM8K, [ON_THIS_CPU]), (DAPO, [])], ids=["gsm8k", "dapo"])
def test_a_start_without_their_questions_says_what_to_write(command, path: Path, cluster: list[str]) -> None:
    ended = command(path, *cluster, TORCH, "runner.output_dir=out")
    assert ended.code == 2, ended.err
    assert "data.task.path: no such file" in ended.err
    assert "one JSON object per line with the fields 'question' and 'answer'" in ended.err
    assert f"relative paths begin where the run is started, here {Path.cwd()}" in ended.err
    assert not Path("out").exists()


def test_a_start_without_gpus_says_what_to_replace(command) -> None:
    ended = command(GSM8K, TORCH, "runner.output_dir=out")
    assert ended.code == 2
    assert "cluster.inventory: GPU 7 is used, but torch sees none" in ended.err
    assert "cluster={component_placement: {...}}" in ended.err


def test_a_start_without_the_model_says_how_to_get_it(command, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "hub"))
    for name, number in (("train", 1), ("test", 2)):
        (folder / f"{name}.jsonl").write_text(json.dumps({"question": f"{number} + 1?", "answer": f"#### {number}"}))
    files = "data.task.path=train.jsonl", "data.task.val_path=test.jsonl"
    ended = command(GSM8K, ON_THIS_CPU, TORCH, "runner.output_dir=out", *files)
    assert ended.code == 2
    assert "actor.model.path" in ended.err
    assert "hf download Qwen/Qwen2.5-1.5B-Instruct --local-dir FOLDER; then actor.model.path=FOLDER" in ended.err
