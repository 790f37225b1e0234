"""`mypy --strict` on the packages that promise it.

mypy cannot follow the folder mapping of an editable install, so it is shown a copy laid out as the installed package.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from as_installed import lay_out

ROOT = Path(__file__).parents[2]
STRICT = ("rl_platform.algorithms", "rl_platform.placement", "rl_platform.config")


def test_strict_types(tmp_path: Path) -> None:
    lay_out(tmp_path)
    command = [sys.executable, "-m", "mypy", "--config-file", str(Path(__file__).with_name("mypy.ini"))]
    command += ["--cache-dir", str(ROOT / ".mypy_cache"), *(option for name in STRICT for option in ("-p", name))]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
