"""Ratios of probabilities: the limits of the exponent, and the estimator k3."""

from __future__ import annotations

import math

import pytest
import torch

from rl_platform.algorithms.ratios import k3, ratio_of


def test_the_exponent_of_a_ratio_is_limited() -> None:
    found = ratio_of(torch.tensor([-1000.0, -1.0, 0.0, 2.0, 1000.0], dtype=torch.float64))
    expected = [math.exp(-20), math.exp(-1), 1.0, math.exp(2), math.exp(20)]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_k3_is_the_kl_in_expectation() -> None:
    """sum_v q(v) k3(log p(v) - log q(v)) = KL(q || p), as sum_v q(v) (p(v) / q(v) - 1) is 0."""
    p, q = torch.tensor([[2.0, 1.0, 0.0], [1.0, 1.0, 1.0]], dtype=torch.float64).softmax(dim=1)
    expected = (q * (q / p).log()).sum()
    torch.testing.assert_close((q * k3((p / q).log())).sum(), expected)
    assert float(expected) == pytest.approx(0.308994, abs=1e-6)


def test_k3_keeps_the_digits_of_a_small_difference() -> None:
    x = 1e-4
    assert float(k3(torch.tensor(x))) == pytest.approx(x**2 / 2 + x**3 / 6, rel=1e-3)
