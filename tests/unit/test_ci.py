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


@pytest.mark.parametrize("found", [True, False])
def test_the_torch_of_gpus_is_tested_where_an_index_has_its_build_for_cpus(found: bool, tmp_path: Path) -> None:
    function = "source <(sed -n '/^gpu_set_tests()/,/^}/p' \"$1\")\n"
    stubs = f'pip_install() {{ echo "$@" >> asked; {str(found).lower()}; }}\nstage() {{ echo "$2" >> stages; }}\n'
    (tmp_path / "constraints").mkdir()
    (tmp_path / "constraints/gpu.txt").write_text("torchaudio==1.0\ntorch==2.14.1\n")
    command = ["bash", "-ec", function + stubs + "work=$PWD; gpu_set_tests", "bash", str(SCRIPT)]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert (tmp_path / "asked").read_text() == f"{tmp_path}/checkout/.venv/bin/python --dry-run torch==2.14.1+cpu\n"
    if found:
        installed, tested = (tmp_path / "stages").read_text().splitlines()
        assert "-c constraints/gpu.txt 'torch==2.14.1+cpu'" in installed
        assert tested.endswith("tests/unit/engines tests/unit/models tests/device_rehearsal")
    else:
        assert not (tmp_path / "stages").exists()
        assert "left out, no index has torch==2.14.1+cpu" in printed + (tmp_path / "timings").read_text()
