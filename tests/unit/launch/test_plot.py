"""Learning curves: what is drawn, over which axis, and the median of several runs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from rl_platform.launch.tools.plot import _default_metrics, median_curve, read_curve
from rl_platform.launch.tools.snapshot import snapshot
from rl_platform.metrics import RunInfo, RunLog, read_metrics

ROWS = [
    {"step": 0.0, "val/return": 1.0},
    {"step": 1.0, "episode/return": 5.0, "perf/env_steps": 100.0, "time/step": 30.0},
    {"step": 2.0, "episode/return": float("nan"), "perf/env_steps": 100.0, "time/step": 30.0},
    {"step": 3.0, "episode/return": 7.0, "perf/env_steps": 50.0, "time/step": 60.0},
]


def test_axes() -> None:
    assert read_curve(ROWS, "episode/return", "step") == [(1, 5), (3, 7)]
    assert read_curve(ROWS, "episode/return", "env_steps") == [(100, 5), (250, 7)]
    assert read_curve(ROWS, "episode/return", "minutes") == [(0.5, 5), (2.0, 7)]
    assert read_curve(ROWS[:1], "val/return", "minutes") == []


def test_median_is_interpolated_where_all_runs_have_values() -> None:
    curves = [[(0, 0), (4, 4)], [(1, 10), (3, 30), (9, 90)], [(0, -1), (8, -1)]]
    assert median_curve(curves) == [(1, 1), (3, 3), (4, 4)]
    assert median_curve([[(1, 5)], [(1, 7)], [(1, 9)]]) == [(1, 7)]


def run(folder: Path, offset: float) -> str:
    log = RunLog(folder)
    log.start(RunInfo("x", "embodied", folder, 3))
    for row in ROWS:
        log.step(int(row["step"]), {name: value + offset for name, value in row.items() if name != "step"})
    log.close()
    return str(folder)


def test_success_rates_are_charts_of_their_own_where_there_are_any() -> None:
    run = Path("no folder of a run")
    assert _default_metrics([run], [ROWS]) == ["episode/return", "val/return"]
    rates = [{"step": 4.0, "env/success_once": 0.5, "val/success_once": 1.0}]
    assert _default_metrics([run, run], [ROWS, rates])[2:] == ["env/success_once", "val/success_once"]


def test_the_task_decides_what_is_shown_of_a_run(command) -> None:
    """Rows of embodied runs have `reward/mean` too, of normalised rewards."""
    assert command("embodied.yaml", "runner.max_steps=1").code == 0
    run = Path("out")
    rows = read_metrics(run)
    assert "reward/mean" in rows[-1]
    assert _default_metrics([run], [rows]) == ["episode/return", "val/return"]
    picture = snapshot(run, "x")
    assert "val&#160;return" in picture
    assert "val&#160;acc" not in picture
    for damage in (b"\xff", b"", b"runner: [", b"runner: {task_type: other}"):
        (run / "config.yaml").write_bytes(damage)
        assert _default_metrics([run], [rows]) == ["episode/return", "val/return"]


def test_the_mean_score_of_an_own_reward_is_no_accuracy(command, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "negative.py").write_text("def score(response, answer, metadata):\n    return -0.25 * len(response)\n")
    monkeypatch.syspath_prepend(folder)
    ended = command("reasoning.yaml", "runner.max_steps=1", "reward.type=negative:score")
    assert ended.code == 0, ended.err
    rows = read_metrics(folder / "out")
    assert all("val/score" in row and "val/accuracy" not in row for row in rows)
    assert "val score" in ended.out
    assert "val acc" not in ended.out
    assert _default_metrics([Path("out")], [rows]) == ["reward/mean", "val/score"]
    ended = command("--eval", "out")
    assert ended.code == 0, ended.err
    table = next(line for line in ended.out.splitlines() if line.startswith("task"))
    assert "score" in table.split()
    assert "accuracy" not in table
    answers = next(Path("out/evaluation").glob("*-greedy.jsonl")).read_text().splitlines()
    assert all("score" in json.loads(line) and "correct" not in json.loads(line) for line in answers)


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_png(tmp_path: Path, tool) -> None:
    runs = [run(tmp_path / str(seed), seed) for seed in range(3)]
    target = tmp_path / "new" / "curves.png"
    ended = tool("plot", *runs, "-o", target, "-x", "env_steps", "--title", "three seeds")
    assert (ended.code, ended.out) == (0, f"{target}\n"), ended.err
    assert target.read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_an_unknown_metric_names_the_known_ones(tmp_path: Path, tool) -> None:
    ended = tool("plot", run(tmp_path, 0), "-m", "rewrad")
    assert ended.code == 65
    assert "episode/return" in ended.err


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    ended = tool("plot", tmp_path)
    assert ended.code == 2
    assert "rl-platform[plot]" in ended.err
