"""`rl-platform sweep`: values and names of its points, refusals, how points run and end, results; no training."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from rl_platform.errors import ConfigError
from rl_platform.launch.tools.sweep import sweep_jobs as jobs_module
from rl_platform.launch.tools.sweep.grid import SweepPoint, read_arguments, values_of
from rl_platform.launch.tools.sweep.summary import Summary
from rl_platform.launch.tools.sweep.sweep import PointsFailed, _Grid
from rl_platform.launch.tools.sweep.sweep_jobs import Jobs, shares
from rl_platform.runtime.child import Child, Death

needs_optuna = pytest.mark.skipif(importlib.util.find_spec("optuna") is None, reason="optuna is not installed")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1,2,3", ["1", "2", "3"]),
        ("1e-4, 3e-4", ["1e-4", "3e-4"]),
        ("[1,2],[3,4]", ["[1,2]", "[3,4]"]),
        ("[64,64]", ["[64,64]"]),
        ("{a: 1, b: [2, 3]},{a: 4}", ["{a: 1, b: [2, 3]}", "{a: 4}"]),
        ("\"a,b\",'c,d'", ['"a,b"', "'c,d'"]),
        ("null,true,off", ["null", "true", "off"]),
        ("0-3:0-7", ["0-3:0-7"]),
        ("", [""]),
    ],
)
def test_values_are_separated_by_commas_outside_of_brackets(text: str, values: list[str]) -> None:
    assert values_of(text) == values


def test_points_are_all_combinations_and_differ_in_the_seed_within_a_group() -> None:
    varied = read_arguments(["runner.seed=1,2", "actor.optim.lr=1e-4,3e-4", "critic.optim.lr=1,2", "~env.kwargs"])
    assert varied.fixed == ["~env.kwargs"]
    points = varied.points()
    assert len(points) == varied.size == 8
    assert points[0].name == "actor.optim.lr=1e-4,critic.optim.lr=1,seed=1"
    assert points[1].name == "actor.optim.lr=1e-4,critic.optim.lr=1,seed=2"
    assert points[0].group == points[1].group == "actor.optim.lr=1e-4,critic.optim.lr=1"
    assert points[1].overrides == ["actor.optim.lr=1e-4", "critic.optim.lr=1", "runner.seed=2"]
    (alone, _) = read_arguments(["runner.seed=1,2"]).points()
    assert (alone.name, alone.group, alone.label) == ("seed=1", "", "all points")


def test_names_of_folders_are_short_safe_and_distinct() -> None:
    values = ["[1, 2]", "[1,2]", "../../x", "a" * 300, "a" * 301]
    points = read_arguments(["a.b=" + ",".join(values)]).points()
    names = [point.name for point in points]
    assert len(set(names)) == len(values)
    assert all(len(name) < 200 and "/" not in name and name.startswith("b=") for name in names)
    many = [f"section.{'k' * 30}{number}=1,2" for number in range(8)]
    assert all(len(point.name) < 200 for point in read_arguments(many).points())


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["runner.seed=1,,2"], ["runner.seed: the values cannot be told apart", "value: runner.seed=1,,2"]),
        (
            ["runner.seed=1,2", "runner.seed=3", "runner.output_dir=x", "runner.resume=auto,never"],
            ["3 problems:", "runner.seed: is varied and set to one value", "--output FOLDER", "runner.resume: cannot"],
        ),
        (["runner.seed=1,2", "runner.seed=3,4"], ["is varied twice"]),
        (
            ["runner.seed=" + ",".join(map(str, range(50))), "actor.optim.lr=" + ",".join(map(str, range(1, 51)))],
            ["2,500 points (50 runner.seed x 50 actor.optim.lr)", "at most 1,000", "--optuna"],
        ),
        (
            ["runner.sed=1,2", "actor.optim.lr=0,1"],
            ["2 problems:", "did you mean runner.seed?", "actor.optim.lr: out of range (point sed=1,lr=0 and 1 more)"],
        ),
        (["actor.optim.lr=1e-4,0.0001"], ["lr=0.0001: has the same config as lr=1e-4"]),
        (["data.mini_batch_size=16,17"], ["do not divide the 64 transitions", "(point mini_batch_size=17)"]),
        (["env.id=CartPole-v1,CartPol-v1"], ["1 problem:", "env.id: no such environment", "(point id=CartPol-v1)"]),
        (["env.kwargs={gravitas: 1},{}"], ["1 problem:", "remove it: ~env.kwargs.gravitas", "(point kwargs="]),
        (["runner.seed=1,2", "--output", "embodied.yaml"], ["--output: ", "embodied.yaml is a file"]),
        (["runner.seed=1,2", "-m", "val/retrun"], ["--metric: a run of this config does not", "mean val/return?"]),
        (["runner.seed=1,2", "-m", "val/accuracy"], ["--metric: a run of this config does not report this metric"]),
        (["runner.seed=1,2", "-m", "val/hop/return"], ["--metric: a run of this config does not report this metric"]),
        (["runner.seed=1,2", "--optuna", "missing.yaml", "--metric", "x"], ["--metric: a search has its metric"]),
    ],
)
def test_wrong_input(tool, folder: Path, arguments: list[str], messages: list[str]) -> None:
    """`test_wrong_input.py` has more."""
    before = sorted(folder.iterdir())
    ended = tool("sweep", "embodied.yaml", *arguments)
    assert ended.code == 2
    for message in messages:
        assert message in ended.err
    assert sorted(folder.iterdir()) == before


def test_dry_run_prints_the_command_of_each_point(tool, folder: Path) -> None:
    ended = tool("sweep", "embodied.yaml", "runner.seed=1,2", "actor.model.hidden_sizes=[8,8]", "--dry-run")
    assert ended.code == 0, ended.err
    head, *commands = ended.out.splitlines()
    assert head == f"2 points (2 runner.seed), in {folder / 'out-sweep'}"
    start = "platform-launch embodied.yaml 'actor.model.hidden_sizes=[8,8]' runner.seed=1"
    assert commands[0] == f"{start} 'runner.output_dir=\"{folder / 'out-sweep' / 'seed=1'}\"'"
    assert not (folder / "out-sweep").exists()


def started_before(folder: Path, point: str, **changes: object) -> None:
    """A point of an earlier call, with the config of `embodied.yaml`."""
    from rl_platform.launch.placed_config import load

    overrides = [f"{key.replace('__', '.')}={value}" for key, value in changes.items()]
    (folder / point).mkdir(parents=True)
    (folder / point / "config.yaml").write_text(load("embodied.yaml", overrides)[0].resolved_yaml())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["actor.optim.lr=1e-3,1e-4"], "contains another sweep: runner.seed over 1, 2"),
        (["runner.seed=2,3"], "contains another sweep: runner.seed over 1, 2"),
        (["runner.seed=1,2,3", "algorithm.gamma=0.5"], "contains another sweep: algorithm.gamma 0.99 -> 0.5"),
        (["runner.seed=1,2,3", "runner.max_steps=9"], ""),
        (["runner.seed=3,2,1"], ""),
    ],
)
def test_a_folder_holds_one_sweep_to_which_values_and_steps_may_be_added(
    tool, folder: Path, arguments: list[str], message: str
) -> None:
    started_before(folder / "s", "seed=1", runner__seed=1)
    definition = {"config": "embodied.yaml", "fixed": [], "varied": {"runner.seed": ["1", "2"]}, "search": None}
    (folder / "s" / "sweep.yaml").write_text(json.dumps(definition))
    ended = tool("sweep", "embodied.yaml", *arguments, "-o", "s", "--dry-run")
    assert ended.code == (2 if message else 0), ended.err
    assert message in ended.err
    (folder / "s" / "sweep.yaml").write_text("[")
    assert "sweep.yaml is damaged" in tool("sweep", "embodied.yaml", *arguments, "-o", "s", "--dry-run").err


def test_simultaneous_points_share_cores_and_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(jobs_module, "cpu_count", lambda: 8)
    for gpus, jobs, expected in (
        ("0123", 2, ["0,1", "2,3"]),
        ("01", 3, ["0", "1", "0"]),
        ("012", 2, ["0", "1"]),
        ("", 2, [None, None]),
        ("01", 1, [None]),
    ):
        monkeypatch.setattr(jobs_module, "detect_accelerators", lambda gpus=gpus: (tuple(gpus), ""))
        found = shares(jobs)
        assert [each.get("CUDA_VISIBLE_DEVICES") for each in found] == expected
        assert [each.get("OMP_NUM_THREADS") for each in found] == [str(8 // jobs) if jobs > 1 else None] * jobs
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "OMP_NUM_THREADS" not in shares(2)[0]


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A point's run is the Python program that is its only argument, in a real child process."""

    def start_run(arguments: list[str], environment: dict[str, str], log: Path) -> Child:
        with log.open("ab") as output:
            return Child(arguments[0], Death.GUARD, (), environment, output=output)

    monkeypatch.setattr(jobs_module, "start_run", start_run)


