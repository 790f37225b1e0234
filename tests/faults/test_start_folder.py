"""A console script is started: sys.path begins with its own folder, and modules of the start folder are still found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ENVIRONMENT = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

class MyCartPole(CartPoleEnv):
    pass

gymnasium.register("MyCartPole-v0", entry_point=MyCartPole, max_episode_steps=50)
"""
SCRIPT = "import sys\nfrom rl_platform.launch.cli import main\nsys.exit(main())\n"


@pytest.mark.parametrize("keys", [["env.num_workers=0"], ["env.num_workers=2"], ["cluster.runtime=ray"]])
def test_an_environment_of_the_start_folder_is_found(folder: Path, tmp_path_factory, keys: list[str]) -> None:
    (folder / "my_envs.py").write_text(ENVIRONMENT)
    script = tmp_path_factory.mktemp("bin") / "platform-launch"
    script.write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        str(script),
        "embodied.yaml",
        "env.id=my_envs:MyCartPole-v0",
        "runner.max_steps=1",
        *keys,
    ]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert (folder / "out" / "metrics.jsonl").exists()
