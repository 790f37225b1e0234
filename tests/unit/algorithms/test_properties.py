"""Properties that belong to no single function."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl_platform.algorithms.advantages import advantages
from rl_platform.algorithms.kl import sequence_mean_kl
from rl_platform.algorithms.rewards import penalize_kl, place_outcome_rewards
from rl_platform.algorithms.variants.importance_weights import mismatch_weights
from rl_platform.config.schema.algorithm import ESTIMATORS, Algorithm, RolloutIS
from rl_platform.records import RolloutBatch


def with_gaps(tensor: Tensor, gaps: list[int]) -> Tensor:
    """[B,T] with as many columns of NaN (of False, for masks) in front of each column as `gaps` says."""
    filling = False if tensor.dtype == torch.bool else math.nan
    columns: list[Tensor] = []
    for column, gap in zip(tensor.unbind(dim=1), gaps, strict=True):
        columns += [torch.full_like(column, filling)] * gap + [column]
    return torch.stack(columns, dim=1)


@pytest.mark.parametrize("adv_type", ESTIMATORS)
@settings(max_examples=15)
@given(seed=st.integers(0, 1000), gaps=st.lists(st.integers(0, 2), min_size=6, max_size=6))
def test_observation_tokens_change_neither_kl_nor_advantages_nor_returns(
    adv_type: str, seed: int, gaps: list[int]
) -> None:
    """Through reward placement, the KL penalty and the estimator, with NaN for everything said about observations."""
    numbers = torch.Generator().manual_seed(seed)
    mask = torch.rand(5, 6, generator=numbers) < 0.7
    mask[:, 2] = True
    scores = torch.randn(5, generator=numbers)
    log_probs, reference, values = (torch.randn(5, 6, generator=numbers) for _ in range(3))
    probs, baselines = torch.rand(5, 6, generator=numbers), torch.randn(5, generator=numbers)

    def estimate(widen: Any) -> tuple[float, Tensor, Tensor | None]:
        wide = widen(mask)
        placed = place_outcome_rewards(scores, wide)
        rewards, kl = penalize_kl(placed, widen(log_probs), widen(reference), wide, 0.1, "k3")
        batch = RolloutBatch({}, wide, torch.ones(5, dtype=torch.bool), torch.arange(5) // 2, rewards, placed)
        models = {"values": values, "log_probs": probs.log(), "squared_probs": probs.square()}
        batch = replace(batch, baselines=baselines, **{name: widen(tensor) for name, tensor in models.items()})
        found, returns = advantages(batch, Algorithm(adv_type=adv_type, gamma=0.9))
        assert not found[~wide].any()
        return sequence_mean_kl(kl, wide), found[wide], None if returns is None else returns[wide]

    narrow, wide = estimate(lambda tensor: tensor), estimate(lambda tensor: with_gaps(tensor, gaps))
    assert wide[0] == pytest.approx(narrow[0], rel=1e-6)
    torch.testing.assert_close(wide[1], narrow[1], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(wide[2], narrow[2], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence"])
@settings(max_examples=25)
@given(seed=st.integers(0, 1000))
def test_truncation_without_bounds_is_plain_importance_sampling(level: str, seed: int) -> None:
    numbers = torch.Generator().manual_seed(seed)
    mask = torch.rand(4, 5, generator=numbers) < 0.7
    log_probs, rollout_log_probs = (torch.randn(4, 5, generator=numbers) for _ in range(2))
    correction = RolloutIS(mode="truncate", level=level, low=0.0, high=None)
    u = torch.where(mask, log_probs - rollout_log_probs, 0.0)
    expected = (u if level == "token" else u.sum(dim=1, keepdim=True).expand_as(u)).exp()
    found = mismatch_weights(log_probs, rollout_log_probs, mask, correction)[0]
    torch.testing.assert_close(found, torch.where(mask, expected, 0.0))
