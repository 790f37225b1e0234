"""The script behind docs/results/margins.md: limits of claims against runs, which are made once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "margins.py"
SMALL = "cartpole", "--variants", "avx2", "--set", "runner.max_steps=1", "--set", "env.evaluation.episodes=2"


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *options, "--output", "page.md"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_a_page_shows_every_limit_of_runs_that_are_made_once(tmp_path: Path) -> None:
    ended = run(tmp_path, *SMALL, "--seeds", "3")
    assert ended.returncode == 0, ended.stderr
    made = tmp_path / "runs" / "margins" / "cartpole" / "avx2-3" / "metrics.jsonl"
    before = made.stat().st_mtime_ns
    ended = run(tmp_path, *SMALL, "--seeds", "3", "4")
    assert ended.returncode == 0, ended.stderr
    assert made.stat().st_mtime_ns == before
    lines = [line for line in (tmp_path / "page.md").read_text().splitlines() if line.startswith("| cartpole")]
    assert len(lines) == 2
    first, last = ([cell.strip() for cell in line.split("|")] for line in lines)
    assert first[3:5] == ["first `val/return` < 100", "2"]
    assert first[9] == "all equal" or float(first[9]) > 3, "a pole that nobody balances falls early"
    assert last[3:5] == ["last `val/return` >= 475", "2"]
    assert float(last[9]) < 0, "one step is too few"
    other = run(tmp_path, "cartpole", "--variants", "avx2", "--seeds", "3")
    assert other.returncode != 0
    assert "run of other settings" in other.stderr
