"""`mypy --strict` on the package, but for some folders.

mypy cannot follow the folder mapping of an editable install, so it is shown a copy laid out as the installed package.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from as_installed import lay_out

ROOT = Path(__file__).parents[2]
LOOSE = (  # files that do not promise it
    "accel/**/*.py",
    "engines/rollout/sglang/**/*.py",
    "engines/training/megatron/**/*.py",
    "envs/embodied/mujoco/**/*.py",
    "envs/embodied/suites/**/*.py",
    "envs/reasoning/sandbox/**/*.py",
    "models/policies/**/*.py",
    "models/vlas/**/*.py",
)
CLIENT = """
import rl_platform as rl
run: rl.Run = rl.train("x.yaml", {"runner.seed": 2}, [rl.callbacks.StopAt("val/return", 5000)])
print(run.metrics["step"].sum(), rl.plan({}).data["version"], rl.evaluate(run)[0])
rl.trian
"""


def test_strict_types(tmp_path: Path) -> None:
    lay_out(tmp_path)
    (tmp_path / "client.py").write_text(CLIENT)
    loose = {path for pattern in LOOSE for path in (tmp_path / "rl_platform").glob(pattern)}
    command = [sys.executable, "-m", "mypy", "--config-file", str(Path(__file__).with_name("mypy.ini"))]
    command += ["--cache-dir", str(ROOT / ".mypy_cache")]
    command += [str(path.relative_to(tmp_path)) for path in sorted({*tmp_path.rglob("*.py")} - loose)]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    told = 'client.py:5: error: Module has no attribute "trian"  [attr-defined]'
    assert [line for line in found.stdout.splitlines() if " error: " in line] == [told], found.stdout + found.stderr
