"""The plain GAE equals its definition for every mask and lambda; lambdas that adapt to the length; large values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_platform.algorithms import gae as module
from rl_platform.algorithms.gae import _plain_gae, decoupled_gae, gae, length_adaptive_lambda

NAN = float("nan")


def near(actual: Tensor, expected: Tensor) -> None:
    """To 1e-5 of the largest number: sums of thousands of terms have zeros where no relative error holds."""
    assert (actual.double() - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))


def loop(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float | Tensor) -> tuple[Tensor, Tensor]:
    """The definition over positions, in float64."""
    factor = gamma * np.asarray(lam, np.float64)
    columns = zip(*(x.double().numpy().T[::-1] for x in (rewards, values)), mask.numpy().T[::-1], strict=True)
    following, carried = np.zeros((2, len(mask)))
    estimated = []
    for reward, value, active in columns:  # numpy: torch takes four times as long for so few numbers
        candidate = reward + gamma * following - value + factor * carried
        carried = np.where(active, candidate, carried)
        following = np.where(active, value, following)
        estimated.append(np.where(active, candidate, 0.0))
    found = torch.from_numpy(np.stack(estimated[::-1], axis=1))
    return found, torch.where(mask, found + values.double(), 0.0)


def long_case(rows: int, length: int, density: float, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, rows, length, generator=generator)
    return rewards, values, torch.rand(rows, length, generator=generator) < density


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("density", [0.05, 0.7, 2.0])
@pytest.mark.parametrize("per_row", [False, True])
def test_long_rows_equal_the_loop(lam: float, density: float, per_row: bool) -> None:
    rewards, values, mask = long_case(3, 2048, density)
    mask[1, 100:] = False  # rows of very different lengths
    weights = torch.tensor([lam, 0.3, 1.0]) if per_row else lam
    expected = loop(rewards, values, mask, 1.0, weights.double() if isinstance(weights, Tensor) else weights)
    dirty = [torch.where(mask, x, NAN) for x in (rewards, values)]
    for actual, golden in zip(gae(*dirty, mask, 1.0, weights), expected, strict=True):
        near(actual, golden)
        assert not actual[~mask].any()


@pytest.mark.parametrize("length", [1, 2, 300])
def test_every_length_equals_the_loop(length: int) -> None:
    rewards, values, mask = long_case(5, length, 2.0)
    for actual, golden in zip(
        gae(rewards, values, mask, 0.99, 0.9), loop(rewards, values, mask, 0.99, 0.9), strict=True
    ):
        near(actual, golden)


def test_padding_and_observations_change_nothing_in_long_rows() -> None:
    rewards, values, mask = long_case(4, 512, 0.8)
    plain = gae(rewards, values, mask, 0.99, 0.95)
    gap = torch.full((4, 37), NAN)
    wide = [torch.cat((x[:, :200], gap, x[:, 200:], gap), dim=1) for x in (rewards, values)]
    hole = torch.zeros(4, 37, dtype=torch.bool)
    wide_mask = torch.cat((mask[:, :200], hole, mask[:, 200:], hole), dim=1)
    for narrow, padded in zip(plain, gae(*wide, wide_mask, 0.99, 0.95), strict=True):
        torch.testing.assert_close(padded[wide_mask], narrow[mask], rtol=1e-6, atol=1e-6)


def test_rows_without_an_active_position_give_zeros() -> None:
    rewards, values, mask = long_case(3, 512, 0.8)
    mask[1] = False
    for result in gae(torch.where(mask, rewards, NAN), values, mask, 1.0, 0.95):
        assert torch.isfinite(result).all()
        assert not result[1].any()


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


# Large values ---------------------------------------------------------------------------------------------------------


def exact(rewards, values, mask, gamma, lam, ends=None, end_values=None) -> Tensor:
    """Advantages by the definition, in float64."""
    rewards, values = rewards.double(), values.double()
    estimated, following, carried = (
        torch.zeros_like(values),
        values.new_zeros(len(values)),
        values.new_zeros(len(values)),
    )
    for t in reversed(range(values.shape[1])):
        if ends is not None:
            following = torch.where(ends[:, t], end_values[:, t].double(), following)
            carried = torch.where(ends[:, t], 0.0, carried)
        candidate = rewards[:, t] + gamma * following - values[:, t] + gamma * lam * carried
        carried = torch.where(mask[:, t], candidate, carried)
        following = torch.where(mask[:, t], values[:, t], following)
        estimated[:, t] = torch.where(mask[:, t], candidate, 0.0)
    return estimated


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
    expected = exact(*arguments)
    estimated, returns = _plain_gae(*arguments, *(() if episodes else (None, None)))
    error = (estimated - expected).abs()[mask].max() / expected[mask].std()
    assert error < 1e-5
    assert torch.equal(returns[~mask], torch.zeros(int((~mask).sum())))
    torch.testing.assert_close(returns[mask].double(), (expected + values.double())[mask], rtol=1e-6, atol=1e-3)


def test_decoupled_and_length_adaptive_lambdas_keep_the_precision() -> None:
    generator = torch.Generator().manual_seed(2)
    rewards, noise = torch.randn(2, 8, 100, generator=generator)
    values, mask = 1e4 + noise, torch.rand(8, 100, generator=generator) < 0.8
    lam = length_adaptive_lambda(mask, 0.05)
    estimated, returns = decoupled_gae(rewards, values, mask, 1.0, lam, 0.95)
    expected = exact(rewards, values, mask, 1.0, lam.double())
    assert (estimated - expected).abs()[mask].max() < 1e-5 * expected[mask].std()
    targets = exact(rewards, values, mask, 1.0, 0.95) + values.double()
    torch.testing.assert_close(returns[mask].double(), targets[mask], rtol=1e-6, atol=1e-3)
