"""Wrong input of every verb: exit code 2 or 65, a message that says what to do, and no file is written or changed."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import pytest
import typer.main
from run_folder import make_run

from rl_platform.launch.tools.verbs import app

Case = tuple[str, int, tuple[str, ...]]

NO_RUN, FILE, RUNS = "RUN: no such folder", "RUN: is a file of another kind", "holds runs, and is none"
A_FOLDER, INSIDE = "--output: is a folder", "embodied.yaml is a file"
USAGE = "try: rl-platform VERB --help"
ODD = b'{"step": 1, "prompt": null, "response": 5, "reward": "x", "return": "y", "length": null}\n'
DEEP = "[" * 100_000  # more levels than a parser of JSON or YAML takes


def _usage(word: str) -> str:
    return "does not take a value" if "=" in word else USAGE


CASES: dict[str, list[Case]] = {
    "plot": [
        ("runs/rnu nix", 2, ("2 problems", NO_RUN, "did you mean runs/run?", "value: nix")),
        ("embodied.yaml", 2, (FILE,)),
        ("runs", 2, (RUNS, "name runs/pole runs/run")),
        (
            "runs/run runs/pole runs/../runs/run/",
            2,
            ("1 problem:", "named more than once", "/runs/run\n"),
        ),
        ("runs/run/metrics.jsonl runs/run", 2, ("the run is named more than once",)),
        ("torn.jsonl torn.jsonl", 2, ("the run is named more than once", "/torn.jsonl\n")),
        ("runs/run -m reward/maen", 2, ("--metric: no run has this metric", "did you mean reward/mean?")),
        ("runs/run -m x", 2, ("actor/approx_kl", "rl-platform metrics explains them")),
        ("runs/run -m reward/mean -x env_steps", 2, ("-x: no run has perf/env_steps", "allowed: step")),
        ("runs/run -o runs", 2, (A_FOLDER, "*.png")),
        ("runs/run -o curves.xyz", 2, ("has the wrong ending", "did you mean curves.png?")),
        ("runs/run -o embodied.yaml/curves.png", 2, (INSIDE,)),
        ("torn.jsonl", 65, ("torn.jsonl:1: not a JSON object with a step",)),
        ("words.jsonl", 65, ('words.jsonl:1: val/return: not a finite number or null: "high"',)),
        ("endless.jsonl", 65, ("endless.jsonl:2: reward/mean: not a finite number or null: Infinity",)),
    ],
    "environment": [
        ("", 2, ("NAME", USAGE)),
        ("manipulatoin", 2, ("NAME: no such environment", "did you mean manipulation?")),
        ("manipulation twice", 2, (USAGE,)),
        ("./manipulation", 2, ("NAME: no such environment", "allowed: manipulation")),
        ("--nope manipulation", 2, (USAGE,)),
    ],
    "environment-server": [
        ("", 2, ("FILE", USAGE)),
        ("server.py", 2, ("FILE: has the wrong ending", "did you mean server.pyz?")),
        ("runs", 2, ("FILE: is a folder", "*.pyz")),
        ("embodied.yaml/server.pyz", 2, ("FILE: ", "is a file")),
        ("server.pyz CartPole-v1", 2, (USAGE,)),
        ("server.pyz --env CartPole-v1", 2, (USAGE,)),
    ],
    "timeline": [
        ("nix -o nix", 2, ("2 problems", NO_RUN, "did you mean nix.png?")),
        ("runs/run", 2, ("RUN: has no trace.json", "after the steps of runner.trace_steps, which must be above 0")),
        ("embodied.yaml", 2, (FILE,)),
        ("runs/run --steps 0", 2, ("--steps", USAGE)),
        ("torn.json", 65, ("torn.json: not the timeline of a run",)),
        ("deep.json", 65, ("deep.json: not the timeline of a run",)),
    ],
    "work-shares": [
        ("nix", 2, (NO_RUN,)),
        ("runs/run", 2, ("RUN: has no trace.json", "after the steps of runner.trace_steps, which must be above 0")),
        ("embodied.yaml", 2, (FILE,)),
        ("quiet.json", 2, ("the timeline holds no physics", "task_type: embodied")),
        ("torn.json", 65, ("torn.json: not the timeline of a run",)),
        ("deep.json", 65, ("deep.json: not the timeline of a run",)),
    ],
    "snapshot": [
        ("nix", 2, (NO_RUN,)),
        ("runs", 2, (RUNS, "name runs/pole runs/run")),
        ("embodied.yaml", 2, (FILE,)),
        ("runs/run -o view.png", 2, ("has the wrong ending", "did you mean view.svg?")),
        ("runs/run -o runs", 2, (A_FOLDER, "*.svg")),
        ("torn.jsonl", 65, ("torn.jsonl:1: not a JSON object with a step",)),
        ("words.jsonl", 65, ('words.jsonl:1: val/return: not a finite number or null: "high"',)),
    ],
    "rrd": [
        ("nix -o nix", 2, (NO_RUN, "did you mean nix.rrd?")),
        ("runs/run", 2, ("RUN: has no evaluation.json", "env.evaluation.video: true")),
        ("embodied.yaml", 2, (FILE,)),
        ("runs/pole -o runs", 2, (A_FOLDER,)),
        ("runs/pole -o embodied.yaml/x.rrd", 2, (INSIDE,)),
    ],
    "report": [
        ("nix runs/run nox -o runs", 2, ("3 problems", "value: nix", "value: nox", A_FOLDER, "*.html")),
        ("pole", 2, (NO_RUN, "did you mean runs/pole?")),
        ("runs", 2, (RUNS, "name runs/pole runs/run")),
        ("embodied.yaml --follow", 2, (FILE,)),
        ("runs/run.log embodied.yaml reasoning.yaml", 2, ("3 problems",)),
        ("runs/run runs/run/metrics.jsonl", 2, ("the run is named more than once",)),
        ("runs/run -o report.pdf", 2, ("has the wrong ending", "did you mean report.html?")),
        ("runs/run -o embodied.yaml/report.html", 2, (INSIDE,)),
    ],
    "data": [
        ("gsm8", 2, ("'KIND': 'gsm8' is not one of 'gsm8k'", USAGE)),
        ("gsm8k --from nix -o embodied.yaml", 2, ("2 problems", "--from: no such folder", "--output: is a file")),
        ("gsm8k --from embodied.yaml", 2, ("is a file, not the folder of a copy",)),
        ("gsm8k --from rows -o embodied.yaml/data", 2, (INSIDE,)),
        ("gsm8k --from rows -o new/data", 65, ("no column 'answer'. Columns there: text",)),
    ],
    "sweep": [
        ("embodide.yaml runner.seed=1,2", 2, ("cannot be read", "did you mean embodied.yaml?")),
        ("embodied.yaml", 2, ("no key has several values", "runner.seed=1,2,3")),
        ("embodied.yaml runner.sed=1,2", 2, ("did you mean runner.seed?",)),
        ("embodied.yaml runner.seed=1 2", 2, ("2: is neither KEY=VALUE", "by commas: runner.seed=1,2,3")),
        ("embodied.yaml runner.seed=1,1", 2, ("1 is listed twice",)),
        ("embodied.yaml runner.seed=[1,2]", 2, ("no key has several values", "without brackets")),
        ("embodied.yaml runner.seed=1,2 --jobs 0", 2, ("--jobs", USAGE)),
        ("embodied.yaml runner.seed=1,2 -o rows", 2, ("is not empty and contains no sweep",)),
        ("embodied.yaml --optuna embodied.yaml", 2, ("embodied.yaml:1: parameters: this key is required",)),
    ],
    "export": [
        ("pole", 2, ("did you mean runs/pole?",)),
        ("nix", 2, ("no such folder", "a run's folder, one of its checkpoints, or latest")),
        ("embodied.yaml", 2, ("is a file", "runner.output_dir")),
        ("runs", 2, ("contains neither a run nor a checkpoint",)),
        ("runs/run", 2, ("has not written a checkpoint yet", "runner.save_interval")),
        ("latest", 2, ("has a checkpoint", "name the folder of a run")),
        ("runs/run --format pickle", 2, ("'--format': 'pickle' is not one of 'hf'", "'onnx'", USAGE)),
        ("runs/run --output", 2, ("requires an argument", USAGE)),
    ],
    "record": [
        ("nix --step 1", 2, ("RUN: no such folder", "runner.output_dir")),
        ("embodied.yaml --step 1", 2, ("RUN: is not the folder of a run",)),
        ("runs --step 1", 2, ("RUN: is not the folder of a run",)),
        ("runs/run", 2, ("--step", USAGE)),
        ("runs/run --step two", 2, ("--step", USAGE)),
    ],
    "replay": [
        ("nix", 2, ("RECORDING: no such folder", "rl-platform record RUN --step N")),
        ("runs/run", 2, ("RECORDING: is not the folder of a recording",)),
        ("embodied.yaml", 2, ("RECORDING: is not the folder of a recording",)),
        ("runs/run --phase rollout", 2, ("--phase", USAGE)),
        ("runs/run --tolerance -1", 2, ("--tolerance", USAGE)),
    ],
    "doctor": [(word, 2, (_usage(word),)) for word in ("--jsno", "x", "--text", "doctor", "--json=yes")],
    "keys": [(word, 2, (_usage(word),)) for word in ("--json", "x", "runner", "-o", "--help=x")],
    "metrics": [(word, 2, (_usage(word),)) for word in ("--json", "x", "runs/run", "-o", "--help=x")],
}
NEEDS = {"plot": "matplotlib", "timeline": "matplotlib", "data": "datasets"}


@pytest.fixture
def runs(folder: Path) -> Path:
    """The working folder with two runs and damaged files."""
    make_run(folder / "runs" / "run")
    make_run(folder / "runs" / "pole", task="embodied")
    (folder / "torn.jsonl").write_text('{"step": 1,\n')
    (folder / "words.jsonl").write_text('{"step": 1, "val/return": "high"}\n')
    (folder / "endless.jsonl").write_text('{"step": 0}\n{"step": 1, "reward/mean": Infinity}\n')
    (folder / "deep.json").write_text(DEEP)
    (folder / "torn.json").write_text('{"traceEvents": 3}')
    (folder / "quiet.json").write_text('{"traceEvents": []}')
    (folder / "rows").mkdir()
    (folder / "rows" / "train.jsonl").write_text('{"text": "x"}\n')
    return folder


@pytest.mark.parametrize("verb", CASES)
def test_it_is_refused(tool, runs: Path, verb: str) -> None:
    if verb in NEEDS and importlib.util.find_spec(NEEDS[verb]) is None:
        pytest.skip(f"{NEEDS[verb]} is not installed")
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("*")}
    for words, code, texts in CASES[verb]:
        ended = tool(verb, *words.split())
        assert ended.code == code, (words, ended.err)
        assert [text for text in texts if text.replace("VERB", verb) not in ended.err] == [], (words, ended.err)
        assert "Traceback" not in ended.err
        after = {path: path.stat().st_mtime_ns for path in runs.rglob("*")}
        assert after.keys() == before.keys(), words
        assert {path: time for path, time in after.items() if path.is_file()}.items() <= before.items()


def test_latest_is_the_newest_run(tool, runs: Path) -> None:
    os.utime(runs / "runs" / "run" / "metrics.jsonl", (0, 0))
    assert tool("report", "latest", "-o", "page.html").code == 0
    assert "runs/pole" in (runs / "page.html").read_text()
    shutil.rmtree(runs / "runs")
    assert "or latest (in runs/)" in tool("snapshot", "latest").err


def test_every_verb_has_five_cases() -> None:
    verbs = set(typer.main.get_command(app).commands) - {"convert"}  # test_convert.py
    assert {verb for verb, cases in CASES.items() if len(cases) >= 5} == verbs


def test_a_full_disk_leaves_no_file(tool, command, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, *_: object, **__: object) -> int:
        with open(path, "w") as file:
            file.write("half of")
        raise OSError(28, "No space left on device")

    before = sorted(runs.rglob("*"))
    monkeypatch.setattr(Path, "write_text", full)
    for program, words in (
        (tool, "snapshot runs/run -o new/view.svg"),
        (tool, "report runs/run -o report.html"),
        (command, "reasoning.yaml --plan=search --write best.yaml"),
    ):
        ended = program(*words.split())
        assert ended.code == 65, ended.err
        assert f"{words.split()[-1]} cannot be written: No space left on device. Free space, as " in ended.err
        assert sorted(runs.rglob("*")) == before


@pytest.mark.parametrize("name", ["config.yaml", "trace.json", "samples.jsonl", "evaluation.json", "evaluation.mp4"])
def test_other_damaged_files_of_a_run_do_not_prevent_a_report(tool, runs: Path, name: str) -> None:
    (path := runs / "runs" / "pole" / name).unlink(missing_ok=True)
    for damage in (DEEP.encode(), b"\xff\xfe", b"", ODD, None):
        if damage is None:
            path.unlink()
            path.mkdir()
        else:
            path.write_bytes(damage)
        ended = tool("report", "runs/pole", "-o", "page.html")
        assert (ended.code, ended.err) == (0, ""), damage
    assert tool("snapshot", "runs/pole", "-o", "view.svg").code == 0


def test_a_snapshot_leaves_out_a_sample_with_other_types(tool, runs: Path) -> None:
    (runs / "runs" / "run" / "samples.jsonl").write_bytes(ODD)
    (runs / "runs" / "run").rename(runs / "runs" / "name\udcff")  # bytes that are no UTF-8 text
    ended = tool("snapshot", "runs/name\udcff", "-o", "view.svg")
    assert (ended.code, ended.err) == (0, "")


CODE = "THREE = 3\ndef nothing(): return None\n"
KEYS = {  # of code of the user, each in a config that reads it
    "actor.model.type={}": "embodied",
    "env.backend={} env.max_episode_steps=9": "embodied",
    "runner.callbacks=[{}]": "embodied",
    "rollout.backend={}": "reasoning",
    "algorithm.adv_type={}": "reasoning",
    "algorithm.policy_loss={}": "reasoning",
    "algorithm.sample_filter={}": "reasoning",
    "runner.logger_backends=[{}]": "reasoning",
    "reward.type={}": "reasoning",
}
BAD = ("mine:NOPE", "absent:x", "mine:THREE", "mine:nothing", "torn.py:x")


@pytest.mark.parametrize("key", KEYS)
def test_check_refuses_wrong_code(command, folder: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    (folder / "mine.py").write_text(CODE)
    (folder / "torn.py").write_text("def x(:")
    monkeypatch.syspath_prepend(folder)
    for name in BAD if key == "reward.type={}" else BAD[:2]:  # test_extensions.py tries all of them on each kind
        ended = command(f"{KEYS[key]}.yaml", "--check", *key.format(name).split())
        assert (ended.code, "Traceback" in ended.err) == (2, False), (name, ended)
        assert f"command line: {key.partition('=')[0]}" in ended.err
        assert f"value: {name}" in ended.err
