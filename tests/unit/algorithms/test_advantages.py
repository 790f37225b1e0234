from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl_platform.algorithms.advantages import advantages
from rl_platform.algorithms.gae import gae
from rl_platform.algorithms.rewards import place_outcome_rewards
from rl_platform.algorithms.statistics import whiten
from rl_platform.config.schema.algorithm import Algorithm
from rl_platform.records import RolloutBatch

NAN = float("nan")


def close(actual: Tensor, expected: Tensor | list[float], tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=tolerance, atol=1e-6)


def reference_gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, ends: Tensor, end_values: Tensor
) -> tuple[Tensor, Tensor]:
    """The definition, position by position, in float64."""
    estimated, returns = torch.zeros(mask.shape, dtype=torch.float64), torch.zeros(mask.shape, dtype=torch.float64)
    for row in range(mask.shape[0]):
        following = carried = 0.0
        for t in reversed(range(mask.shape[1])):
            if ends[row, t]:
                following, carried = float(end_values[row, t]), 0.0
            if mask[row, t]:
                value = float(values[row, t])
                carried = float(rewards[row, t]) + gamma * following - value + gamma * lam * carried
                following = value
                estimated[row, t], returns[row, t] = carried, carried + value
    return estimated, returns


PADDED = torch.tensor([[1, 1, 1, 0, 0]], dtype=torch.bool)
GAPS = torch.tensor([[1, 1, 0, 0, 1, 1, 0]], dtype=torch.bool)


@pytest.mark.parametrize(
    ("gamma", "lam", "expected", "returns"),
    [
        (1, 0.95, [0.82675, 0.765, 0.7], [0.92675, 0.965, 1.0]),
        (1, 1, [0.9, 0.8, 0.7], [1, 1, 1]),
        (1, 0, [0.1, 0.1, 0.7], [0.2, 0.3, 1.0]),
        (0.9, 0.5, [0.25325, 0.385, 0.7], [0.35325, 0.585, 1.0]),
    ],
)
@pytest.mark.parametrize("garbage", [9.0, NAN])
def test_right_padding(gamma: float, lam: float, expected: list[float], returns: list[float], garbage: float) -> None:
    values = torch.tensor([[0.1, 0.2, 0.3, garbage, garbage]])
    actual = gae(place_outcome_rewards(torch.tensor([1.0]), PADDED), values, PADDED, gamma, lam)
    for tensor, golden in zip(actual, (expected, returns), strict=True):
        close(tensor[0], [*golden, 0, 0])


@pytest.mark.parametrize(
    ("gamma", "lam", "expected", "returns"),
    [
        (1, 0.5, [-0.1125, -0.025, 0.35, 0.9], [0.3875, 0.375, 0.55, 1.0]),
        (0.9, 0.5, [-0.1792625, -0.08725, 0.295, 0.9], [0.3207375, 0.31275, 0.495, 1.0]),
        (1, 0.95, [0.3913875, 0.51725, 0.755, 0.9], [0.8913875, 0.91725, 0.955, 1.0]),
    ],
)
@pytest.mark.parametrize("garbage", [9.0, NAN])
def test_several_turns(gamma: float, lam: float, expected: list[float], returns: list[float], garbage: float) -> None:
    values = torch.tensor([[0.5, 0.4, garbage, garbage, 0.2, 0.1, garbage]])
    actual = gae(place_outcome_rewards(torch.tensor([1.0]), GAPS), values, GAPS, gamma, lam)
    for tensor, golden in zip(actual, (expected, returns), strict=True):
        close(tensor[GAPS], golden)
        assert not tensor[~GAPS].any()


