"""Estimators without a critic: goldens, and what must not change them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl_platform.algorithms.advantages import FUNCTIONS, advantages
from rl_platform.algorithms.groups import grpo, reward_to_go, rloo
from rl_platform.algorithms.rewards import place_outcome_rewards
from rl_platform.config.algorithm import Algorithm
from rl_platform.config.estimators import ESTIMATORS
from rl_platform.errors import Diverged
from rl_platform.records import RolloutBatch

NAN = float("nan")
SCORES = torch.tensor([1.0, 0, 0, 1, 0.5, 0.5, 0.5, 0.5, 1, 0, 0, 0, 3])
GROUPS = torch.tensor([7, 7, 7, 7, 2, 2, 2, 2, 9, 9, 9, 9, 4])


def close(actual: Tensor, expected: Tensor | list[float]) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=1e-5, atol=1e-6)


def batch_of(scores: Tensor, mask: Tensor, group_ids: Tensor, **fields: Any) -> RolloutBatch:
    rewards = torch.where(mask, place_outcome_rewards(scores, mask), NAN)
    everything = {"sample_mask": torch.ones(len(mask), dtype=torch.bool)} | fields
    return RolloutBatch(
        inputs={},
        action_mask=mask,
        group_ids=group_ids,
        rewards=rewards,
        rollout_log_probs=torch.zeros(mask.shape),
        **everything,
    )


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            {"adv_type": "grpo"},
            [0.866024, -0.866024, -0.866024, 0.866024, 0, 0, 0, 0, 1.499997, -0.499999, -0.499999, -0.499999, 0],
        ),
        (
            {"adv_type": "grpo", "grpo_std_normalization": False},
            [0.5, -0.5, -0.5, 0.5, 0, 0, 0, 0, 0.75, -0.25, -0.25, -0.25, 0],
        ),
        (
            {"adv_type": "rloo"},
            [0.666667, -0.666667, -0.666667, 0.666667, 0, 0, 0, 0, 1, -0.333333, -0.333333, -0.333333, 0],
        ),
    ],
)
def test_groups(keys: dict[str, Any], expected: list[float]) -> None:
    mask = torch.rand(13, 6, generator=torch.Generator().manual_seed(0)) < 0.5
    mask[:, 2] = True
    estimated, returns = advantages(batch_of(SCORES, mask, GROUPS), Algorithm(**keys))
    assert returns is None
    close(estimated, torch.where(mask, torch.tensor(expected)[:, None], 0.0))


def test_scores_that_differ_by_rounding_only_give_exactly_zero() -> None:
    mask = torch.ones(8, 1, dtype=torch.bool)
    assert not grpo(torch.full((8, 1), 0.1), mask, torch.zeros(8, dtype=torch.int64)).any()


def test_rows_that_do_not_count_stay_out_of_their_group() -> None:
    mask, groups = torch.ones(3, 2, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)
    counted = torch.tensor([True, True, False])
    batch = batch_of(torch.tensor([1.0, 0.0, 100.0]), mask, groups, sample_mask=counted)
    estimated, _ = advantages(batch, Algorithm(adv_type="grpo", grpo_std_normalization=False))
    close(estimated[:, 0], [0.5, -0.5, 0.0])
    batch.sample_mask[1] = False
    assert not advantages(batch, Algorithm(adv_type="rloo"))[0].any()


@pytest.mark.parametrize(
    ("gamma", "first", "second"),
    [(1.0, [0.730297] * 3, [-1.095445] * 2), (0.9, [0.536730, 0.716976, 0.917248], [-1.085477] * 2)],
)
def test_reinforce_plus_plus(gamma: float, first: list[float], second: list[float]) -> None:
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]], dtype=torch.bool)
    batch = batch_of(torch.tensor([1.0, 0.0]), mask, torch.arange(2))
    close(advantages(batch, Algorithm(adv_type="reinforce_plus_plus", gamma=gamma))[0], [first, [*second, 0]])


@pytest.mark.parametrize(("gamma", "expected"), [(1.0, [1, 1, 0, 0, 1, 1]), (0.5, [0.125, 0.25, 0, 0, 0.5, 1])])
def test_reward_to_go_passes_observations(gamma: float, expected: list[float]) -> None:
    mask = torch.tensor([[1, 1, 0, 0, 1, 1]], dtype=torch.bool)
    close(reward_to_go(place_outcome_rewards(torch.tensor([1.0]), mask), mask, gamma)[0], expected)


LENGTHS = torch.arange(3) < torch.tensor([3, 1, 2, 2])[:, None]


@pytest.mark.parametrize(
    ("adv_type", "expected"),
    [
        ("reinforce_plus_plus_baseline", [0.449359, -0.748931, 1.048503, -1.348076]),
        ("raw", [0.149786, -1.048503, 1.348076, -1.048503]),
    ],
)
def test_whitened_scores(adv_type: str, expected: list[float]) -> None:
    batch = batch_of(torch.tensor([1.0, 0, 2, 0]), LENGTHS, torch.tensor([0, 0, 1, 1]))
    close(
        advantages(batch, Algorithm(adv_type=adv_type))[0], torch.where(LENGTHS, torch.tensor(expected)[:, None], 0.0)
    )


def test_raw_is_whitened_only_if_asked() -> None:
    scores = torch.tensor([1.0, 0, 2, 0])
    batch = batch_of(scores, LENGTHS, torch.arange(4))
    estimated, _ = advantages(batch, Algorithm(adv_type="raw", normalize_advantages=False))
    close(estimated, torch.where(LENGTHS, scores[:, None], 0.0))


def random_batch(seed: int, **fields: Any) -> RolloutBatch:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(9, 7, generator=generator) < 0.6
    mask[:, 3] = True
    groups = torch.randint(3, (9,), generator=generator)
    return batch_of(torch.randn(9, generator=generator), mask, groups, **fields)


CRITIC_FREE = [name for name, estimator in ESTIMATORS.items() if not estimator.values]
GROUPED = [{"adv_type": "grpo"}, {"adv_type": "grpo", "grpo_std_normalization": False}, {"adv_type": "rloo"}]


@pytest.mark.parametrize("keys", GROUPED)
@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 1000), shift=st.sampled_from([-3.0, 0.5, 8.0]))
def test_a_group_sums_to_zero_and_a_constant_changes_nothing(keys: dict[str, Any], seed: int, shift: float) -> None:
    batch = random_batch(seed)
    estimated = advantages(batch, Algorithm(**keys))[0][:, 3]
    sums = torch.zeros(3).index_add_(0, batch.group_ids, estimated)
    torch.testing.assert_close(sums, torch.zeros(3), rtol=0, atol=1e-5)
    last = batch.mask & (batch.mask.flip(1).cumsum(1).flip(1) == 1)
    batch.rewards = torch.where(last, batch.rewards + shift, batch.rewards)
    torch.testing.assert_close(advantages(batch, Algorithm(**keys))[0][:, 3], estimated, rtol=1e-4, atol=1e-5)


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 1000))
def test_rloo_is_dr_grpo_times_n_over_n_minus_1(seed: int) -> None:
    batch = random_batch(seed)
    sizes = torch.bincount(batch.group_ids, minlength=3)[batch.group_ids][:, None]
    scaled = grpo(batch.rewards, batch.mask, batch.group_ids, False) * sizes / (sizes - 1).clamp(min=1)
    close(rloo(batch.rewards, batch.mask, batch.group_ids), scaled)


@pytest.mark.parametrize("adv_type", CRITIC_FREE)
@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 1000))
def test_shuffled_rows_and_padding_change_nothing(adv_type: str, seed: int) -> None:
    algorithm, batch = Algorithm(adv_type=adv_type), random_batch(seed)
    plain, _ = advantages(batch, algorithm)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(seed))
    close(advantages(batch.select(order), algorithm)[0], plain[order])
    batch.action_mask = torch.nn.functional.pad(batch.action_mask, (3, 37))
    batch.rewards = torch.nn.functional.pad(batch.rewards, (3, 37), value=NAN)
    padded, _ = advantages(batch, algorithm)
    close(padded[:, 3:10], plain)
    assert not padded[~batch.mask].any()


def test_names_and_functions_belong_together() -> None:
    assert FUNCTIONS.keys() == ESTIMATORS.keys()


@pytest.mark.parametrize("adv_type", ESTIMATORS)
def test_numbers_that_are_not_finite_are_named(adv_type: str) -> None:
    batch = random_batch(0, values=torch.zeros(9, 7))
    batch.rewards[4, 3] = float("inf")
    with pytest.raises(Diverged, match=r"rewards\[4, 3\] = inf"):
        advantages(batch, Algorithm(adv_type=adv_type))


def test_values_that_are_not_finite_are_named() -> None:
    batch = random_batch(0, values=torch.zeros(9, 7))
    batch.values[2, 3] = NAN
    with pytest.raises(Diverged, match=r"values\[2, 3\] = nan"):
        advantages(batch, Algorithm())
