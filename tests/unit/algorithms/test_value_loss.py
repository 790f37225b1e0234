from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rl_platform.algorithms.losses import value_loss

OLD = torch.tensor([[0.5, 0.5, 0.5, 0.5, 0.0]])
NEW = [[0.9, 0.4, 1.5, -0.4, 3.0]]
RETURNS = torch.tensor([[1.0, 1.0, 1.0, 0.0, 20.0]])


def run(clip: float | None, delta: float | None) -> tuple[Tensor, Tensor, dict[str, float]]:
    values = torch.tensor(NEW, requires_grad=True)
    loss, metrics = value_loss(values, OLD, RETURNS, None, clip, delta)
    loss.sum().backward()
    assert values.grad is not None
    return loss.detach()[0], values.grad[0], metrics.finalize()


@pytest.mark.parametrize(
    ("clip", "delta", "losses", "mean", "gradients"),
    [
        (0.2, None, [0.045, 0.18, 0.125, 0.08, 196.02], 39.29, [0, -0.6, 0.5, -0.4, 0]),
        (0.2, 0.5, [0.045, 0.175, 0.125, 0.08, 9.775], 2.04, [0, -0.5, 0.5, -0.4, 0]),
        (0.2, 10.0, [0.045, 0.18, 0.125, 0.08, 148.0], 29.686, [0, -0.6, 0.5, -0.4, 0]),
        (None, None, [0.005, 0.18, 0.125, 0.08, 144.5], 28.978, [-0.1, -0.6, 0.5, -0.4, -17]),
        (None, 0.5, [0.005, 0.175, 0.125, 0.08, 8.375], 1.752, [-0.1, -0.5, 0.5, -0.4, -0.5]),
        (None, 10.0, [0.005, 0.18, 0.125, 0.08, 120.0], 24.078, [-0.1, -0.6, 0.5, -0.4, -10]),
    ],
)
def test_clip_and_huber(
    clip: float | None, delta: float | None, losses: list[float], mean: float, gradients: list[float]
) -> None:
    loss, gradient, metrics = run(clip, delta)
    torch.testing.assert_close(loss, torch.tensor(losses), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, torch.tensor(gradients), rtol=1e-5, atol=1e-6)
    assert loss.mean().item() == pytest.approx(mean, rel=1e-5)
    assert metrics["critic/predicted_values_mean"] == pytest.approx(sum(NEW[0]) / 5)
    assert metrics.get("critic/clip_frac") == (None if clip is None else pytest.approx(0.4))
    assert metrics.get("critic/out_of_range_frac") == (None if clip is None else pytest.approx(0.8))


@pytest.mark.parametrize("delta", [None, 0.5])
def test_infinite_clip_is_no_clip(delta: float | None) -> None:
    for one, other in zip(run(math.inf, delta)[:2], run(None, delta)[:2], strict=True):
        assert torch.equal(one, other)


def test_huge_huber_delta_is_the_squared_error() -> None:
    for clip in (None, 0.2):
        for one, other in zip(run(clip, 1e6)[:2], run(clip, None)[:2], strict=True):
            torch.testing.assert_close(one, other)


@given(st.lists(st.tuples(*[st.floats(-2, 2, width=32)] * 3), min_size=1, max_size=20))
def test_gradient_flows_wherever_the_value_is_inside_the_clip_range(rows: list[tuple[float, float, float]]) -> None:
    """Rounding must not make an unsaturated position look clipped, which would cut its gradient."""
    old, step, returns = torch.tensor(rows).t()
    values = (old + 0.19 * step / 2)[None].clone().requires_grad_()
    loss, _ = value_loss(values, old[None], returns[None], None, clip=0.2)
    loss.sum().backward()
    torch.testing.assert_close(values.grad, (values - returns).detach())


def test_masked_positions_touch_neither_loss_nor_gradient() -> None:
    mask = torch.tensor([[True, False, False]])
    values = torch.tensor([[0.9, float("nan"), 7.0]], requires_grad=True)
    garbage = torch.tensor([[1.0, float("inf"), float("nan")]])
    for clip in (None, 0.2):
        values.grad = None
        loss, metrics = value_loss(values, garbage, garbage, mask, clip, 0.5)
        loss.sum().backward()
        assert values.grad is not None
        assert not loss[0, 1:].any()
        assert not values.grad[0, 1:].any()
        assert metrics.finalize()["critic/predicted_values_mean"] == pytest.approx(0.9)


@pytest.mark.parametrize("delta", [None, 0.5])
def test_gradient_matches_finite_differences(delta: float | None) -> None:
    values = torch.tensor(NEW, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x: value_loss(x, OLD.double(), RETURNS.double() + 0.03, None, 0.2, delta)[0], values
    )
