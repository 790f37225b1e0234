"""GAE against its definition and goldens; lambdas that adapt to the length; large values; the choice of estimator."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from neutral_batches import neutral_batch
from torch import Tensor

from rl_platform.algorithms import gae as module
from rl_platform.algorithms.advantages import advantages
from rl_platform.algorithms.gae import _plain_gae, decoupled_gae, gae
from rl_platform.algorithms.rewards import place_outcome_rewards
from rl_platform.algorithms.statistics import whiten
from rl_platform.algorithms.variants.length_adaptive import length_adaptive_lambda
from rl_platform.algorithms.variants.vtrace import vtrace
from rl_platform.config.schema.algorithm import Algorithm

NAN = float("nan")


def close(actual: Tensor, expected: Tensor | list[float], tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=tolerance, atol=1e-6)


def definition(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float | Tensor,
    ends: Tensor | None = None,
    end_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns position by position, in float64. numpy: torch takes four times as long."""
    r, v = (x.double().numpy() for x in (rewards, values))
    factor = gamma * np.asarray(lam, np.float64)
    estimated = np.zeros(mask.shape)
    following, carried = np.zeros((2, len(mask)))
    for t in reversed(range(mask.shape[1])):
        if ends is not None and end_values is not None:
            following = np.where(ends[:, t], end_values[:, t].double(), following)
            carried = np.where(ends[:, t], 0.0, carried)
        candidate = r[:, t] + gamma * following - v[:, t] + factor * carried
        carried, following = np.where(mask[:, t], candidate, carried), np.where(mask[:, t], v[:, t], following)
        estimated[:, t] = np.where(mask[:, t], candidate, 0.0)
    found = torch.from_numpy(estimated)
    return found, torch.where(mask, found + values.double(), 0.0)


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


@settings(max_examples=60)
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
    expected = definition(rewards, values, mask, gamma, lam, ends, end_values)
    dirty = [torch.where(mask, rewards, NAN), torch.where(mask, values, NAN)]
    boundaries = (ends, torch.where(ends, end_values, NAN)) if bounded else ()
    actual = gae(*dirty, mask, gamma, lam, *boundaries)
    for tensor, golden in zip(actual, expected, strict=True):
        close(tensor.double(), golden, tolerance=1e-4)


def random_case(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 5, 9, generator=generator)
    return rewards, values, torch.rand(5, 9, generator=generator) < 0.6


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


@given(seed=st.integers(0, 1000), left=st.integers(0, 4), right=st.integers(0, 4))
def test_padding_changes_nothing(seed: int, left: int, right: int) -> None:
    rewards, values, mask = random_case(seed)
    padded = [torch.nn.functional.pad(x, (left, right), value=NAN) for x in (rewards, values)]
    padded_mask = torch.nn.functional.pad(mask, (left, right))
    plain, wide = gae(rewards, values, mask, 0.9, 0.8), gae(*padded, padded_mask, 0.9, 0.8)
    for narrow_tensor, wide_tensor in zip(plain, wide, strict=True):
        assert torch.equal(wide_tensor[:, left : left + 9], narrow_tensor)
        assert torch.equal(wide_tensor[padded_mask], narrow_tensor[mask])


@given(seed=st.integers(0, 1000), gap=st.integers(1, 8), width=st.integers(1, 4))
def test_observation_tokens_change_nothing(seed: int, gap: int, width: int) -> None:
    rewards, values, mask = random_case(seed)
    hole = torch.full((5, width), NAN)
    wide = [torch.cat((x[:, :gap], hole, x[:, gap:]), dim=1) for x in (rewards, values)]
    wide_mask = torch.cat((mask[:, :gap], torch.zeros(5, width, dtype=torch.bool), mask[:, gap:]), dim=1)
    for narrow, with_gap in zip(gae(rewards, values, mask, 0.9, 0.8), gae(*wide, wide_mask, 0.9, 0.8), strict=True):
        assert torch.equal(narrow[mask], with_gap[wide_mask])


@given(seed=st.integers(0, 1000))
def test_shuffled_rows_give_shuffled_results(seed: int) -> None:
    rewards, values, mask = random_case(seed)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(seed))
    for plain, shuffled in zip(
        gae(rewards, values, mask, 0.9, 0.8), gae(rewards[order], values[order], mask[order], 0.9, 0.8), strict=True
    ):
        assert torch.equal(plain[order], shuffled)


