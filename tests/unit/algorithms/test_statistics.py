from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_platform.algorithms.statistics import explained_variance, masked_mean, masked_var, whiten

X = torch.tensor([[1.0, 2, 3, 100], [4, 50, 60, 70]])
W = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]], dtype=torch.bool)


def close(actual: torch.Tensor, expected: object) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=1e-5, atol=1e-6)


def test_mean_and_variance() -> None:
    close(masked_mean(X, W), 2.5)
    close(masked_var(X, W), 1.666667)


def test_whiten() -> None:
    close(whiten(X, W), [[-1.161895, -0.387298, 0.387298, 0], [1.161895, 0, 0, 0]])


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -1e30])
def test_masked_positions_never_leak(garbage: float) -> None:
    dirty = torch.where(W, X, garbage)
    close(masked_mean(dirty, W), 2.5)
    close(masked_var(dirty, W), 1.666667)
    assert torch.equal(whiten(dirty, W), whiten(X, W))


def test_empty_and_single_positions_have_no_variance() -> None:
    nothing, single = torch.zeros(2, 4, dtype=torch.bool), torch.zeros(2, 4, dtype=torch.bool)
    single[0, 1] = True
    assert masked_mean(X, nothing) == 0
    assert masked_var(X, nothing) == masked_var(X, single) == 0
    assert not whiten(X, nothing).any()
    assert not whiten(X, single).any()


@given(st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=30), st.integers(0, 5))
def test_whitening_ignores_padding_and_order(numbers: list[float], padding: int) -> None:
    x = torch.tensor([numbers])
    mask = torch.ones_like(x, dtype=torch.bool)
    padded = torch.nn.functional.pad(x, (padding, 0), value=float("nan"))
    padded_mask = torch.nn.functional.pad(mask, (padding, 0))
    plain = whiten(x, mask)
    torch.testing.assert_close(whiten(padded, padded_mask)[:, padding:], plain)
    torch.testing.assert_close(whiten(x.flip(1), mask).flip(1), plain, rtol=1e-4, atol=1e-4)


def test_explained_variance() -> None:
    returns, values = torch.tensor([[1.0, 2, 3, 4]]), torch.tensor([[1.0, 1, 3, 3]])
    mask = torch.ones(1, 4, dtype=torch.bool)
    assert explained_variance(returns, values, mask) == (pytest.approx(0.8), True)
    assert explained_variance(torch.ones(1, 4), values, mask) == (0.0, False)
