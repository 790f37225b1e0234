"""Learning curves: what is drawn, over which axis, and the median of several runs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from rl_platform.launch.placed_config import load
from rl_platform.launch.tools.plot import _default_metrics, _finish, aligned, median_curve, read_curve, with_unit
from rl_platform.launch.tools.run_groups import group_by_config, group_by_task
from rl_platform.launch.tools.snapshot import snapshot
from rl_platform.launch.views.headline import headline_of
from rl_platform.metrics import RunLog, read_metrics
from rl_platform.reporter import RunInfo
from rl_platform.runners.reasoning import validation_metric

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
    assert aligned(curves) == [(1, [1, 10, -1]), (3, [3, 30, -1]), (4, [4, 40, -1])]
    assert aligned([[(1, 5)], [(2, 7)]]) == []


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
    for damage in (b"\xff", b"", b"runner: [", b"runner: {task_type: other}\nreward: {type: 'a:b'}"):
        (run / "config.yaml").write_bytes(damage)
        assert _default_metrics([run], [rows]) == ["episode/return", "val/return"]


@pytest.mark.parametrize(
    "reward",
    [
        "{}",
        "{type: exact_match}",
        "{type: code}",
        "{type: 'negative:score'}",
        "{functions: [{type: 'negative:score'}, {type: math_verify}]}",
        "{functions: [{type: 'negative:score'}, {type: http, url: 'http://localhost:1'}]}",
    ],
)
def test_views_show_the_validation_metric_that_the_run_logs(folder: Path, reward: str) -> None:
    task = ["data.task={type: jsonl, path: rows.jsonl}"] if "code" in reward else []
    config = load("reasoning.yaml", [f"reward={reward}", *task])[0]
    assert headline_of(config.shown()).validation == validation_metric(config.config)


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
def test_axes_of_large_numbers_have_k_and_m() -> None:
    from matplotlib.figure import Figure

    figure = Figure()
    axes = figure.subplots()
    axes.plot([0, 1e7], [-20_000, 5_000])
    _finish(axes, "val/return", "environment steps")
    figure.canvas.draw()
    assert {"2 M", "4 M"} <= {label.get_text() for label in axes.get_xticklabels()}
    assert {"-20 k", "0", "5 k"} <= {label.get_text() for label in axes.get_yticklabels()}
    assert axes.xaxis.get_offset_text().get_text() == ""
    assert [with_unit(value) for value in (999, 2500, 1.5e9, 0.25)] == ["999", "2.5 k", "1.5 G", "0.25"]


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_dollar_signs_are_no_formulas(tmp_path: Path, tool) -> None:
    runs = [configured(tmp_path, name, f"runner: {{task_type: embodied}}\na: '$\\frac{{${name}'") for name in "ab"]
    target = tmp_path / "curves.svg"
    ended = tool("plot", *runs, "--compare", "--title", "$\\frac{$ and $x$", "-o", target)
    assert ended.code == 0, ended.err
    assert "Traceback" not in ended.err


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_a_run_without_steps(tmp_path: Path, tool) -> None:
    for lines in ("", '{"step": 1}\n'):  # a step whose metrics are lost
        (tmp_path / "metrics.jsonl").write_text(lines)
        ended = tool("plot", tmp_path, "-o", tmp_path / "curves.png")
        assert ended.code == 65
        assert f"no step is finished yet in {tmp_path}" in ended.err


def test_runs_of_two_tasks_have_no_common_median(tmp_path: Path) -> None:
    embodied = [configured(tmp_path, f"e{n}", f"runner: {{task_type: embodied, seed: {n}}}") for n in range(2)]
    text = "runner: {task_type: reasoning}\nreward: {type: exact_match}"
    reasoning = configured(tmp_path, "r", text)
    metrics = {run: read_metrics(run) for run in (*embodied, reasoning)}
    assert group_by_task(metrics) == {"embodied": embodied, "reasoning": [reasoning]}
    assert group_by_task({run: metrics[run] for run in embodied}) == {"": embodied}


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
@pytest.mark.parametrize("options", [[], ["--compare"]])
def test_metrics_are_read_once(tmp_path: Path, tool, monkeypatch: pytest.MonkeyPatch, options: list[str]) -> None:
    runs = [configured(tmp_path, name, "runner: {task_type: embodied}") for name in "ab"]
    read: list[Path] = []
    monkeypatch.setattr(
        "rl_platform.launch.tools.plot.read_metrics", lambda run: (read.append(run), read_metrics(run))[1]
    )
    ended = tool("plot", *runs, "-o", tmp_path / "curves.png", *options)
    assert ended.code == 0, ended.err
    assert read == runs


def test_a_snapshot_loads_nothing(tmp_path: Path) -> None:
    picture = snapshot(Path(run(tmp_path / "a", 0)), "x")
    assert "url(http" not in picture
    assert "@font-face" not in picture
    assert "monospace" in picture


def configured(folder: Path, name: str, text: str) -> Path:
    run(folder / name, 0)
    (folder / name / "config.yaml").write_text(text)
    return folder / name


def test_groups_are_named_by_what_differs_apart_from_the_seed(tmp_path: Path) -> None:
    text = "runner: {{seed: {}, output_dir: {}}}\nactor: {{optim: {{lr: {}}}, model: {{sizes: {}}}}}\n"
    rows = [("a", 1, 0.1, "[8, 8]"), ("b", 2, 0.1, "[8, 8]"), ("c", 1, 0.2, "[8, 8]"), ("d", 1, 0.2, "[16]")]
    runs = [configured(tmp_path, name, text.format(seed, name, lr, sizes)) for name, seed, lr, sizes in rows]
    names = {name: [run.name for run in own] for name, own in group_by_config(runs).items()}
    assert names == {
        "lr=0.1, sizes=[8, 8]": ["a", "b"],
        "lr=0.2, sizes=[8, 8]": ["c"],
        "lr=0.2, sizes=[16]": ["d"],
    }
    assert list(group_by_config([runs[0] / "metrics.jsonl", runs[1]])) == ["all runs"]
    long = [configured(tmp_path, f"l{n}", f"data: {{key: {'x' * 70}{n}}}") for n in range(2)]
    assert [len(name) for name in group_by_config(long)] == [60, 64]


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
@pytest.mark.parametrize(
    "options", [["--compare"], ["--band", "std"], ["--band", "minmax", "--compare"], ["--band", "none"]]
)
def test_bands_and_groups(tmp_path: Path, tool, options: list[str]) -> None:
    runs = [configured(tmp_path, f"r{n}", f"runner: {{seed: {n}, task_type: embodied}}\na: {n // 2}") for n in range(5)]
    target = tmp_path / "curves.png"
    ended = tool("plot", *runs, *options, "-o", target)
    assert ended.code == 0, ended.err
    assert target.read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
@pytest.mark.parametrize(
    ("options", "code", "messages"),
    [
        (["--band", "mean"], 2, ["'mean'", "'minmax'"]),
        (["-m", "rewrad"], 2, ["no run has this metric", "episode/return"]),
        (["-o", "curves.xyz"], 2, ["--output: has the wrong ending", "xyz"]),
        (["-o", "/proc/curves.png"], 2, ["--output: cannot be written", "/proc/curves.png"]),
        (["--compare"], 65, ["a/config.yaml: No such file", "b/config.yaml: is no config"]),
        (["missing"], 2, ["RUN: no such folder", "missing"]),
    ],
)
def test_wrong_input(tmp_path: Path, tool, folder: Path, options: list[str], code: int, messages: list[str]) -> None:
    run(folder / "a", 0)
    configured(folder, "b", "3")
    ended = tool("plot", "a", "b", *options)
    assert ended.code == code
    for message in messages:
        assert message in ended.err


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    ended = tool("plot", tmp_path)
    assert ended.code == 2
    assert "rl-platform[plot]" in ended.err