@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
@pytest.mark.parametrize("density", [0.05, 0.7, 2.0])
@pytest.mark.parametrize("per_row", [False, True])
def test_long_rows_equal_the_definition(lam: float, density: float, per_row: bool) -> None:
    """To 1e-5 of the largest number: sums of thousands of terms have zeros where no relative error holds."""
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 3, 2048, generator=generator)
    mask = torch.rand(3, 2048, generator=generator) < density
    mask[1, 100:] = False  # rows of very different lengths
    lambdas = torch.tensor([lam, 0.3, 1.0], dtype=torch.float64) if per_row else lam
    dirty = [torch.where(mask, x, NAN) for x in (rewards, values)]
    golden = definition(rewards, values, mask, 1.0, lambdas)
    for actual, expected in zip(gae(*dirty, mask, 1.0, lambdas), golden, strict=True):
        assert (actual.double() - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))
        assert not actual[~mask].any()


ROWS = torch.tensor([[1] * 8, [1] * 4 + [0] * 4], dtype=torch.bool)
VALUES = torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8], [0.4, 0.3, 0.2, 0.1, 9, 9, 9, 9]])
REWARDS = torch.zeros(2, 8).index_put((torch.tensor([0, 1]), torch.tensor([7, 3])), torch.tensor([1.0, -1.0]))


@pytest.mark.parametrize(
    ("alpha", "lambdas", "rows"),
    [
        (
            0.5,
            [0.75, 0.5],
            [
                [0.373303, 0.364404, 0.352539, 0.336719, 0.315625, 0.2875, 0.25, 0.2],
                [-0.3125, -0.425, -0.65, -1.1, 0, 0, 0, 0],
            ],
        ),
        (
            1.0,
            [0.875, 0.75],
            [
                [0.564382, 0.530723, 0.492255, 0.448291, 0.398047, 0.340625, 0.275, 0.2],
                [-0.695312, -0.79375, -0.925, -1.1, 0, 0, 0, 0],
            ],
        ),
        (0.05, [0.0, 0.0], [[0.1] * 7 + [0.2], [-0.1, -0.1, -0.1, -1.1, 0, 0, 0, 0]]),
    ],
)
def test_length_adaptive(alpha: float, lambdas: list[float], rows: list[list[float]]) -> None:
    lam = length_adaptive_lambda(ROWS, alpha)
    torch.testing.assert_close(lam, torch.tensor(lambdas))
    estimated, returns = decoupled_gae(REWARDS, VALUES, ROWS, 1.0, lam, 1.0)
    torch.testing.assert_close(estimated, torch.tensor(rows), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(returns, torch.tensor([[1.0] * 8, [-1.0] * 4 + [0.0] * 4]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("length", "lam"),
    [(0, 0.0), (20, 0.0), (21, 0.047619), (40, 0.5), (100, 0.8), (200, 0.9), (1000, 0.98), (8192, 0.997559)],
)
def test_length_adaptive_lambda_by_length(length: int, lam: float) -> None:
    mask = torch.arange(8192)[None] < length
    assert length_adaptive_lambda(mask, 0.05).item() == pytest.approx(lam, rel=1e-5, abs=1e-6)


def test_decoupled_with_equal_lambdas_is_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, passes = gae(REWARDS, VALUES, ROWS, 0.9, 0.8), []

    def counted(*arguments: object) -> tuple[Tensor, Tensor]:
        passes.append(arguments)
        return gae(*arguments)

    monkeypatch.setattr(module, "gae", counted)
    for separate, together in zip(decoupled_gae(REWARDS, VALUES, ROWS, 0.9, 0.8, 0.8), plain, strict=True):
        assert torch.equal(separate, together)
    assert len(passes) == 1
    decoupled_gae(REWARDS, VALUES, ROWS, 0.9, 0.8, 1.0)
    assert len(passes) == 3


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.99, 0.95), (1.0, 0.0), (0.999, 0.5)])
@pytest.mark.parametrize("spread", [0.01, 1.0, 1e4])
@pytest.mark.parametrize("episodes", [False, True])
def test_values_of_ten_thousand_do_not_drown_the_advantages(
    episodes: bool, spread: float, gamma: float, lam: float
) -> None:
    generator = torch.Generator().manual_seed(1)
    rewards, noise, reached = torch.randn(3, 16, 300, generator=generator)
    values, mask = 1e4 + spread * noise, torch.rand(16, 300, generator=generator) < 0.8
    arguments = [rewards, values, mask, gamma, lam]
    if episodes:
        ends = torch.rand(16, 300, generator=generator) < 0.05
        ends[:, -1] = True
        arguments += [ends, 1e4 + spread * reached]
    expected, expected_returns = definition(*arguments)
    estimated, returns = _plain_gae(*arguments, *(() if episodes else (None, None)))
    error = (estimated - expected).abs()[mask].max() / expected[mask].std()
    assert error < 1e-5
    torch.testing.assert_close(returns.double(), expected_returns, rtol=1e-6, atol=1e-3)


