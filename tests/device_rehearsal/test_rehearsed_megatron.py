"""Megatron on the pretended device: its numbers, its costs and the parts of `benchmarks/gpu.py` with it.

One process trains for all tests here.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from device_rehearsal.costs import check
from device_rehearsal.runs import assert_same


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `megatron_rehearsal.py` writes."""
    path = tmp_path_factory.mktemp("megatron") / "report.pt"
    script = Path(__file__).parent / "megatron_rehearsal.py"
    command = [sys.executable, "-W", "ignore", str(script), str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    report: dict[str, Any] = torch.load(path)
    return report


@pytest.mark.parametrize("case", ["actor", "critic", "recomputed", "bfloat16"])
def test_megatron(megatron: dict[str, Any], case: str) -> None:
    assert_same(megatron["pretended"][case], megatron["cpu"][case])


@pytest.mark.parametrize("name", ["megatron", "megatron recomputed"])
def test_costs_of_megatron(megatron: dict[str, Any], name: str) -> None:
    check(name, megatron["costs"][name])


@pytest.mark.parametrize("name", ["training-megatron", "equality-megatron"])
def test_part_with_megatron(name: str, megatron: dict[str, Any]) -> None:
    assert megatron["parts"][name]
    assert all(one["met"] is not False for one in megatron["parts"][name])