@pytest.mark.parametrize(
    ("lam", "rows"),
    [
        (
            [0.75, 0.5],
            [
                [0.373303, 0.364404, 0.352539, 0.336719, 0.315625, 0.2875, 0.25, 0.2],
                [-0.3125, -0.425, -0.65, -1.1, 0, 0, 0, 0],
            ],
        ),
        (
            [0.875, 0.75],
            [
                [0.564382, 0.530723, 0.492255, 0.448291, 0.398047, 0.340625, 0.275, 0.2],
                [-0.695312, -0.79375, -0.925, -1.1, 0, 0, 0, 0],
            ],
        ),
        ([0.0, 0.0], [[0.1] * 7 + [0.2], [-0.1, -0.1, -0.1, -1.1, 0, 0, 0, 0]]),
    ],
)
def test_one_lambda_per_row(lam: list[float], rows: list[list[float]]) -> None:
    mask = torch.tensor([[1] * 8, [1] * 4 + [0] * 4], dtype=torch.bool)
    values = torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8], [0.4, 0.3, 0.2, 0.1, 9, 9, 9, 9]])
    rewards = place_outcome_rewards(torch.tensor([1.0, -1.0]), mask)
    close(gae(rewards, values, mask, 1.0, torch.tensor(lam))[0], torch.tensor(rows))
    returns = gae(rewards, values, mask, 1.0, 1.0)[1]
    close(returns, torch.tensor([[1.0] * 8, [-1.0] * 4 + [0.0] * 4]))


def test_episode_boundaries_inside_a_row() -> None:
    """Terminated after step 1 (worth 0), truncated after step 3 (worth 2), cut at the end (worth 3)."""
    rewards, values = torch.ones(1, 5), torch.tensor([[0.5, 0.25, 1.0, 0.75, 0.125]])
    ends = torch.tensor([[0, 1, 0, 1, 1]], dtype=torch.bool)
    end_values = torch.tensor([[NAN, 0.0, NAN, 2.0, 3.0]])
    mask = torch.ones(1, 5, dtype=torch.bool)
    # gamma 0.5, lambda 0.5: deltas are 1 + 0.5 * following - value
    expected = [0.625 + 0.25 * 0.75, 0.75, 0.375 + 0.25 * 1.25, 1.25, 2.375]
    estimated, returns = gae(rewards, values, mask, 0.5, 0.5, ends, end_values)
    close(estimated[0], expected)
    close(returns, estimated + values)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 4),
    length=st.integers(1, 12),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    lam=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    dense=st.booleans(),
    bounded=st.booleans(),
)
def test_equals_the_definition(
    seed: int, rows: int, length: int, gamma: float, lam: float, dense: bool, bounded: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards, values, end_values = torch.randn(3, rows, length, generator=generator).unbind(0)
    mask = torch.rand(rows, length, generator=generator) < (2.0 if dense else 0.6)
    ends = torch.rand(rows, length, generator=generator) < (0.3 if bounded else -1.0)
    expected = reference_gae(rewards, values, mask, gamma, lam, ends, end_values)
    dirty = [torch.where(mask, rewards, NAN), torch.where(mask, values, NAN)]
    boundaries = (ends, torch.where(ends, end_values, NAN)) if bounded else ()
    actual = gae(*dirty, mask, gamma, lam, *boundaries)
    for tensor, golden in zip(actual, expected, strict=True):
        close(tensor.double(), golden, tolerance=1e-4)


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0])
def test_long_rows_stay_exact(lam: float) -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, values = 0.01 * torch.randn(2, 2, 8192, generator=generator)
    mask = torch.rand(2, 8192, generator=generator) < 0.7
    never = torch.zeros_like(mask)
    expected = reference_gae(rewards, values, mask, 1.0, lam, never, rewards)
    close(gae(rewards, values, mask, 1.0, lam)[0].double(), expected[0], tolerance=1e-4)


def random_case(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 5, 9, generator=generator)
    return rewards, values, torch.rand(5, 9, generator=generator) < 0.6


