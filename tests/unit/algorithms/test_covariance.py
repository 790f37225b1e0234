"""Clip-Cov and KL-Cov: covariances by hand, the choice of positions, the losses there, any split of a mini-batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rl_platform.algorithms.aggregation import Denominators
from rl_platform.algorithms.losses import ModelOutputs, actor_loss
from rl_platform.algorithms.variants.covariance import covariant_positions
from rl_platform.config.schema.algorithm import Algorithm
from rl_platform.records import RolloutBatch

NAN = float("nan")
# Active: log pi_old -1, -3, -2, -2 with mean -2; A 4, 0, 1, -1 with mean 1.
# Cov = (1)(3), (-1)(-1), (0)(0), (0)(-2) = 3, 1, 0, 0
MASK = torch.tensor([[True, True, False], [True, True, False]])
OLD = torch.tensor([[-1.0, -3.0, NAN], [-2.0, -2.0, NAN]])
ADVANTAGES = torch.tensor([[4.0, 0.0, NAN], [1.0, -1.0, NAN]])


def algorithm(kind: str, **covariance: Any) -> Algorithm:
    return Algorithm.model_validate({"policy_loss": kind, "covariance": covariance})


def batch_of(old: Tensor = OLD, advantages: Tensor = ADVANTAGES, mask: Tensor = MASK, **fields: Any) -> RolloutBatch:
    zeros, rows = torch.zeros(mask.shape), torch.arange(len(mask))
    return RolloutBatch({}, mask, rows >= 0, rows, zeros, zeros, log_probs=old, advantages=advantages, **fields)


def chosen(kind: str, batch: RolloutBatch | None = None, seed: int = 0, **covariance: Any) -> list[list[int]]:
    draw = torch.Generator().manual_seed(seed)
    found = covariant_positions(batch or batch_of(), algorithm(kind, **covariance), draw)
    assert found.dtype == torch.bool
    return found.nonzero().tolist()


def test_the_largest_covariances() -> None:
    """floor(4 fraction) positions, at least one; equal covariances in the order of positions."""
    assert chosen("kl_cov") == [[0, 0]]
    assert chosen("kl_cov", fraction=0.5) == [[0, 0], [0, 1]]
    assert chosen("kl_cov", fraction=0.75) == [[0, 0], [0, 1], [1, 0]]
    assert chosen("kl_cov", fraction=1.0) == [[0, 0], [0, 1], [1, 0], [1, 1]]


def test_those_between_the_bounds() -> None:
    assert chosen("clip_cov", low=0.5, high=5.0, fraction=1.0) == [[0, 0], [0, 1]]
    assert chosen("clip_cov", low=0.5, high=3.0, fraction=1.0) == [[0, 1]]  # 3 itself is outside
    assert chosen("clip_cov", low=4.0, high=5.0, fraction=1.0) == []
    drawn = {str(chosen("clip_cov", seed=seed, low=0.5, fraction=0.25)) for seed in range(20)}
    assert drawn == {"[[0, 0]]", "[[0, 1]]"}


def test_nothing_active() -> None:
    assert chosen("kl_cov", batch_of(mask=torch.zeros(2, 3, dtype=torch.bool))) == []


def loss_and_gradient(kind: str, parts: list[list[int]], weights: Tensor | None = None) -> tuple[float, Tensor]:
    """log rho: .1, .2, -.3, .4; kl_coef 2; fraction 1/2."""
    section = algorithm(kind, low=0.5, fraction=0.5, kl_coef=2.0)
    batch = batch_of(loss_weights=weights)
    batch.covariant = covariant_positions(batch, section, torch.Generator().manual_seed(0))
    step = torch.tensor([[0.1, 0.2, 0.0], [-0.3, 0.4, 0.0]])
    log_probs, total = (OLD + step).requires_grad_(), 0.0
    denominators = Denominators.of(MASK, 3)
    for part in parts:
        rows = torch.tensor(part)
        loss, _ = actor_loss(ModelOutputs(log_probs[rows]), batch.select(rows), denominators, section)
        loss.backward()
        total += loss.item()
    assert log_probs.grad is not None
    return total, log_probs.grad


@pytest.mark.parametrize("parts", [[[0, 1]], [[0], [1]], [[1], [0]]], ids=str)
def test_losses_and_gradients(parts: list[list[int]]) -> None:
    """clip_cov: row 0 is chosen and has neither loss nor gradient. Row 1: A 1, rho exp(-.3) = .740818: -.740818, not
    clipped as A > 0. A -1, rho exp(.4) = 1.491825: 1.491825. Mean over 4 positions: .751007 / 4.

    kl_cov: row 0 is chosen: -4 exp(.1) + 2 (.1) = -4.220684, 0 + 2 (.2) = .4; gradients -4.420684 + 2 and 0 + 2.
    Row 1 as above. Mean: (-4.220684 + .4 + .751007) / 4.
    """
    loss, gradient = loss_and_gradient("clip_cov", parts)
    assert loss == pytest.approx(0.751007 / 4, rel=1e-5)
    torch.testing.assert_close(gradient, torch.tensor([[0, 0, 0], [-0.740818, 1.491825, 0]]) / 4)
    loss, gradient = loss_and_gradient("kl_cov", parts)
    assert loss == pytest.approx(-3.069677 / 4, rel=1e-5)
    torch.testing.assert_close(gradient, torch.tensor([[-2.420684, 2, 0], [-0.740818, 1.491825, 0]]) / 4)


def test_loss_weights_multiply_the_added_term() -> None:
    loss, _ = loss_and_gradient("kl_cov", [[0, 1]], torch.tensor([[0.0, 0.5, 1.0], [0.0, 0.0, 1.0]]))
    assert loss == pytest.approx(0.5 * 0.4 / 4)