SAVES = """
import pathlib, signal, sys, time
def save(*_):
    pathlib.Path(FILE).write_text("saved")
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
pathlib.Path(FILE).touch()
time.sleep(60)
"""


def jobs(folder: Path, code: dict[str, str], count: int, said: list[str]) -> Jobs:
    return Jobs(folder, lambda point: [code[point.name]], [{}] * count, said.append)


def test_a_failed_point_is_reported_with_its_last_lines_and_the_others_run(programs, tmp_path: Path) -> None:
    said: list[str] = []
    code = {"a": "print('fine')", "b": "import sys; print('no\\nroom'); sys.exit(65)", "c": "pass"}
    points = [SweepPoint(name, name, name) for name in code]
    failed = jobs(tmp_path, code, 1, said).run(_Grid(points))
    assert failed == {"b": "exit code 65"}
    text = "\n".join(said)
    assert [line for line in said if "started" in line] == [f"{n}: started, {i} of 3" for i, n in enumerate(code, 1)]
    assert "b: failed with exit code 65" in text
    assert f"the end of {tmp_path / 'b.log'}:\n    no\n    room" in text
    assert "c: finished" in text
    error = PointsFailed(failed, 3, tmp_path)
    assert error.exit_code == 65
    assert str(error).startswith("1 of 3 points failed:\n    b: exit code 65")
    assert PointsFailed(failed | {"c": "killed by SIGKILL"}, 3, tmp_path).exit_code == 70


