"""Runs a part of `benchmarks/gpu.py` in small on the pretended device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from device_rehearsal.pretended_device import CUDA
from device_rehearsal.runs import sharing_short_prefixes

REHEARSED = "offload", "weights", "rollout", "attention", "equality", "training-fsdp"
BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


def figures_of(name: str, folder: Path) -> list[dict[str, Any]]:
    """Returns the numbers that a part reports. The pretended device must be there, and BENCHMARKS on the path;
    `folder` is empty."""
    from gpu_parts.part import Report, Setup
    from gpu_parts.table import PARTS

    class Pretended(Setup):
        device = CUDA

    (part,) = [part for part in PARTS if part.name == name]
    figures = folder / "figures.jsonl"
    with sharing_short_prefixes():
        part.measure(Pretended(small=True, folder=folder), Report(figures, small=True))
    return [json.loads(line) for line in figures.read_text().splitlines()]