def test_decoupled_and_length_adaptive_lambdas_keep_the_precision() -> None:
    generator = torch.Generator().manual_seed(2)
    rewards, noise = torch.randn(2, 8, 100, generator=generator)
    values, mask = 1e4 + noise, torch.rand(8, 100, generator=generator) < 0.8
    lam = length_adaptive_lambda(mask, 0.05)
    estimated, returns = decoupled_gae(rewards, values, mask, 1.0, lam, 0.95)
    expected, _ = definition(rewards, values, mask, 1.0, lam)
    assert (estimated - expected).abs()[mask].max() < 1e-5 * expected[mask].std()
    _, targets = definition(rewards, values, mask, 1.0, 0.95)
    torch.testing.assert_close(returns.double(), targets, rtol=1e-6, atol=1e-3)


@pytest.mark.parametrize("normalize", [True, False])
def test_dispatch_whitens_advantages_but_never_returns(normalize: bool) -> None:
    rewards, values, mask = random_case(3)
    sample_mask = torch.tensor([True, True, False, True, True])
    batch = neutral_batch(mask, sample_mask=sample_mask, rewards=rewards, values=values)
    estimated, returns = advantages(batch, Algorithm(gamma=0.9, gae_lambda=0.8, normalize_advantages=normalize))
    plain, plain_returns = gae(rewards, values, batch.mask, 0.9, 0.8)
    assert torch.equal(returns, plain_returns)
    assert torch.equal(estimated, whiten(plain, batch.mask) if normalize else plain)
    assert not estimated[2].any()
    assert not returns[2].any()


def _vtrace_reference(r, v, gamma, lam, rho, ends, end_values):
    """A row without gaps, by the recursion of Espeholt et al. 2018."""
    advantages, targets, following = torch.zeros_like(v), torch.zeros_like(v), (0.0, 0.0)  # v_{t+1}, V_{t+1}
    for t in reversed(range(len(v))):
        if ends[t]:
            following = (float(end_values[t]), float(end_values[t]))
        target, value = following
        delta = r[t] + gamma * value - v[t]
        targets[t] = v[t] + rho[t] * delta + gamma * lam * min(float(rho[t]), 1.0) * (target - value)
        advantages[t] = delta + gamma * lam * (target - value)
        following = (float(targets[t]), float(v[t]))
    return advantages, targets


@pytest.mark.parametrize("lam", [1.0, 0.8])
def test_vtrace_is_the_sum_that_defines_it(lam: float) -> None:
    """Espeholt et al. 2018, eq. 1: v_s = V_s + sum_t gamma^(t-s) (prod_{s <= i < t} c_i) rho_t delta_t.

    c_i = lam min(1, rho_i) (remark 2). With lam 1 the advantage is that of section 4.2, r_s + gamma v_{s+1} - V_s; lam
    shortens it as in GAE.
    """
    gamma, numbers = 0.9, torch.Generator().manual_seed(5)
    r, v, rho = (torch.randn(7, generator=numbers, dtype=torch.float64) for _ in range(3))
    rho = rho.abs() + 0.1
    following = torch.cat([v[1:], torch.zeros(1)])
    deltas, traces = rho * (r + gamma * following - v), lam * rho.clamp(max=1.0)
    targets = torch.stack(
        [v[s] + sum(gamma ** (t - s) * traces[s:t].prod() * deltas[t] for t in range(s, 7)) for s in range(7)]
    )
    later = torch.cat([targets[1:], torch.zeros(1)])
    advantages = r + gamma * (lam * later + (1.0 - lam) * following) - v
    mask = torch.ones(1, 7, dtype=torch.bool)
    found = vtrace(r[None], v[None], mask, gamma, lam, rho[None], None, None)
    torch.testing.assert_close(found, (advantages[None], targets[None]))


def test_vtrace_is_the_recursion_and_without_correction_gae() -> None:
    numbers = torch.Generator().manual_seed(3)
    rewards, values, end_values = (torch.randn(4, 9, generator=numbers, dtype=torch.float64) for _ in range(3))
    ends = torch.rand(4, 9, generator=numbers) < 0.3
    ends[:, -1] = True
    rho = 2 * torch.rand(4, 9, generator=numbers, dtype=torch.float64)
    whole = torch.ones(4, 9, dtype=torch.bool)
    found = vtrace(rewards, values, whole, 0.9, 0.8, rho, ends, end_values)
    rows = zip(rewards, values, rho, ends, end_values, strict=True)
    expected = [_vtrace_reference(r, v, 0.9, 0.8, w, e, last) for r, v, w, e, last in rows]
    for actual, column in zip(found, zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(actual, torch.stack(column))
    mask = whole.clone()
    mask[:, 3] = False  # as `gae`, which carries on over masked positions
    plain = _plain_gae(rewards, values, mask, 0.9, 0.8, ends, end_values)
    ones = vtrace(rewards, values, mask, 0.9, 0.8, torch.ones_like(rho), ends, end_values)
    for actual, known in zip(ones, plain, strict=True):
        torch.testing.assert_close(actual, known)
