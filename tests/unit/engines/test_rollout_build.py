"""The type of numbers that the built-in engine generates with, and how many processes can share a model of SGLang's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rl_platform.engines.rollout.build import check_ranks, generation_dtype
from rl_platform.errors import ConfigError

CPU = torch.device("cpu")


def test_float32_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert generation_dtype("float32", CPU) is torch.float32


@pytest.mark.parametrize("faster", [True, False])
def test_bfloat16_only_where_it_is_faster(faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: faster)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert generation_dtype("bfloat16", CPU) is (torch.bfloat16 if faster else torch.float32)


@pytest.mark.parametrize(("heads", "key_heads", "ranks"), [(8, 8, 4), (8, 2, 4), (9, 3, 3), (14, 2, 2), (9, 3, 1)])
def test_ranks_that_can_share_the_heads(heads: int, key_heads: int, ranks: int) -> None:
    check_ranks(SimpleNamespace(num_attention_heads=heads, num_key_value_heads=key_heads), ranks)


@pytest.mark.parametrize(("heads", "key_heads", "ranks"), [(9, 3, 2), (8, 8, 3), (12, 4, 6)])
def test_ranks_that_cannot_are_told_before_anything_starts(heads: int, key_heads: int, ranks: int) -> None:
    with pytest.raises(ConfigError) as caught:
        check_ranks(SimpleNamespace(num_attention_heads=heads, num_key_value_heads=key_heads), ranks)
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("rollout.tensor_parallel_size", str(ranks))
    assert f"cannot share {heads} heads" in problem.message
