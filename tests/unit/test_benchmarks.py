"""Benchmarks: their imports exist, scripts without a GPU say so, and pages are made of runs that are made once."""

from __future__ import annotations

import ast
import csv
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"
ONE_ROW = Namespace(dry_run=True, rows=1, length=8)


def run(script: str, *arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(FOLDER / script), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_names_of_the_package_are_there() -> None:
    missing = []
    for script in sorted(FOLDER.glob("*.py")):
        nodes = [node for node in ast.walk(ast.parse(script.read_text("utf-8"))) if isinstance(node, ast.ImportFrom)]
        for node in nodes:
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                if name.startswith("rl_platform") and not exists(str(node.module), name):
                    missing.append(f"{script}:{node.lineno}: {name}")
    assert missing == []


def exists(module: str, name: str) -> bool:
    """A module has a name, or there is a submodule of that name."""
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError:
        return False
    in_package = hasattr(loaded, "__path__") and importlib.util.find_spec(name) is not None
    return in_package or hasattr(loaded, name.rpartition(".")[2])


def test_without_a_gpu_it_ends_with_one_clear_line() -> None:
    ended = run("training_gpu.py")
    assert ended.returncode == 1
    assert ended.stderr.splitlines() == [
        "training_gpu.py: torch sees no GPU on this machine. --dry-run tries the script out on the CPU."
    ]
    assert ended.stdout == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="Megatron would compute on the GPU of this machine")
def test_its_dry_run_measures_all_three_and_they_agree(tmp_path: Path) -> None:
    ended = run("training_gpu.py", "--dry-run", "--json", str(tmp_path / "found.json"))
    assert ended.returncode == 0, ended.stderr
    found = json.loads((tmp_path / "found.json").read_text())["found"]
    assert found.keys() == {"equal", "mixed"}
    for of_case in found.values():
        assert of_case.keys() == {"plain FSDP", "fsdp", "megatron"}
        norms = [one["grad_norm"] for one in of_case.values()]
        assert norms[0] > 1e-3
        assert norms == pytest.approx([norms[0]] * 3, rel=0.02)  # bfloat16
        assert all(len(one["seconds"]) == 1 and one["tokens_per_s"] > 0 for one in of_case.values())
    assert found["equal"]["fsdp"]["tokens_per_s"] * found["equal"]["fsdp"]["seconds"][0] == pytest.approx(4 * 32)
    assert "MFU not known" in ended.stdout


@pytest.fixture
def benchmark(script: Callable[[Path], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    return script(FOLDER / "training_gpu.py")


def test_the_work_of_a_step_is_what_its_tokens_need(benchmark: ModuleType) -> None:
    """By hand: matrices of two layers, causal attention, logits of the six tokens after the prompt's two."""
    attention, feed_forward = 64 * 64 + 2 * 64 * 32 + 64 * 64, 3 * 64 * 96
    matrices = 8 * 2 * (attention + feed_forward)
    pairs = 2 * (8 * 8 // 2) * 2 * 64  # layers, half of the pairs, scores and sums, width
    assert benchmark.flops(ONE_ROW, "equal") == 3 * 2 * (matrices + pairs + 6 * 64 * 512)


def test_a_contestant_that_fails_is_named_and_the_others_are_reported(benchmark: ModuleType, capsys) -> None:
    measured = {"seconds": [2.0], "grad_norm": 1.0, "peak_bytes": 2**30}
    found = {"plain FSDP": {"error": "OutOfMemoryError: 80 GiB"}, "fsdp": dict(measured), "megatron": dict(measured)}
    benchmark.report("equal", ONE_ROW, found, peak=benchmark.flops(ONE_ROW, "equal"))
    said = capsys.readouterr().out
    assert "plain FSDP failed: OutOfMemoryError: 80 GiB" in said
    assert "fsdp: 2 s, 4 tokens/s per GPU, MFU 50.0 %, 1.0 GiB" in said
    assert "times the speed" not in said


def test_a_page_shows_every_limit_of_runs_that_are_made_once(tmp_path: Path) -> None:
    changes = "--set", "runner.max_steps=1", "--set", "env.evaluation.episodes=2"
    page = "margins.py", "cartpole", "--variants", "avx2", "--output", "page.md"
    ended = run(*page, *changes, "--seeds", "3", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    made = tmp_path / "runs" / "margins" / "cartpole" / "avx2-3" / "metrics.jsonl"
    before = made.stat().st_mtime_ns
    ended = run(*page, *changes, "--seeds", "3", "4", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert made.stat().st_mtime_ns == before
    lines = [line for line in (tmp_path / "page.md").read_text().splitlines() if line.startswith("| cartpole")]
    assert len(lines) == 2
    first, last = ([cell.strip() for cell in line.split("|")] for line in lines)
    assert first[3:5] == ["first `val/return` < 100", "2"]
    assert first[9] == "all equal" or float(first[9]) > 3, "a pole that nobody balances falls early"
    assert last[3:5] == ["last `val/return` >= 475", "2"]
    assert float(last[9]) < 0, "one step is too few"
    other = run(*page, "--seeds", "3", folder=tmp_path)
    assert other.returncode != 0
    assert "run of other settings" in other.stderr


def test_pages_are_made_of_runs_that_are_made_once(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    small = "runner.max_steps=2", "runner.val_check_interval=1", "env.evaluation.episodes=2"
    changes = [word for change in small for word in ("--set", change)]
    pages = "results.py", "cartpole", *changes, "--output", "pages"
    ended = run(*pages, "--seeds", "3", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    made = tmp_path / "runs" / "results" / "cartpole" / "seed-3" / "metrics.jsonl"
    before = made.stat().st_mtime_ns
    ended = run(*pages, "--seeds", "3", "4", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert made.stat().st_mtime_ns == before
    page = (tmp_path / "pages" / "cartpole.md").read_text()
    for part in ("CartPole-v1", "| rl-platform | 2 | 2,048 |", "--seeds 3 4 --set runner.max_steps=2", "torch 2"):
        assert part in page
    assert (tmp_path / "pages" / "cartpole.png").read_bytes().startswith(b"\x89PNG")
    with open(tmp_path / "pages" / "cartpole.csv") as file:
        rows = list(csv.DictReader(file))
    assert [(row["seed"], row["step"], row["env_steps"]) for row in rows[:4]] == [
        ("3", "0", "0"),
        ("3", "1", "1024"),
        ("3", "2", "2048"),
        ("4", "0", "0"),
    ]
    assert all(float(row["val/return"]) > 0 for row in rows)
    other = run(*pages, "--seeds", "3", "--set", "algorithm.gamma=0.9", folder=tmp_path)
    assert other.returncode != 0
    assert "holds a run of other settings" in other.stderr
