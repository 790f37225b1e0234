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
from typing import Any

import pytest
import torch
from device_rehearsal.acceptance_parts import REHEARSED
from launcher_forks import Launchers
from waiting import alive, until

FOLDER = Path(__file__).parents[2] / "benchmarks"
ONE_ROW = Namespace(dry_run=True, rows=1, length=8)


@pytest.fixture
def run(launchers: Launchers, monkeypatch: pytest.MonkeyPatch) -> Callable[..., subprocess.CompletedProcess[str]]:
    """run("gpu.py", "--small"): the script in a process that has imported what runs use, as have its own forks."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def run_script(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        path = FOLDER / script
        code = f"import runpy, sys; sys.path[0] = {str(FOLDER)!r}; sys.argv[0] = {str(path)!r}\n"
        launcher = launchers.start(
            FOLDER.parent, *arguments, code=f"{code}runpy.run_path(sys.argv[0], None, '__main__')"
        )
        out, err = launcher.communicate(1000)
        return subprocess.CompletedProcess([str(path), *arguments], launcher.wait(), out, err)

    return run_script


@pytest.fixture
def scripted(
    script: Callable[[Path], ModuleType], launchers: Launchers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """scripted("margins.py", "cartpole"): the script in this process, in a folder of its own; why it ended, if it
    failed. Training runs that it starts are processes, which need not import."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    start_process = subprocess.run

    def run_forked(command: list[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        python, option, *words = command
        if (python, option) != (sys.executable, "-c"):
            return start_process(command, **options)
        with pytest.MonkeyPatch.context() as patch:
            for name in os.environ.keys() - options.get("env", os.environ).keys():
                patch.delenv(name)
            for name, value in options.get("env", {}).items():
                patch.setenv(name, value)
            launcher = launchers.start(tmp_path, *words[1:], code=words[0])
        out, err = launcher.communicate()
        return subprocess.CompletedProcess(command, launcher.wait(), out, err)

    monkeypatch.setattr(subprocess, "run", run_forked)

    def run_here(name: str, *words: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *words])
        try:
            return str(script(FOLDER / name).main() or "")
        except SystemExit as ended:
            return str(ended.code or "")

    return run_here


def test_names_of_the_package_are_there() -> None:
    missing = []
    for script in sorted(FOLDER.rglob("*.py")):
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


def test_without_a_gpu_it_ends_with_one_clear_line(scripted, capsys) -> None:
    told = scripted("training_gpu.py")
    assert told == "training_gpu.py: torch sees no GPU on this machine. --dry-run tries the script out on the CPU."
    assert capsys.readouterr() == ("", "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="Megatron would compute on the GPU of this machine")
def test_its_dry_run_measures_all_three_and_they_agree(run, tmp_path: Path) -> None:
    ended = run("training_gpu.py", "--dry-run", "--json", str(tmp_path / "found.json"))
    assert ended.returncode == 0, ended.stderr
    found = json.loads((tmp_path / "found.json").read_text())["found"]
    assert found.keys() == {"equal", "chat", "mixed"}
    for of_case in found.values():
        assert of_case.keys() == {"plain FSDP", "fsdp", "megatron"}
        norms = [one["grad_norm"] for one in of_case.values()]
        assert norms[0] > 1e-3
        assert norms == pytest.approx([norms[0]] * 3, rel=0.02)  # bfloat16
        assert all(len(one["seconds"]) == 1 and one["tokens_per_s"] > 0 for one in of_case.values())
    assert found["equal"]["fsdp"]["tokens_per_s"] * found["equal"]["fsdp"]["seconds"][0] == pytest.approx(4 * 32)
    assert "MFU not known" in ended.stdout


@pytest.mark.slow
def test_channels_of_ray_are_measured_beside_bare_ray(tmp_path: Path) -> None:
    words = ("--items", "1", "--messages", "64", "--rounds", "1", "--json", str(tmp_path / "found.json"))
    ended = subprocess.run([sys.executable, FOLDER / "channel_ray.py", *words], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    rates = json.loads((tmp_path / "found.json").read_text())["rates"]
    assert {name: len(values) for name, values in rates.items()} == dict.fromkeys(
        ("channel MB/s", "bare MB/s", "small messages/s"), 1
    )
    assert all(value > 0 for values in rates.values() for value in values)


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


def test_a_common_beginning_is_work_once_in_a_micro_batch(benchmark: ModuleType) -> None:
    """Two rows of 32 tokens, two of them common: without micro-batches one row is 2 tokens and 2 x 2 pairs shorter."""
    rows = Namespace(dry_run=True, rows=2, length=32, micro_tokens=64)
    attention, feed_forward = 64 * 64 + 2 * 64 * 32 + 64 * 64, 3 * 64 * 96
    saved = 2 * 2 * (attention + feed_forward) + 2 * 2 * 2 * 64
    assert benchmark.flops(rows, "equal") - benchmark.flops(rows, "chat") == 3 * 2 * saved
    rows.micro_tokens = 32
    assert benchmark.flops(rows, "equal") == benchmark.flops(rows, "chat")


@pytest.fixture
def gpu(script: Callable[[Path], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # main sets it
    return script(FOLDER / "gpu.py")


@pytest.mark.timeout(1200)
def test_the_acceptance_of_a_gpu_runs_in_small(gpu: ModuleType, run, tmp_path: Path) -> None:
    """Every part whose packages are installed passes. `ppo-bfloat16` stands for `ppo-float32`, the same function, and
    device_rehearsal/test_acceptance.py runs what is in REHEARSED."""
    from gpu_parts.table import NAMES

    names = [name for name in NAMES if name not in ("ppo-float32", *REHEARSED)]
    ended = run("gpu.py", "--small", "--output", str(tmp_path), *names)
    assert ended.returncode == 0, ended.stdout + (tmp_path / "gpu.md").read_text() + ended.stderr
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    left_out = {name: part["reason"] for name, part in parts.items() if part["state"] == "left out"}
    assert all(reason.startswith(("not installed: ", "no --vllm-python")) for reason in left_out.values())
    assert {name for name, part in parts.items() if part["state"] == "passed"} == parts.keys() - left_out.keys()
    assert len(parts) - len(left_out) >= 6
    assert all(part["figures"] for name, part in parts.items() if name not in left_out)
    page = (tmp_path / "gpu.md").read_text()
    assert "largest difference of a metric between the two runs | 0 | <= 0 | yes" in page
    assert "small run on the CPU" in page


WITH_TORCH_ONLY = """
import importlib.abc, runpy, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("accelerate", "gymnasium", "psutil", "pydantic", "ray", "transformers", "yaml"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
sys.argv[:] = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_an_image_with_torch_only_measures_attention_and_names_what_other_parts_need(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITH_TORCH_ONLY, str(FOLDER / "gpu.py"), "--small", "--output", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(FOLDER), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert [name for name, part in parts.items() if part["state"] == "passed"] == ["attention"]
    assert parts["rollout"]["reason"] == "not installed: accelerate, psutil, pydantic, transformers, yaml"
    assert {part["state"] for name, part in parts.items() if name != "attention"} == {"left out"}


def test_its_words_are_checked_together(gpu: ModuleType, tmp_path: Path, capsys) -> None:
    (tmp_path / "file").touch()
    words = ["atention", "--again", "rollout", "x", "--minutes", "0", "--vllm-python", "none"]
    assert gpu.main([*words, "--output", str(tmp_path / "file" / "inner")]) == 2
    said = capsys.readouterr().err
    for part in (
        "atention: no such part; attention? There are tests, equality",
        "x: no such part. There are tests",
        "--minutes 0: a number above 0 and up to 1440 is allowed",
        "--vllm-python none: not a program that can be run",
        "inner: not a folder to write into",
    ):
        assert part in said
    assert gpu.main(["--small"]) == 2
    assert "--small needs an --output FOLDER of its own" in capsys.readouterr().err
    (tmp_path / "gpu.json").write_text("{}")
    assert gpu.main(["--small", "--output", str(tmp_path)]) == 2
    assert "gpu.json: not written by this command" in capsys.readouterr().err


def test_without_a_gpu_it_refers_to_the_small_run(gpu: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"torch sees no GPU on this machine. --small runs all parts in small"):
        gpu.main(["--output", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


def test_only_failed_parts_and_those_without_time_run_again(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    from gpu_parts import process
    from gpu_parts.table import PARTS

    available = [part for part in PARTS if not part.missing(None)]
    ran: list[str] = []
    states = {"equality": "failed", "offload": "missed"}

    def run_part(part, small, vllm_python, limit_s) -> dict[str, object]:
        ran.append(part.name)
        return {"state": states.get(part.name, "passed"), "seconds": 1.0, "figures": []}

    monkeypatch.setattr(process, "run_part", run_part)
    monkeypatch.setattr(gpu, "machine", lambda small: {"GPU": "pretended"})
    words = ["--output", str(tmp_path)]
    assert gpu.main([*words, "--minutes", "3"]) == 1
    short = [part.name for part in available if part.limit_s < 180]
    assert ran == short
    assert "no time for tests, " in capsys.readouterr().out
    ran.clear()
    states.clear()
    assert gpu.main(words) == 1, "a target is still missed"
    assert ran == [part.name for part in available if part.name == "equality" or part.name not in short]
    ran.clear()
    assert gpu.main([*words, "--again", "offload"]) == 0
    assert ran == ["offload"]
    assert "| mujoco-warp |" in (tmp_path / "gpu.md").read_text()
    (tmp_path / "gpu_notes.txt").write_text("`offload` ran beside tests.\n")
    gpu.main(words)
    assert "\n\n`offload` ran beside tests.\n\n| machine |" in (tmp_path / "gpu.md").read_text()
    (tmp_path / "gpu_notes.txt").write_bytes(b"\xff")
    assert gpu.main(words) == 2
    assert "gpu_notes.txt: the notes cannot be read" in capsys.readouterr().err


def test_the_page_of_the_gpu_has_its_notes() -> None:
    results = FOLDER.parent / "docs" / "results"
    assert (results / "gpu_notes.txt").read_text().strip() in (results / "gpu.md").read_text()


def test_no_part_and_no_call_takes_longer_than_promised(gpu: ModuleType) -> None:
    from gpu_parts.table import PARTS

    assert gpu.MINUTES <= 25
    assert all(part.limit(small) <= 8 * 60 for part in PARTS for small in (False, True))
    never_run = [part.limit_s for part in PARTS if part.name in ("mujoco-warp", "recipe")]
    assert len(never_run) == 2
    assert sum(never_run) <= 8 * 60, "docs/gpu.md starts both with --minutes 8"


def measures_and_fails(setup, report) -> None:
    report("apples", 3, "pieces")
    os.write(1, b"a hint\n")
    raise ValueError("no pears\n    hint: plant some")


def writes_its_folder(setup, report) -> None:
    report("folder", 1, str(setup.folder))
    (setup.folder / "run").mkdir()
    if (setup.folder.parent.parent / "fails").exists():
        raise ValueError("no pears")


def test_runs_of_a_part_stay_in_runs_until_it_passes(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpu_parts import process
    from gpu_parts.part import Part

    assert FOLDER.parent / "runs" / "gpu" == process.RUNS
    monkeypatch.setattr(process, "RUNS", tmp_path)
    monkeypatch.setattr("gpu_parts.part.Setup.start", "fork")  # nothing uses CUDA
    part, folder = Part("tests", "", writes_its_folder, 60), tmp_path / "tests"
    (tmp_path / "fails").touch()
    assert process.run_part(part, False, None, 60)["state"] == "failed"
    assert (folder / "files" / "run").is_dir()
    (tmp_path / "fails").unlink()
    passed = process.run_part(part, False, None, 60)
    assert (passed["state"], passed["figures"][0]["unit"]) == ("passed", str(folder / "files"))
    assert not folder.exists()


def test_the_introduction_of_the_page_is_written_by_the_script(gpu: ModuleType) -> None:
    from gpu_parts.page import page_of

    page = page_of({"small": False, "machine": {"GPU": "H200"}, "parts": {}})
    before = page.partition("| machine |")[0]
    assert before.count("\n\n") == 2
    for sentence in (
        "Each part ran in a process",
        "A commit with a + had uncommitted changes.",
        "Of 18 parts: 18 not run.",
    ):
        assert sentence in before
    assert max(map(len, before.splitlines())) <= 120


def measures_and_hangs(setup, report) -> None:
    from gpu_parts.part import at_most

    report("worms", 1, "", at_most(0))
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(os.environ["CHILD"]).write_text(str(child.pid))
    child.wait()


def test_a_part_that_fails_or_hangs_keeps_its_numbers_and_leaves_no_process(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpu_parts.page import page_of
    from gpu_parts.part import Part
    from gpu_parts.process import run_part

    failed = run_part(Part("tests", "", measures_and_fails, 60), True, None, 60)
    assert (failed["state"], failed["error"]) == ("failed", "ValueError: no pears")
    assert "a hint" in failed["output"]
    monkeypatch.setenv("CHILD", str(tmp_path / "child"))
    late = run_part(Part("equality", "", measures_and_hangs, 60), True, None, 3)
    assert (late["state"], late["error"]) == ("timed out", "stopped after 3 s")
    child = int((tmp_path / "child").read_text())
    until(lambda: not alive([child]))
    page = page_of({"small": True, "machine": {"GPU": "none"}, "parts": {"tests": failed, "equality": late}})
    assert "failed: ValueError: no pears" in page
    assert "| apples | 3 pieces |\n" in page
    assert "| worms | 1 | <= 0 | **no** |" in page
    assert "16 not run" in page


def test_the_numbers_of_several_cases_stand_in_one_table_and_every_number_on_the_page(gpu: ModuleType) -> None:
    from gpu_parts.page import Row, numbers

    rows = [
        row
        for case, share, met in (("equal", "0.5", "yes"), ("mixed", "0.4", "**no**"), ("chat", "0.6", "yes"))
        for row in (Row(case, "7", "tokens/s", "", ""), Row(f"{case}: share", share, "", ">= 0.5", met))
    ]
    assert numbers([*rows, Row("peak", "9", "GiB", "", "")]) == [
        "| case | tokens/s | share (>= 0.5) |",
        "| --- | --- | --- |",
        "| equal | 7 | 0.5 |",
        "| mixed | 7 | 0.4 **missed** |",
        "| chat | 7 | 0.6 |",
        "",
        "| number | value |",
        "| --- | --- |",
        "| peak | 9 GiB |",
        "",
    ]
    alone = [Row("1 GB", "4", "GB/s", "", ""), *rows[:2], Row("2 GB", "5", "GB/s", ">= 4", "yes")]
    assert [line.partition(" |")[0] for line in numbers(alone)[2:-1]] == [
        "| 1 GB",
        "| equal",
        "| equal: share",
        "| 2 GB",
    ]


def test_a_page_shows_every_limit_of_runs_that_are_made_once(scripted, tmp_path: Path) -> None:
    changes = "--set", "runner.max_steps=1", "--set", "env.evaluation.episodes=2"
    page = "margins.py", "cartpole", "--variants", "avx2", "--output", "page.md"
    assert scripted(*page, *changes, "--seeds", "3") == ""
    made = tmp_path / "runs" / "margins" / "cartpole" / "avx2-3" / "metrics.jsonl"
    before = made.stat().st_mtime_ns
    assert scripted(*page, *changes, "--seeds", "3", "4") == ""
    assert made.stat().st_mtime_ns == before
    lines = [line for line in (tmp_path / "page.md").read_text().splitlines() if line.startswith("| cartpole")]
    assert len(lines) == 2
    first, last = ([cell.strip() for cell in line.split("|")] for line in lines)
    assert first[2:4] == ["first `val/return` < 100", "2"]
    assert first[7] == "all equal" or float(first[7]) > 3, "a pole that nobody balances falls early"
    assert last[2:4] == ["last `val/return` >= 475", "2"]
    assert float(last[7]) < 0, "one step is too few"
    assert "run of other settings" in scripted(*page, "--seeds", "3")


def test_pages_are_made_of_runs_that_are_made_once(scripted, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    small = "runner.max_steps=2", "runner.val_check_interval=1", "env.evaluation.episodes=2"
    changes = [word for change in small for word in ("--set", change)]
    pages = "results.py", "cartpole", *changes, "--output", "pages"
    assert scripted(*pages, "--seeds", "3") == ""
    made = tmp_path / "runs" / "results" / "cartpole" / "seed-3" / "metrics.jsonl"
    before, config = made.stat().st_mtime_ns, made.with_name("config.yaml")
    assert "trust_checkpoint: true" in config.read_text(), "some simulators' states hold their own classes"
    config.write_text(config.read_text().replace("trust_checkpoint: true", "trust_checkpoint: false"))
    assert scripted(*pages, "--seeds", "3", "4") == ""
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
    assert "holds a run of other settings" in scripted(*pages, "--seeds", "3", "--set", "algorithm.gamma=0.9")


def test_a_page_keeps_the_seeds_of_its_file_beside_new_ones(scripted, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    changes = [word for change in ("runner.max_steps=1", "env.evaluation.episodes=2") for word in ("--set", change)]
    pages = "results.py", "cartpole", *changes, "--output", "pages"
    assert scripted(*pages, "--seeds", "3") == ""
    page, table = tmp_path / "pages" / "cartpole.md", tmp_path / "pages" / "cartpole.csv"
    page.write_text(page.read_text().replace(" cores, Python ", " cores, Python 2, "))
    before = table.read_text()
    assert scripted(*pages, "--seeds", "3", "4", "--keep", "--runs", "others") == ""
    assert not (tmp_path / "others" / "cartpole" / "seed-3").exists()
    assert table.read_text().startswith(before)
    text = page.read_text()
    assert "| rl-platform | 2 | 1,024 |" in text
    old, new = (line for line in text.splitlines() if " cores, Python " in line)
    assert (" Python 2, " in old, old.endswith("(rl-platform 3)"), new.endswith("(rl-platform 4)")) == (True,) * 3


def test_speeds_of_simulators_stay_on_the_page_of_the_robot_tasks(scripted, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    alone = [[2.0, 0.1, {"steps": 200, "cpu_seconds": 0.02}], [4.0, 0.1, {"steps": 200, "cpu_seconds": 0.02}]]
    ours = [[2.0, 0.1, {"steps": 180, "cpu_seconds": 0.036}], [5.0, 0.1, {"steps": 200, "cpu_seconds": 0.04}]]
    measured = {
        "options": {"num_envs": 16, "workers": 2},
        "observations": {"FetchReach": "16 numbers"},
        "laps": {"FetchReach": {"alone": alone, "rl_platform": ours}},
    }
    (tmp_path / "speeds.json").write_text(json.dumps(measured))
    page = tmp_path / "robots.md"
    page.write_text("before\n## Notes\n\nA note by hand.\n")
    for words in ("--speeds", "speeds.json"), ():
        assert scripted("robots.py", "--output", ".", *words) == ""
        text = page.read_text()
        assert "\n| FetchReach | 16 numbers | 16, 2 | 75 | 65 | 0.85 (0.80 to 0.90) | 100 | 200 |\n" in text
        assert "| [fetch_reach](fetch_reach.md) |" in text
        assert text.endswith("\n## Notes\n\nA note by hand.\n")


@pytest.fixture
def accuracy(script: Callable[[Path], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    return script(FOLDER / "plan_accuracy.py")


def test_every_case_of_the_plans_accuracy_is_planned(accuracy: ModuleType, tmp_path: Path) -> None:
    with accuracy.cache(tmp_path):
        predicted = {name: accuracy.predict(case) for name, case in accuracy.CASES.items()}
    assert all(one.step > 0 and one.memory > 0 and len(one.phases) >= 3 for one in predicted.values())
    assert {case.base for case in accuracy.CASES.values()} - {""} <= accuracy.CASES.keys()


def test_the_page_about_the_plans_accuracy_has_the_errors(accuracy: ModuleType) -> None:
    def result(name: str, step: float, sheet: float, machine: float, run: float | None = None) -> object:
        predicted = {"data sheet": sheet, "machine": machine} | ({} if run is None else {"run": run})
        made = {basis: accuracy.Prediction(seconds, {"generate": 1.0}, 2**30) for basis, seconds in predicted.items()}
        return accuracy.Result(name, step, {"generate": 0.5}, 2**31, made)

    page = accuracy.page([result("large", 2.0, 3.0, 2.4), result("large, critic apart", 1.0, 4.0, 0.9, 1.1)])
    assert "| a step | data sheet | 175% | +300% |" in page
    assert "| a step | machine | 15% | +20% |" in page
    assert "| a step | run | 10% | +10% |" in page
    assert "| memory | machine | 50% | -50% |" in page
    assert "| large | 2 | +50% | +20% |  | 2.00 | -50% |" in page
    assert "| large, critic apart | 1 | +300% | -10% | +10% | 2.00 | -50% |" in page
    assert "| data sheet | large | 100% |" in page
    assert "| machine | large, critic apart | 0% |" in page
    assert "| generate | 100% | 100% | 100% |" in page


@pytest.fixture
def memory(script: Callable[[Path], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    return script(FOLDER / "memory.py")


def test_every_case_of_memory_is_planned_for_the_lengths_of_its_run(memory: ModuleType) -> None:
    lengths = [*memory.lengths_of([{"len/prompt_mean": 14.2, "len/response_mean": 6.0}, {"len/response_mean": 9.5}])]
    assert lengths == ["data.max_prompt_length=15", "data.max_response_length=10"]
    for case in memory.CASES.values():
        reasoning = case.config.startswith("reasoning")
        planned = memory.planned(case, lengths if reasoning else [])
        assert planned["peak"] > sum(memory.parts_of(planned).values()) * 0.99


def test_the_page_about_memory_has_owners_beside_the_plan(memory: ModuleType) -> None:
    gigabyte = 10**9
    owners = {"parameters": gigabyte, "gradients": 0, "freed, kept by the allocator": gigabyte // 2}
    parts = dict.fromkeys(("weights", "optimizer", "gradients", "activations", "kv_cache", "processes"), gigabyte)
    page = memory.page([memory.Result("tiny", 5 * gigabyte, owners, 4 * gigabyte, 6 * gigabyte, parts)])
    assert "| parameters | 1.00 | 1.00 |" in page
    assert "| freed, kept by the allocator | 0.50 | in activations |" in page
    assert "| **peak of the resident set** | **5.00** | **6.00** (+20%) |" in page
    assert "| most in use at once | 4.00 | |" in page


def test_memory_counts_live_tensors_once_each(memory: ModuleType) -> None:
    tied = torch.zeros(10)
    assert sum(memory._new_bytes([tied, tied[2:], torch.zeros(5)], set())) == 40 + 20
    census = memory.Census()
    census.least = 100
    sample = memory.Sample(resident=1000, heap=800, used=700, owned={"parameters": 400, "gradients": 100})
    assert census.owners(sample) == {
        "parameters": 400,
        "gradients": 100,
        "activations": 100,
        "freed, kept by the allocator": 100,
        "libraries, interpreter, data": 300,
    }


@pytest.fixture
def staleness(script: Callable[[Path], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    return script(FOLDER / "staleness.py")


def test_the_runs_of_staleness_are_valid(staleness: ModuleType, tmp_path: Path) -> None:
    for part in ("pace", "curves"):
        found = staleness.cases(part, tmp_path)
        assert len(found) == len(staleness.AHEAD) * (
            len(staleness.LOADS) if part == "pace" else 3 * len(staleness.TASKS)
        )
        for case in found.values():
            staleness.load(str(staleness.ROOT / "configs" / case.config), staleness.settings_of(case))
    with staleness.cache(tmp_path):
        alternating, ahead = (staleness.planned("rollout apart", k, tmp_path) for k in (0, 2))
    assert (alternating.age, ahead.age) == (0, 2)
    assert ahead.seconds < alternating.seconds
    assert ahead.idle[0] < alternating.idle[0]


def test_clusters_are_simulated_with_the_lengths_of_a_run(staleness, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("_simulated_clusters.SIMULATED_STEPS", 4)
    output = tmp_path / "page.md"
    output.write_text("# Title\n\n## Learning\n\nCurves.\n")

    def call(lengths: str) -> None:
        words = ["staleness.py", "simulate", "--lengths", str(tmp_path / lengths), "--output", str(output)]
        monkeypatch.setattr(sys, "argv", words)
        staleness.main()

    with pytest.raises(SystemExit, match="no folder of a run"):
        call("nothing")
    for name, most in (("equal", 1), ("varied", 40)):
        (tmp_path / name).mkdir()
        rows = [{"step": 1, "response": "x" * (1 + n % most)} for n in range(400)] + [{"step": 1, "episode": 2}]
        (tmp_path / name / "samples.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        call(name)
        lines = output.read_text().splitlines()
        assert lines.count(staleness.SIMULATED) == 1
        assert lines[:5] == ["# Title", "", "## Learning", "", "Curves."]
        printed = [
            [cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith(("| 64", "| 1,"))
        ]
        of_each = [[row[0], int(ahead), *row[2:]] for row in printed for ahead in row[1].split(", ")]
        cells = [row for devices in ("64", "1,024") for row in sorted(row for row in of_each if row[0] == devices)]
        assert [row[1] for row in cells] == [*staleness.AHEAD] * 2
        assert [row[3] == "1.00" for row in cells] == [True, *[False] * 4] * 2
        assert min(float(row[3]) for row in cells) == 1
        paces = [row[2:] for row in cells]
        assert (paces[1] == paces[2]) or name == "varied"  # what does not vary needs no more than one rollout ahead


def test_tables_without_new_runs_stay_on_the_page(staleness: ModuleType, tmp_path: Path) -> None:
    before = "# T\n\n## Pace\n\n### Critic apart\n\nold\n\n## Learning\n\n![Curves](x.png)\n\n### CartPole\n\ncurves\n"
    page = staleness.page(tmp_path, "x.png", before)
    for heading, below in (("### Critic apart", "old"), ("### CartPole", "curves")):
        assert page.count(f"{heading}\n\n{below}") == 1
    assert page.index("## Pace") < page.index("old") < page.index("## Learning") < page.index("curves")


def test_idle_shares_of_a_timeline(staleness: ModuleType, tmp_path: Path) -> None:
    """Calls of one worker overlap; the reward waits all the time; a call before the counted steps does not count."""
    steps, lanes = staleness.MEASURED - 1, ["steps", "actor[0]", "critic[0]", "rollout[0]", "reward[0]"]
    spans = [("step", 0, number * 1e6, 1e6) for number in range(steps + 2)]  # with the start and a first step
    last = steps + 1
    spans += [("call", 1, 0.5e6, 1.0e6), ("call", 1, last * 1e6, 0.5e6), ("call", 2, last * 1e6 + 0.25e6, 0.5e6)]
    spans += [("call", 3, 2e6, steps * 1e6), ("call", 4, 0.0, 100e6)]
    events = [
        {"ph": "X", "name": kind, "cat": kind, "pid": 1, "tid": lane, "ts": ts, "dur": dur}
        for kind, lane, ts, dur in spans
    ]
    events += [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": lane, "args": {"name": name}}
        for lane, name in enumerate(lanes)
    ]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    rows = [{"step": step, "staleness/mean": 2.0, "perf/rollouts_ready": 1.0} for step in range(steps + 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pace = staleness.measured(tmp_path, [("actor", "critic"), ("rollout", "reward")])
    assert pace.seconds == pytest.approx(1.0)
    assert pace.idle == pytest.approx((1 - 0.75 / steps, 0.0))
    assert (pace.age, pace.ready) == (2.0, 1.0)


def test_a_page_that_is_made_again_keeps_its_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(FOLDER)
    write_page = importlib.import_module("_common").write_page
    page = tmp_path / "page.md"
    write_page(page, "# Memory\n\nold\n\n")
    page.write_text(page.read_text() + "\n## Notes\n\nby hand\n")
    for text in ("new", "newer"):
        write_page(page, f"# Memory\n\n{text}\n\n")
        assert page.read_text() == f"# Memory\n\n{text}\n\n## Notes\n\nby hand\n"
