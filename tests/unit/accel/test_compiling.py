"""Machine code of compiled loops is stored with other cached files, and counts only for unchanged sources."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl_platform.accel import decode_kernel, tensor_loops
from rl_platform.accel.compiling import sources_of

CODE = """
import numpy as np
from rl_platform.accel.normalizing_loops import normalize_rows
out = np.empty((2, 3), np.float32)
normalize_rows()(np.ones((2, 3)), np.zeros(3), np.ones(3), 10.0, out)
assert abs(out - 1).max() < 1e-6
stats = normalize_rows().stats
print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()), stats.cache_path)
"""


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    environment["RL_PLATFORM_CACHE"] = str(tmp_path)
    command = [sys.executable, "-c", CODE]
    (hits, misses, folder), second = (
        subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.split()
        for _ in range(2)
    )
    assert (hits, misses) == ("0", "1")
    assert Path(folder).parent == tmp_path / "loops"
    assert second == ["1", "0", folder]


def test_other_sources_are_another_stamp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop's machine code has parts of the modules that it imports functions from."""
    before, unrelated = sources_of(decode_kernel.__name__), sources_of("rl_platform.accel.compiling")
    (tmp_path / "changed.py").write_text("changed")
    monkeypatch.setattr(tensor_loops, "__file__", str(tmp_path / "changed.py"))
    assert sources_of(decode_kernel.__name__) != before
    assert sources_of("rl_platform.accel.compiling") == unrelated
