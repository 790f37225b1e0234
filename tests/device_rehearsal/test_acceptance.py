"""Parts of `benchmarks/gpu.py` in small, on the pretended device: nothing in them is left on the CPU.

Not covered: parts that start processes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from device_rehearsal.acceptance_parts import BENCHMARKS, REHEARSED, figures_of
from device_rehearsal.pretended_device import Device


@pytest.mark.parametrize("name", REHEARSED)
def test_part(name: str, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    found = figures_of(name, tmp_path)
    assert found
    assert all(one["met"] is not False for one in found)
    assert device.counts.launches
