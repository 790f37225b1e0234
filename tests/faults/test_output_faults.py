"""Nobody reads the output: a closed pipe, a full disk, descriptors that were closed before the start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl_platform.metrics import read_metrics

CODE = "from rl_platform.launch.cli import main; main()"
TOOLS = "from rl_platform.launch.cli import tools; tools()"
STEPS = 6


def shell(line: str, *arguments: str, code: str = CODE) -> subprocess.CompletedProcess[str]:
    """`line` in bash, where "$@" is the command with these arguments; its exit code is that of the first in a pipe."""
    words = [sys.executable, "-c", code, *arguments]
    script = f"{line}; exit ${{PIPESTATUS[0]}}"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        ["bash", "-c", script, "bash", *words], capture_output=True, text=True, check=False, env=environment
    )


def assert_complete(folder: Path) -> None:
    assert [row["step"] for row in read_metrics(folder / "out")] == list(range(STEPS + 1))
    assert (folder / "out/finished").exists()


@pytest.mark.parametrize(
    "line",
    ['"$@" | head -n 1', '"$@" > /dev/full 2>&1', '"$@" >&- 2>&- <&-'],
    ids=["closed pipe", "full disk", "closed descriptors"],
)
def test_training_goes_on_without_a_reader(folder: Path, line: str):
    ended = shell(line, "embodied.yaml", f"runner.max_steps={STEPS}", "env.num_workers=2")
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    assert_complete(folder)


def test_training_on_ray_goes_on_without_a_reader(folder: Path):
    ended = shell('"$@" | head -n 1', "embodied.yaml", f"runner.max_steps={STEPS}", "cluster.runtime=ray")
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    assert_complete(folder)


def test_a_reward_may_print_although_the_pipe_is_closed(folder: Path):
    function = "def score(response, answer, metadata):\n    print('x' * 100_000, flush=True)\n    return 1.0\n"
    (folder / "wordy.py").write_text(function)
    ended = shell('"$@" | head -c 1', "reasoning.yaml", "runner.max_steps=1", "reward.type=wordy:score")
    assert ended.returncode == 0, ended.stderr
    assert read_metrics(folder / "out")[-1].get("reward/unscored", 0) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["embodied.yaml", "--plan"],
        ["embodied.yaml", "--print-config"],
        ["embodied.yaml", "--check"],
    ],
    ids=" ".join,
)
def test_a_command_ends_quietly_without_a_reader(folder: Path, arguments: list[str]):
    for line in ('"$@" | true', '"$@" > /dev/full'):
        ended = shell(line, *arguments)
        assert ended.returncode == 0, ended.stderr
        assert ended.stderr == ""


@pytest.mark.parametrize("arguments", [["--help"], ["plot", "--help"], ["keys"]], ids=" ".join)
def test_a_tool_ends_quietly_without_a_reader(arguments: list[str]):
    for line in ('"$@" | true', '"$@" > /dev/full'):
        ended = shell(line, *arguments, code=TOOLS)
        assert ended.returncode == 0, ended.stderr
        assert ended.stderr == ""