def test_points_run_at_the_same_time(programs, tmp_path: Path) -> None:
    meets = "import pathlib, time\npathlib.Path({!r}).touch()\nwhile not pathlib.Path({!r}).exists(): time.sleep(0.01)"
    files = [str(tmp_path / name) for name in "ab"]
    code = {"a": meets.format(*files), "b": meets.format(*files[::-1])}
    assert jobs(tmp_path, code, 2, []).run(_Grid([SweepPoint(name, name, name) for name in code])) == {}


def test_an_interrupt_lets_every_running_point_save(programs, tmp_path: Path) -> None:
    said: list[str] = []
    files = [tmp_path / f"{name}.saved" for name in "ab"]
    code = {name: SAVES.replace("FILE", repr(str(file))) for name, file in zip("ab", files, strict=True)}
    runner = jobs(tmp_path, code | {"c": "raise SystemExit(1)"}, 2, said)

    def interrupt() -> None:
        while not all(file.exists() for file in files):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt) as interrupted:
        runner.run(_Grid([SweepPoint(name, name, name) for name in "abc"]))
    assert interrupted.value.__notes__ == ["the same command continues the sweep"]
    assert [file.read_text() for file in files] == ["saved", "saved"]
    assert said[-1].startswith("stopping a, b;")
    assert not any("c: started" in line for line in said)


