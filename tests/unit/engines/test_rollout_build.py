"""The type of numbers that the built-in engine generates with."""

from __future__ import annotations

import pytest
import torch

from rl_platform.engines.rollout.build import generation_dtype

CPU = torch.device("cpu")


def test_float32_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert generation_dtype("float32", CPU) is torch.float32


@pytest.mark.parametrize("faster", [True, False])
def test_bfloat16_only_where_it_is_faster(faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: faster)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert generation_dtype("bfloat16", CPU) is (torch.bfloat16 if faster else torch.float32)
