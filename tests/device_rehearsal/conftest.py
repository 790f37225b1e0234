"""The pretended device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
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