def finished(folder: Path, name: str, *values: float, metric: str = "val/return", mark: bool = True) -> None:
    run = folder / name
    run.mkdir(parents=True, exist_ok=True)
    rows = [{"step": step, metric: value, "time/step": 2.0} for step, value in enumerate(values)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if mark:
        (run / "finished").touch()


def results(folder: Path) -> tuple[list[SweepPoint], Summary]:
    points = read_arguments(["actor.optim.lr=1e-4,1e-3", "runner.seed=1,2"]).points()
    for point, last in zip(points, (10.0, 20.0, 40.0, 7.0), strict=True):
        finished(folder, point.name, 0.0, last, mark=last != 7.0)
    return points, Summary(folder, points, {points[3].name: "exit code 70"})


def test_results_by_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, summary = results(tmp_path)
    best, other = summary.groups
    assert (best.name, best.n, best.mean, best.std, best.best) == ("lr=1e-3", 1, 40.0, None, True)
    assert (other.name, other.n, other.mean, other.lowest, other.highest) == ("lr=1e-4", 2, 15.0, 10.0, 20.0)
    assert other.std == pytest.approx(50**0.5)  # of the sample
    summary.print(Console())
    assert capsys.readouterr().out.splitlines() == [
        "group (highest first)       n  val/return, mean    std  lowest  highest",
        "lr=1e-3                1 of 2              40.0      –    40.0     40.0  best",
        "lr=1e-4                     2              15.0  7.071    10.0     20.0",
    ]
    summary.write()
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["groups"][0]["best"] is True
    assert written["points"][3]["reason"] == "exit code 70"
    rows = list(csv.DictReader((tmp_path / "summary.csv").open()))
    assert rows[3] == {
        "point": "lr=1e-3,seed=2",
        "group": "lr=1e-3",
        "actor.optim.lr": "1e-3",
        "runner.seed": "2",
        "status": "failed",
        "step": "1",
        "val/return": "7.0",
        "seconds": "4.0",
    }


def test_a_table_on_a_terminal_has_lines(tmp_path: Path) -> None:
    console = Console(force_terminal=True, width=100, record=True)
    results(tmp_path)[1].print(console)
    text = console.export_text()
    assert "│ lr=1e-3" in text
    assert text.count("best") == 1


def test_an_unknown_metric_names_the_known_ones(tmp_path: Path) -> None:
    points, _ = results(tmp_path)
    with pytest.raises(ConfigError, match=r"no run has this metric\n.*x\n.*time/step, val/return"):
        Summary(tmp_path, points, {}, metric="x")
    unstarted = Summary(tmp_path, [SweepPoint("n", "n", "n")], {"n": "exit code 2"})
    assert (unstarted.metric, unstarted.groups[0].mean) == ("reward/mean", None)


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_the_picture_of_a_sweep(tmp_path: Path) -> None:
    _, summary = results(tmp_path)
    assert summary.draw() == str(tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


SPEC = """
trials: 3
parameters:
  actor.optim.lr: {low: 1.0e-5, high: 1.0e-2, log: true}
  algorithm.ppo_epochs: {low: 1, high: 8}
  actor.model.hidden_sizes: {choices: [[8, 8], [16]]}
"""


@needs_optuna
@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("[", ["search.yaml:1: config: not readable as YAML"]),
        ("3", ["--optuna: holds no search"]),
        ("parameters: {}", ["parameters: must not be empty", "trials: this key is required"]),
        (
            "trials: 0\nmetrik: x\ndirection: up\npruner: {type: best}\nparameters:\n"
            "  a.b: {low: 2.0, high: 1.0}\n  a.c: {low: 2}\n  a.d: {low: 0, high: 1, log: true}\n"
            "  a.e: {choices: [1], low: 1}\n  a.f: {low: x, high: 1}\n  a.g: 3\n  a.h: {low: 1, high: 2, stp: 1}\n"
            "  runner.seed: {low: 1, high: 3}\n",
            [
                "12 problems:",
                "search.yaml:1: trials: must be greater than or equal to 1",
                "did you mean metric?",
                "search.yaml:3: direction: must be 'maximize' or 'minimize'",
                "search.yaml:4: pruner.type: must be",
                "search.yaml:6: parameters.a.b: low must be below high",
                "parameters.a.c: needs low and high, or choices",
                "parameters.a.d: a logarithmic range begins above 0",
                "parameters.a.e: choices stand alone",
                "parameters.a.f.low: must be a number",
                "parameters.a.g: must be a mapping",
                "did you mean step?",
                "parameters.runner.seed: cannot be searched",
            ],
        ),
        (
            SPEC + "  actor.optim.lrr: {choices: [1]}\n  data.mini_batch_size: {low: 16, high: 30}",
            ["actor.optim.lrr: unknown key", "mini-batches of 30 do not divide"],
        ),
    ],
)
def test_wrong_search(tool, folder: Path, text: str, messages: list[str]) -> None:
    (folder / "search.yaml").write_text(text)
    ended = tool("sweep", "embodied.yaml", "--optuna", "search.yaml")
    assert ended.code == 2
    for message in messages:
        assert message in ended.err


