"""The idle time that `.ci/run` prints."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "run"
FUNCTIONS = "source <(sed -n '/^ticks()/,/^}/p; /^idle_since()/,/^}/p' \"$1\")\n"
READS = 'awk() { if [[ $1 == -v ]]; then command awk "$@"; else command awk "$1" "$stat"; fi; }\n'


@pytest.mark.parametrize("passed", [1000, 30_000_000_000])
def test_idle_time_of_a_machine_that_has_run_for_long(passed: int, tmp_path: Path) -> None:
    """Ticks beyond 2^31 keep all their digits. A quarter of the 400 new ones is idle."""
    for name, idle, user in (("before", passed, passed), ("after", passed + 100, passed + 300)):
        (tmp_path / name).write_text(f"cpu  {user} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n")
    script = FUNCTIONS + READS + 'stat=before; began=$(ticks); stat=after; idle_since "$began"'
    command = ["bash", "-c", script, "bash", str(SCRIPT)]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert printed == " 25 % idle"
