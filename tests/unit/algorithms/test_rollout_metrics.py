from __future__ import annotations

import math

import pytest
import torch
from neutral_batches import neutral_batch

from rl_platform.algorithms.rewards import place_outcome_rewards
from rl_platform.algorithms.rollout_metrics import rollout_metrics
from rl_platform.records import RolloutBatch

MASK = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)


def make_batch() -> RolloutBatch:
    """The last row does not count; whatever is not active is NaN."""
    nan = float("nan")
    values = torch.tensor([[nan, 1, 1, 3], [3, 3, nan, nan], [nan] * 4])
    returns = torch.tensor([[nan, 1, 2, 3], [4, 4, nan, nan], [nan] * 4])
    return neutral_batch(
        MASK,
        sample_mask=torch.tensor([True, True, False]),
        rewards=place_outcome_rewards(torch.tensor([1.0, -2.0, 100.0]), MASK),
        log_probs=torch.full((3, 4), 0.5),
        values=values,
        returns=returns,
        advantages=returns - values,
    )


def test_reasoning_rollout() -> None:
    metrics = rollout_metrics(make_batch())
    expected = {
        "batch/active_positions": 5.0,
        "reward/mean": -0.5,
        "reward/min": -2.0,
        "reward/max": 1.0,
        "len/response_mean": 2.5,
        "len/response_min": 2.0,
        "len/response_max": 3.0,
        "adv/mean": 3 / 5,
        "adv/min": 0.0,
        "adv/max": 1.0,
        "adv/std": 0.3**0.5,
        "critic/returns_mean": 14 / 5,
        "critic/returns_min": 1.0,
        "critic/returns_max": 4.0,
        "critic/values_mean": 11 / 5,
        "critic/values_min": 1.0,
        "critic/values_max": 3.0,
        "critic/explained_var": 1 - 0.24 / 1.36,
        "critic/explained_var_valid": 1.0,
        "mismatch/prob_error": 1.648721,
        "mismatch/abs_logp": 0.5,
        "mismatch/kl": -0.5,
        "mismatch/k3": 0.148721,
        "mismatch/prob_diff_mean": 0.648721,
        "mismatch/prob_diff_max": 0.648721,
        "mismatch/chi2_token": 1.718282,
        "mismatch/chi2_seq": (math.exp(3.0) + math.exp(2.0)) / 2 - 1,
        "mismatch/ppl_ratio": 0.606531,
        "mismatch/seq_prob_error_max": 1.648721,
        "mismatch/seq_prob_error_mean": 1.648721,
        "mismatch/seq_prob_error_min": 1.648721,
    }
    assert metrics == pytest.approx(expected, rel=1e-5)


def test_embodied_rewards_are_per_step() -> None:
    batch = make_batch()
    batch.ends, batch.end_values = torch.zeros_like(MASK), torch.zeros(MASK.shape)
    metrics = rollout_metrics(batch)
    assert metrics["reward/mean"] == pytest.approx(-1 / 5)
    assert not any(name.startswith("len/") for name in metrics)
    assert "mismatch/k3" in metrics
    assert "mismatch/ppl_ratio" not in metrics  # actions are no tokens: their density may be above 1


def test_nothing_active_is_reported_not_invented() -> None:
    batch = make_batch()
    batch.sample_mask[:] = False
    metrics = rollout_metrics(batch)
    assert metrics["batch/active_positions"] == 0.0
    assert metrics["critic/explained_var_valid"] == 0.0
    assert "reward/mean" not in metrics
    assert all(value == value for value in metrics.values())
