"""A console script in a process of its own: modules of the start folder are found, and the run goes on although nobody
reads the output (a closed pipe, a full disk, descriptors that were closed before the start).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl_platform.metrics import read_metrics

CODE = "from rl_platform.launch.cli import main; main()"
TOOLS = "from rl_platform.launch.cli import tools; tools()"
STEPS = 3
ENVIRONMENT = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

class MyCartPole(CartPoleEnv):
    pass

gymnasium.register("MyCartPole-v0", entry_point=MyCartPole, max_episode_steps=50)
"""


def shell(line: str, *words: str) -> subprocess.CompletedProcess[str]:
    """`line` in bash, where "$@" is Python with these words; its exit code is that of the first in a pipe."""
    script = f"{line}; exit ${{PIPESTATUS[0]}}"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    command = ["bash", "-c", script, "bash", sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ('"$@" > /dev/full 2>&1', "env.num_workers=0"),
        ('"$@" >&- 2>&- <&-', "env.num_workers=2"),
        ('"$@" | head -n 1', "cluster.runtime=ray"),
        ('PYTHONIOENCODING=ascii "$@"', "env.num_workers=0"),
    ],
    ids=["full disk", "closed descriptors", "closed pipe, on Ray", "an encoding without its characters"],
)
def test_training_goes_on_without_a_reader_and_finds_modules_of_the_start_folder(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, line: str, key: str
):
    """sys.path of a console script begins with the script's own folder."""
    (folder / "my_envs.py").write_text(ENVIRONMENT)
    script = tmp_path_factory.mktemp("bin") / "platform-launch"
    script.write_text(CODE)
    ended = shell(line, str(script), "embodied.yaml", "env.id=my_envs:MyCartPole-v0", f"runner.max_steps={STEPS}", key)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    assert [row["step"] for row in read_metrics(folder / "out")] == list(range(STEPS + 1))
    assert (folder / "out/finished").exists()


def test_a_reward_may_print_although_the_pipe_is_closed(folder: Path):
    function = "def score(response, answer, metadata):\n    print('x' * 100_000, flush=True)\n    return 1.0\n"
    (folder / "wordy.py").write_text(function)
    words = "reasoning.yaml", "runner.max_steps=1", "reward.type=wordy:score"
    ended = shell('"$@" | head -c 1', "-c", CODE, *words)
    assert ended.returncode == 0, ended.stderr
    assert read_metrics(folder / "out")[-1].get("reward/unscored", 0) == 0


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([CODE, "embodied.yaml", "--print-config"], '"$@" > /dev/full'),
        ([TOOLS, "keys"], '"$@" | true'),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value[1:]),
)
def test_a_command_ends_quietly_without_a_reader(folder: Path, words: list[str], line: str):
    ended = shell(line, "-c", *words)
    assert (ended.returncode, ended.stderr) == (0, "")
