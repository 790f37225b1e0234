"""The pretended device, and one process of Megatron for all tests of this folder."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from device_rehearsal.pretended_device import Device, pretended_device

from rl_platform.acceleration import accelerating


@pytest.fixture(autouse=True)
def _plain() -> Iterator[None]:
    """Compiled code is for CPUs only, so the CPU computes without it too."""
    with accelerating("off"):
        yield


@pytest.fixture
def device() -> Iterator[Device]:
    with pretended_device() as made:
        yield made


@pytest.fixture(scope="session")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `megatron_rehearsal.py` writes."""
    path = tmp_path_factory.mktemp("megatron") / "report.pt"
    script = Path(__file__).parent / "megatron_rehearsal.py"
    command = [sys.executable, "-W", "ignore", str(script), str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    report: dict[str, Any] = torch.load(path)
    return report
