"""A sweep of real runs: two seeds at the same time, results, and the same command again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.mark.usefixtures("forked_runs")
def test_two_seeds_run_once_and_are_compared(tool, folder: Path) -> None:
    line = ("sweep", "embodied.yaml", "runner.seed=1,2", "runner.max_steps=1", "--jobs", "2", "--metric", "val/return")
    ended = tool(*line)
    assert ended.code == 0, ended.err
    sweep = folder / "out-sweep"
    for name in ("seed=1", "seed=2"):
        assert f"{name}: finished" in ended.out
        assert (sweep / name / "finished").exists()
    summary = json.loads((sweep / "summary.json").read_text())
    (group,) = summary["groups"]
    assert group["n"] == 2
    assert group["mean"] == sum(point["value"] for point in summary["points"]) / 2
    assert [point["step"] for point in summary["points"]] == [1, 1]

    again = tool(*line)
    assert again.code == 0, again.err
    assert "2 of 2 points were finished before" in again.out
    assert "started" not in again.out
    assert json.loads((sweep / "summary.json").read_text()) == summary
