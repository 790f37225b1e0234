"""The script behind docs/results: pages from runs, which are made once."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "results.py"
SMALL = "runner.max_steps=2", "runner.val_check_interval=1", "env.evaluation.episodes=2"


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    changes = [word for change in SMALL for word in ("--set", change)]
    command = [sys.executable, str(SCRIPT), "cartpole", *changes, *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_pages_are_made_of_runs_that_are_made_once(tmp_path: Path) -> None:
    ended = run(tmp_path, "--seeds", "3", "--output", "pages")
    assert ended.returncode == 0, ended.stderr
    made = tmp_path / "runs" / "results" / "cartpole" / "seed-3" / "metrics.jsonl"
    before = made.stat().st_mtime_ns
    ended = run(tmp_path, "--seeds", "3", "4", "--output", "pages")
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
    other = run(tmp_path, "--seeds", "3", "--output", "pages", "--set", "algorithm.gamma=0.9")
    assert other.returncode != 0
    assert "holds a run of other settings" in other.stderr
