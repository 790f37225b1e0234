"""The command line: what it refuses and how it says so, what it prints, its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl_platform.config import load_config
from rl_platform.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    Deadline,
    Diverged,
    PlatformError,
    Problem,
    Unreachable,
    WorkerDied,
    WorkerError,
)
from rl_platform.launch import command as command_line
from rl_platform.launch import placed_config
from rl_platform.placement.scheduler import schedule

HEAVY = {"torch", "ray", "transformers", "gymnasium", "mujoco", "numpy", "megatron", "sglang"}


def test_help(command):
    ended = command("--help")
    assert ended.code == 0
    assert "KEY=VALUE" in ended.out
    assert all(option in ended.out for option in ("--plan", "--check", "--eval", "--slurm"))


@pytest.mark.parametrize(
    ("arguments", "message"), [([], "Missing argument 'config'"), (["a.yaml", "--nope"], "No such option: --nope")]
)
def test_wrong_usage(command, arguments: list[str], message: str):
    ended = command(*arguments)
    assert ended.code == 2
    assert message in ended.err
    assert "--help" in ended.err


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ("--resume", "runner.resume=auto"),
        ("--set", "KEY=VALUE without --set"),
        ("--runner.max_steps=1", "runner.max_steps=VALUE"),
    ],
)
def test_a_key_written_as_an_option_is_named_as_it_is_set(command, option: str, instead: str):
    ended = command("reasoning.yaml", option)
    assert ended.code == 2
    assert f"Write {instead}" in ended.err
    assert "--submit" not in ended.err


@pytest.mark.parametrize(
    ("name", "reason"),
    [("nowhere.yaml", "No such file or directory"), (".", "Is a directory")],
)
def test_files_that_cannot_be_read(command, name: str, reason: str):
    ended = command(name)
    assert ended.code == 2
    assert f"{name}: config: the file cannot be read: {reason}" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("encoding", "message"),
    [
        ("latin-1", "mine.yaml:1: config: not UTF-8: byte 5 of the line is 0xfc, which is ü in ISO-8859-1"),
        ("utf-16", "mine.yaml:1: config: not UTF-8: the file begins with the mark of UTF-16"),
        ("utf-8-sig", ""),
    ],
)
def test_a_config_in_another_encoding(command, folder: Path, encoding: str, message: str):
    text = f"# Prüfung\n{(folder / 'embodied.yaml').read_text()}"
    (folder / "mine.yaml").write_bytes(text.encode(encoding))
    (folder / "extending.yaml").write_text("extends: mine.yaml\n")
    for name in ("mine.yaml", "extending.yaml"):
        ended = command(name, "--print-config")
        assert ended.code == (2 if message else 0), ended.err
        assert "Traceback" not in ended.err
    ended = command("mine.yaml", "--print-config")
    assert message in ended.err
    if message:
        assert "-t UTF-8 mine.yaml > mine-utf8.yaml" in ended.err


def test_problems_of_config_and_placement_are_told_together(command, folder: Path):
    text = (folder / "reasoning.yaml").read_text().replace("actor,critic,rollout,reward: all", "actor,critc,rollout: 3")
    (folder / "bad.yaml").write_text(text.replace("train_size", "traim_size"))
    ended = command("bad.yaml", "algorithm.gamma=2", "cluster.component_placement.env=0-")
    assert ended.code == 2
    lines = [line for line in ended.err.splitlines() if not line.startswith("    ")]
    assert lines == [
        "6 problems:",
        "bad.yaml:7: cluster.component_placement: reward without a placement: "
        "reasoning needs actor, rollout and reward",
        "bad.yaml:8: cluster.component_placement.actor,critc,rollout: no component is called 'critc'",
        "bad.yaml:8: cluster.component_placement.actor,critc,rollout: node 3 does not exist: the cluster has 1 node",
        "bad.yaml:11: data.traim_size: unknown key",
        "command line: algorithm.gamma: out of range",
        "command line: cluster.component_placement.env: a range needs both ends",
    ]
    assert "did you mean critic?" in ended.err


def test_the_placement_is_checked_when_other_sections_cannot_be_read(command):
    placed = "cluster.component_placement={'actor,critic,rollout,reward': 0-3}"
    ended = command("reasoning.yaml", "runner.task_type=reasonning", "cluster.gpus_per_node=2", placed)
    assert ended.code == 2
    assert "command line: runner.task_type: not one of the allowed values" in ended.err
    assert "accelerator 2 does not exist: the cluster has 2 accelerators" in ended.err


def test_a_placement_on_a_cluster_that_cannot_be_trusted_is_not_judged(command):
    placed = "cluster.component_placement={'actor,critic,rollout,reward': 0-3}"
    ended = command("reasoning.yaml", "cluster.gpus_per_nod=4", placed)
    assert "1 problem:" in ended.err
    assert "did you mean cluster.gpus_per_node?" in ended.err


@pytest.mark.parametrize("broken", [["runner.max_step=3"], ["cluster.component_placement.env=9"], ["--check", "a.b=1"]])
def test_a_typo_is_answered_at_once_and_without_heavy_libraries(folder: Path, program, broken: list[str]):
    code = (
        "import sys; from rl_platform.launch.cli import main\n"
        f"sys.argv = ['platform-launch', 'embodied.yaml', *{broken!r}]\n"
        "try: main()\n"
        f"finally: print(sorted({HEAVY!r} & sys.modules.keys()))"
    )
    ended = program(code)
    assert ended.code == 2
    assert ended.cpu_seconds < 3
    assert ended.out.strip() == "[]"
    assert "Traceback" not in ended.err


@pytest.mark.slow
def test_the_work_of_a_program_is_its_own(program) -> None:
    burn = "import time\nwhile time.process_time() < 1: pass"
    earlier = subprocess.Popen([sys.executable, "-c", burn])
    earlier.wait()
    del earlier
    ended = program("import os; print(os.getcwd()); raise SystemExit(3)")
    assert (ended.code, ended.out.strip(), ended.err) == (3, str(Path.cwd()), "")
    assert ended.cpu_seconds < 1
    assert program(burn).cpu_seconds >= 1


def test_plan_starts_nothing(command, folder: Path):
    ended = command("reasoning.yaml", "--plan", "cluster.gpus_per_node=2", "cluster.num_nodes=3")
    assert ended.code == 0
    assert "Cluster: 3 nodes, 6 GPUs" in ended.out
    assert "rollout" in ended.out
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("installed", "gpus", "backend", "why"),
    [(True, 1, "sglang", "there are GPUs"), (False, 1, "torch", "not installed"), (True, 0, "torch", "on a CPU")],
)
def test_the_engine_that_auto_stands_for(
    installed: bool, gpus: int, backend: str, why: str, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    found = ModuleSpec("sglang", None, origin="a file") if installed else None
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: found)
    loaded = command_line.load("reasoning.yaml", [f"cluster.gpus_per_node={gpus}"])[0]
    assert loaded.config.rollout.backend == backend
    assert loaded.notes[0].startswith(f"rollout.backend auto is {backend} here: ")
    assert why in loaded.notes[0]
    assert command_line.load("reasoning.yaml", ["rollout.backend=torch"])[0].notes == ()


def test_print_config_starts_nothing_and_loads_again(command, folder: Path):
    ended = command("reasoning.yaml", "--print-config", "runner.seed=7")
    assert ended.code == 0
    assert yaml.safe_load(ended.out)["runner"]["seed"] == 7
    (folder / "again.yaml").write_text(ended.out)
    assert load_config(folder / "again.yaml").config == command_line.load("reasoning.yaml", ["runner.seed=7"])[0].config
    assert not (folder / "out").exists()


@pytest.fixture
def fails(command, monkeypatch: pytest.MonkeyPatch) -> Callable:
    """fails(error): how the command ends when the run raises it."""

    def ended(error: BaseException):
        def run(*_: object) -> None:
            raise error

        monkeypatch.setattr("rl_platform.launch.session.run", run)
        return command("embodied.yaml")

    return ended


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (DataError, 65),
        (CheckpointError, 65),
        (Diverged, 70),
        (WorkerError, 70),
        (WorkerDied, 75),
        (Deadline, 75),
        (Unreachable, 75),
    ],
)
def test_errors_for_the_user_have_their_exit_code_and_no_traceback(fails, kind: type[PlatformError], code: int):
    error = kind("what went wrong")
    error.add_note("what to do")
    ended = fails(error)
    assert ended.code == code
    assert ended.err == f"{kind.__name__}: what went wrong\n    what to do\n"


def test_a_bug_shows_its_traceback(fails):
    error = KeyError("surprise")
    error.add_note("the same command goes on from step 3")
    ended = fails(error)
    assert ended.code == 70
    assert "KeyError: 'surprise'" in ended.err
    assert "in run" in ended.err
    assert "goes on from step 3" in ended.err
    assert "This is a bug in rl-platform." in ended.err


def test_problems_found_by_the_run_get_their_line_too(fails):
    written, elsewhere = Problem("env.id", "not there"), Problem("reward.type", "not there", where="its own")
    unwritten = Problem("env.evaluation.seed", "odd")
    ended = fails(ConfigError([written, elsewhere, unwritten]))
    assert ended.code == 2
    assert "embodied.yaml:19: env.id: not there" in ended.err
    assert "its own: reward.type: not there" in ended.err
    assert "embodied.yaml:22: env.evaluation.seed: odd" in ended.err


def test_load_gives_config_placement_and_inventory(folder: Path):
    loaded, placement, inventory = command_line.load("embodied.yaml", ["cluster.gpus_per_node=1"])
    assert loaded.config.env.id == "CartPole-v1"
    assert json.dumps(placement.components["env"][0].accelerators) == "[0]"
    assert inventory.num_accelerators == 1


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{index}: &a{index} [{', '.join([f'*a{index - 1}'] * 10)}]\n" for index in range(1, 10)
)


@pytest.mark.parametrize(
    ("text", "overrides", "key", "reason"),
    [
        ("", ["cluster.num_nodes=3000000"], "cluster.num_nodes", "out of range"),
        ("", ["cluster.inventory={nodes: 10000, gpus_per_node: 8}"], "cluster", "80000 GPUs are too many"),
        ("", ["runner.seed=1" + "0" * 5000], "runner.seed", "the number is too large"),
        ("", ["env.kwargs={a: 1e400}"], "env.kwargs.a", "the number is too large"),
        ("", ['runner.output_dir="a\\0b"'], "runner.output_dir", "contains a NUL"),
        ("", ["runner.output_dir=a\udc80b"], "config", "cannot be printed"),
        ("", [f"env.kwargs={'[' * 1000}{']' * 1000}"], "env.kwargs", "more than 50 sections and lists"),
        ("", ["env.kwargs." + ".".join("a" * 1000) + "=1"], "config", "more than 50 sections"),
        (BOMB, [], "config", "more than 500000 characters"),
        ("[" * 1000, [], "config", "more than 50 sections and lists"),
        ("extends: /dev/zero\n", [], "extends", "it is no regular file"),
        ("extends: fifo\n", [], "extends", "it is no regular file"),
        ("extends: huge\n", [], "extends", "larger than 200000 bytes"),
        ("extends: .\n", [], "extends", "Is a directory"),
        ('extends: "a\\0b"\n', [], "extends", "contains a NUL"),
        ("extends: other.yaml\n", [], "extends", "in a circle"),
    ],
)
@pytest.mark.slow
def test_what_would_not_end_is_refused(command, folder: Path, text: str, overrides: list[str], key: str, reason: str):
    os.mkfifo(folder / "fifo")
    (folder / "huge").write_bytes(b"a" * 200_001)
    (folder / "embodied.yaml").write_text(text + (folder / "embodied.yaml").read_text())
    (folder / "other.yaml").write_text("extends: embodied.yaml\n")
    begun = time.process_time()
    ended = command("embodied.yaml", "--print-config", *overrides)
    assert ended.code == 2, ended.err
    assert f"{key}: " in ended.err
    assert reason in ended.err
    assert "Traceback" not in ended.err
    assert time.process_time() - begun < 3


def test_a_command_places_its_components_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    placed = list[object]()

    def counted(*arguments: Any) -> object:
        placed.append(schedule(*arguments))
        return placed[-1]

    monkeypatch.setattr(placed_config, "schedule", counted)
    assert [placed_config.load("embodied.yaml", []).placement] == placed


def test_a_node_group_without_the_workers_that_others_have(command):
    groups = 'cluster.node_groups=[{label: a, node_ranks: "0", accelerators: 0}]'
    ended = command("embodied.yaml", "--plan", "cluster.devices_per_node=1", groups)
    assert ended.code == 0, ended.err