@settings(deadline=None)
@given(seed=st.integers(0, 1000))
def test_lambda_1_gives_return_minus_value_and_lambda_0_one_step_errors(seed: int) -> None:
    rewards, values, mask = random_case(seed)
    scores = rewards[:, 0]
    placed = place_outcome_rewards(scores, mask)
    estimated, returns = gae(placed, values, mask, 1.0, 1.0)
    close(returns, torch.where(mask, scores[:, None], 0.0), tolerance=1e-4)
    close(estimated, torch.where(mask, scores[:, None] - values, 0.0), tolerance=1e-4)
    one_step = gae(placed, values, mask, 1.0, 0.0)[0]
    for row in range(5):
        chosen = values[row][mask[row]]
        if len(chosen):
            close(one_step[row][mask[row]], torch.cat((chosen[1:], scores[row : row + 1])) - chosen)


@settings(deadline=None)
@given(seed=st.integers(0, 1000), left=st.integers(0, 4), right=st.integers(0, 4))
def test_padding_changes_nothing(seed: int, left: int, right: int) -> None:
    rewards, values, mask = random_case(seed)
    padded = [torch.nn.functional.pad(x, (left, right), value=NAN) for x in (rewards, values)]
    padded_mask = torch.nn.functional.pad(mask, (left, right))
    plain, wide = gae(rewards, values, mask, 0.9, 0.8), gae(*padded, padded_mask, 0.9, 0.8)
    for narrow_tensor, wide_tensor in zip(plain, wide, strict=True):
        assert torch.equal(wide_tensor[:, left : left + 9], narrow_tensor)
        assert torch.equal(wide_tensor[padded_mask], narrow_tensor[mask])


@settings(deadline=None)
@given(seed=st.integers(0, 1000), gap=st.integers(1, 8), width=st.integers(1, 4))
def test_observation_tokens_change_nothing(seed: int, gap: int, width: int) -> None:
    rewards, values, mask = random_case(seed)
    hole = torch.full((5, width), NAN)
    wide = [torch.cat((x[:, :gap], hole, x[:, gap:]), dim=1) for x in (rewards, values)]
    wide_mask = torch.cat((mask[:, :gap], torch.zeros(5, width, dtype=torch.bool), mask[:, gap:]), dim=1)
    for narrow, with_gap in zip(gae(rewards, values, mask, 0.9, 0.8), gae(*wide, wide_mask, 0.9, 0.8), strict=True):
        assert torch.equal(narrow[mask], with_gap[wide_mask])


@settings(deadline=None)
@given(seed=st.integers(0, 1000))
def test_shuffled_rows_give_shuffled_results(seed: int) -> None:
    rewards, values, mask = random_case(seed)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(seed))
    for plain, shuffled in zip(
        gae(rewards, values, mask, 0.9, 0.8), gae(rewards[order], values[order], mask[order], 0.9, 0.8), strict=True
    ):
        assert torch.equal(plain[order], shuffled)


@settings(deadline=None)
@given(seed=st.integers(0, 1000))
def test_equal_lambdas_per_row_equal_one_lambda(seed: int) -> None:
    rewards, values, mask = random_case(seed)
    close(gae(rewards, values, mask, 0.9, torch.full((5,), 0.8))[0], gae(rewards, values, mask, 0.9, 0.8)[0])


@pytest.mark.parametrize("normalize", [True, False])
def test_dispatch_whitens_advantages_but_never_returns(normalize: bool) -> None:
    rewards, values, mask = random_case(3)
    sample_mask = torch.tensor([True, True, False, True, True])
    batch = RolloutBatch(
        inputs={},
        action_mask=mask,
        sample_mask=sample_mask,
        group_ids=torch.arange(5),
        rewards=rewards,
        rollout_log_probs=torch.zeros_like(rewards),
        values=values,
    )
    estimated, returns = advantages(batch, Algorithm(gamma=0.9, gae_lambda=0.8, normalize_advantages=normalize))
    plain, plain_returns = gae(rewards, values, batch.mask, 0.9, 0.8)
    assert torch.equal(returns, plain_returns)
    assert torch.equal(estimated, whiten(plain, batch.mask) if normalize else plain)
    assert not estimated[2].any()
    assert not returns[2].any()