def test_a_search_needs_optuna(tool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_platform.launch.tools.sweep import optuna_search

    monkeypatch.setattr(optuna_search, "find_spec", lambda name: None)
    (folder / "search.yaml").write_text(SPEC)
    ended = tool("sweep", "embodied.yaml", "--optuna", "search.yaml")
    assert ended.code == 2
    assert "pip install 'rl-platform[optuna]'" in ended.err


@needs_optuna
def test_a_search_continues_where_it_was_interrupted(tmp_path: Path) -> None:
    from rl_platform.launch.tools.sweep.optuna_search import OptunaTrials, read_spec

    path = tmp_path / "search.yaml"
    path.write_text(SPEC + "metric: val/return\n")
    spec, seeds = read_spec(str(path)), ["1", "2"]
    search = OptunaTrials(spec, tmp_path, seeds, 1)
    assert search.total == 6
    first, second = search.next(), search.next()
    assert first is not None
    assert second is not None
    assert (first.name, second.name) == ("trial-000,seed=1", "trial-000,seed=2")
    assert first.label.startswith("trial-000, lr=")
    assert first.values.keys() == {*spec.parameters, "runner.seed"}
    for point, value in ((first, 10.0), (second, 20.0)):
        finished(tmp_path, point.name, value)
        search.ended(point, "exit code 0")
    assert search.study.best_value == 15.0
    third = search.next()
    assert third is not None
    again = OptunaTrials(spec, tmp_path, seeds, 1)  # the command ended before this trial
    assert again.next() == third
    assert again.total == 4
    fourth = again.next()
    assert fourth is not None
    again.ended(third, "exit code 70")
    finished(tmp_path, fourth.name, 1.0)
    again.ended(fourth, "exit code 0")
    assert again.failed().keys() == {third.name}
    points = [again.next(), again.next()]
    assert [point.name for point in points if point] == ["trial-002,seed=1", "trial-002,seed=2"]
    assert again.next() is None
    assert len(again.points()) == 6


@needs_optuna
def test_a_pruner_ends_a_trial_that_is_worse_than_others(programs, tmp_path: Path, monkeypatch) -> None:
    from rl_platform.launch.tools.sweep.optuna_search import OptunaTrials, read_spec

    monkeypatch.setattr(jobs_module, "WATCH_S", 0.0)
    path = tmp_path / "search.yaml"
    path.write_text(SPEC + "metric: val/return\npruner: {type: median, startup_trials: 1}\n")
    search = OptunaTrials(read_spec(str(path)), tmp_path, [], 1)
    good = search.next()
    assert good is not None
    finished(tmp_path, good.name, 10.0, 20.0)
    assert not search.hopeless(good)
    search.ended(good, "exit code 0")
    said: list[str] = []
    for name in ("trial-001", "trial-002"):
        finished(tmp_path, name, 1.0, 2.0, mark=False)
    code = SAVES.replace("FILE", repr(str(tmp_path / "saved")))
    assert Jobs(tmp_path, lambda point: [code], [{}], said.append).run(search) == {}
    assert search.pruned() == {"trial-001", "trial-002"}
    assert "trial-001: pruned after step 1" in said
    summary = Summary(tmp_path, search.points(), {}, search.pruned(), "val/return")
    assert [result.status for result in summary.results] == ["finished", "pruned", "pruned"]
    with pytest.raises(ConfigError, match="cannot be read"):
        read_spec(str(tmp_path / "missing.yaml"))
