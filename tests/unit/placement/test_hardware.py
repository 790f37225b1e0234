"""Devices whose speed and memory plans are estimated with."""

from __future__ import annotations

import pytest

from rl_platform.placement.hardware import device_of
from rl_platform.placement.inventory import Inventory


def test_cpu_workers_share_what_their_node_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_platform.placement.inventory.detect_accelerators", lambda: ((), ""))
    whole, shared = device_of(Inventory.detected(1)), device_of(Inventory.emulated(1, 4))
    assert (whole.kind, shared.kind) == ("cpu", "cpu")
    assert whole.memory is not None
    assert shared.memory == whole.memory // 4
    assert shared.fp32 == pytest.approx(whole.fp32 / 4)
