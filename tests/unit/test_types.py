"""`mypy --strict` on the packages that promise it.

mypy cannot follow the folder mapping of an editable install, so it is shown a copy laid out as the installed package.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from as_installed import lay_out

ROOT = Path(__file__).parents[2]
FOLDERS = {  # of which the modules are strict, but not all of their subfolders
    "rl_platform": "platform",
    "rl_platform.engines.rollout": "platform/engines/rollout",
    "rl_platform.engines.training": "platform/engines/training",
    "rl_platform.envs.embodied": "envs/embodied",
    "rl_platform.envs.reasoning": "envs/reasoning",
    "rl_platform.launch": "launch",
    "rl_platform.models": "platform/models",
}
MODULES = [f"{package}.{path.stem}" for package, folder in FOLDERS.items() for path in (ROOT / folder).glob("[!_]*.py")]
API = ("rl_platform", *(f"rl_platform.{path.stem}" for path in (ROOT / "api").glob("[!_]*.py")))
CLIENT = """
import rl_platform as rl
run: rl.Run = rl.train("x.yaml", {"runner.seed": 2}, [rl.callbacks.StopAt("val/return", 5000)])
print(run.metrics["step"].sum(), rl.plan({}).data["version"], rl.evaluate(run)[0])
rl.trian
"""
STRICT = (
    "rl_platform.algorithms",
    "rl_platform.checkpoint",
    "rl_platform.components",
    "rl_platform.config",
    "rl_platform.engines.offloading",
    "rl_platform.engines.rollout.hosted",
    "rl_platform.engines.rollout.stopping",
    "rl_platform.engines.rollout.user_engines",
    "rl_platform.engines.rollout.vllm",
    "rl_platform.envs.embodied.build_problems",
    "rl_platform.envs.embodied.pictures",
    "rl_platform.envs.embodied.processes",
    "rl_platform.envs.embodied.remote",
    "rl_platform.envs.embodied.saved_states",
    "rl_platform.envs.embodied.user_envs",
    "rl_platform.envs.reasoning.answers",
    "rl_platform.envs.reasoning.servers",
    "rl_platform.envs.reasoning.sources",
    "rl_platform.launch.card",
    "rl_platform.launch.check",
    "rl_platform.launch.jobs",
    "rl_platform.launch.plans",
    "rl_platform.launch.reallocation",
    "rl_platform.launch.rehearse",
    "rl_platform.launch.replay",
    "rl_platform.launch.saved",
    "rl_platform.launch.start_checks",
    "rl_platform.launch.tools",
    "rl_platform.launch.views",
    "rl_platform.models.adapters",
    "rl_platform.models.context",
    "rl_platform.models.experts",
    "rl_platform.models.pretrained",
    "rl_platform.placement",
    "rl_platform.planner",
    "rl_platform.python",
    "rl_platform.runners",
    "rl_platform.runtime",
    "rl_platform.trackers",
)


def test_strict_types(tmp_path: Path) -> None:
    lay_out(tmp_path)
    command = [sys.executable, "-m", "mypy", "--config-file", str(Path(__file__).with_name("mypy.ini"))]
    command += ["--cache-dir", str(ROOT / ".mypy_cache"), *(option for name in STRICT for option in ("-p", name))]
    command += [option for name in (*API, *MODULES, "client") for option in ("-m", name)]
    (tmp_path / "client.py").write_text(CLIENT)
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    told = 'client.py:5: error: Module has no attribute "trian"  [attr-defined]'
    assert [line for line in found.stdout.splitlines() if " error: " in line] == [told], found.stdout + found.stderr
