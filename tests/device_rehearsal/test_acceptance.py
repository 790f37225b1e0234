"""Parts of `benchmarks/gpu.py` in small, on the pretended device: nothing in them is left on the CPU.

Not covered: parts that start processes, and `training-*`, whose engines `test_engines.py` tests.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from device_rehearsal.pretended_device import CUDA, Device
from device_rehearsal.runs import sharing_short_prefixes

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("name", ["offload", "weights", "rollout", "attention", "equality"])
def test_part(name: str, device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    from gpu_parts.part import Report, Setup
    from gpu_parts.table import PARTS

    class Pretended(Setup):
        device = CUDA

    (part,) = [part for part in PARTS if part.name == name]
    figures = tmp_path / "figures.jsonl"
    with sharing_short_prefixes():
        part.measure(Pretended(small=True, folder=tmp_path), Report(figures, small=True))
    found: list[dict[str, Any]] = [json.loads(line) for line in figures.read_text().splitlines()]
    assert found
    assert all(one["met"] is not False for one in found)
    assert device.counts.launches
