"""Devices whose speed and memory plans are estimated with."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from rl_platform.config.schema.cluster import GPU
from rl_platform.placement.estimates import hardware
from rl_platform.placement.estimates.hardware import GPUS, _core, device_of
from rl_platform.placement.inventory import Inventory


def test_cpu_workers_share_what_their_node_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_platform.placement.inventory.detect_accelerators", lambda: ((), ""))
    whole, shared = device_of(Inventory.detected(1)), device_of(Inventory.emulated(1, 4))
    assert (whole.kind, shared.kind) == ("cpu", "cpu")
    assert whole.memory is not None
    assert shared.memory == whole.memory // 4
    assert shared.fp32 == pytest.approx(whole.fp32 / 4)


@pytest.mark.parametrize(
    ("line", "kind", "memory"),
    [
        ("NVIDIA H100 80GB HBM3, 81559", "h100", 79),
        ("NVIDIA A100-SXM4-80GB, 81920", "a100-80gb", 79),
        ("NVIDIA A100-PCIE-40GB, 40960", "a100-40gb", 39),
        ("NVIDIA GeForce RTX 4090, 24564", "rtx4090", 23),
        ("NVIDIA L40S, 46068", "l40s", 44),
        ("NVIDIA RTX 2000 Ada, 16384", "NVIDIA RTX 2000 Ada", 16),
    ],
)
def test_gpus_of_this_machine_are_known_by_their_drivers_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, kind: str, memory: int
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\ncase "$1" in *name*) echo "{line}";; *) echo 0;; esac\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    device = device_of(Inventory.detected())
    assert device.kind == kind
    assert device.memory == memory * 2**30
    assert device.known == (kind in line.lower() or kind != line.partition(",")[0])


def test_every_kind_of_gpu_of_the_schema_is_known() -> None:
    assert set(get_args(GPU)) == set(GPUS)
    for device in GPUS.values():
        assert device.fp32 < device.bf16
        assert device.network <= device.link < device.hbm


@pytest.mark.parametrize(
    ("facts", "gigaflops", "times"),
    [
        ({"flags": "sse2 avx2 fma avx512f avx512_bf16 amx_bf16", "cpu MHz": "2000"}, 128, 16),
        ({"flags": "sse2 avx2 avx512f", "siblings": "8", "cpu cores": "4", "cpu MHz": "2000"}, 64, 1),
        (
            {"vendor_id": "AuthenticAMD", "cpu family": "25", "flags": "avx2 avx512f avx512_bf16", "cpu MHz": "2600"},
            83.2,
            2,
        ),
        ({"flags": "sse2 avx2", "cpu MHz": "3000"}, 96, 1),
        ({"Features": "fp asimd"}, 40, 1),
        ({"model name": "unknown"}, 80, 1),
        ({"flags": "avx2", "cpu MHz": "?"}, 80, 1),
    ],
)
def test_the_peak_of_a_core_follows_from_its_flags_and_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts: dict[str, str], gigaflops: float, times: int
) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(
        "".join(f"{name}\t: {value}\n" for name, value in facts.items()) + "\nprocessor : 1\nflags : sse2\n"
    )
    monkeypatch.setattr(hardware, "CPUINFO", file)
    _core.cache_clear()
    try:
        assert _core() == (pytest.approx(gigaflops * 1e9), times)
    finally:
        _core.cache_clear()
