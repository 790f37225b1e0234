from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rl_platform.algorithms.metrics import Metrics
from rl_platform.algorithms.policy_losses import ppo_clip
from rl_platform.config.schema.algorithm import Algorithm

RATIOS = [0.5, 0.79, 1.0, 1.25, 1.3, 2.9, 3.5, 10.0]


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor | None,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Metrics]:
    """With bounds that the schema would refuse too, infinite ones for example."""
    keys = {"clip_ratio_low": clip_low, "clip_ratio_high": clip_high, "clip_ratio_c": dual_clip}
    return ppo_clip(log_probs, old_log_probs, advantages, mask, Algorithm.model_construct(**keys))


def run(ratios: list[float], advantage: float, **options: float | None) -> tuple[Tensor, Tensor, dict[str, float]]:
    log_probs = torch.tensor([ratios]).log().requires_grad_()
    keys = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0, **options}
    loss, metrics = policy_loss(
        log_probs, torch.zeros_like(log_probs), torch.full_like(log_probs, advantage), None, **keys
    )
    loss.sum().backward()
    assert log_probs.grad is not None
    return loss.detach()[0], log_probs.grad[0], metrics.finalize()


@pytest.mark.parametrize(
    ("advantage", "losses", "gradients"),
    [
        (1.0, [-0.5, -0.79, -1, -1.25, -1.28, -1.28, -1.28, -1.28], [-0.5, -0.79, -1, -1.25, 0, 0, 0, 0]),
        (-1.0, [0.8, 0.8, 1, 1.25, 1.3, 2.9, 3, 3], [0, 0, 1, 1.25, 1.3, 2.9, 0, 0]),
        (-0.5, [0.4, 0.4, 0.5, 0.625, 0.65, 1.45, 1.5, 1.5], [0, 0, 0.5, 0.625, 0.65, 1.45, 0, 0]),
        (0.0, [0.0] * 8, [0.0] * 8),
    ],
)
def test_asymmetric_and_dual_clip(advantage: float, losses: list[float], gradients: list[float]) -> None:
    loss, gradient, _ = run(RATIOS, advantage)
    torch.testing.assert_close(loss, torch.tensor(losses), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, torch.tensor(gradients), rtol=1e-5, atol=1e-6)


def test_metrics() -> None:
    gaining, losing = run(RATIOS, 1.0)[2], run(RATIOS, -1.0)[2]
    assert gaining["actor/clip_frac"] == gaining["actor/clip_frac_high"] == 0.5
    assert gaining["actor/clip_frac_low"] == gaining["actor/dual_clip_frac"] == 0
    assert losing["actor/clip_frac"] == losing["actor/clip_frac_low"] == losing["actor/dual_clip_frac"] == 0.25
    assert losing["actor/clip_frac_high"] == 0
    assert gaining["actor/ratio_mean"] == pytest.approx(sum(RATIOS) / 8)
    assert gaining["actor/ratio_min"] == pytest.approx(0.5)
    assert gaining["actor/ratio_max"] == pytest.approx(10.0)
    assert gaining["actor/approx_kl"] == pytest.approx(-sum(map(math.log, RATIOS)) / 8)
    zero = run(RATIOS, 0.0)[2]
    assert zero["actor/clip_frac"] == zero["actor/dual_clip_frac"] == 0
    assert "actor/dual_clip_frac" not in run(RATIOS, 1.0, dual_clip=None)[2]


@given(ratio=st.floats(0.01, 100), advantage=st.floats(-5, 5), low=st.floats(0, 1), high=st.floats(0, 3))
def test_equals_the_textbook_formula(ratio: float, advantage: float, low: float, high: float) -> None:
    for dual in (None, 1.5):
        loss, _, metrics = run([ratio], advantage, clip_low=low, clip_high=high, dual_clip=dual)
        plain, clipped = -advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high)
        expected = max(plain, clipped)
        if dual is not None and advantage < 0:
            expected = min(expected, -advantage * dual)
        assert loss.item() == pytest.approx(expected, rel=1e-4, abs=1e-5)
        if abs(clipped - plain) > 1e-4:
            assert metrics["actor/clip_frac"] == float(clipped > plain)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_infinite_bounds_switch_clipping_off(advantage: float) -> None:
    without = run(RATIOS, advantage, dual_clip=None)
    infinite = run(RATIOS, advantage, dual_clip=math.inf)
    assert torch.equal(without[0], infinite[0])
    assert torch.equal(without[1], infinite[1])
    loss, gradient, metrics = run(RATIOS, advantage, clip_low=math.inf, clip_high=math.inf, dual_clip=None)
    torch.testing.assert_close(loss, -advantage * torch.tensor(RATIOS))
    torch.testing.assert_close(gradient, loss)
    assert metrics["actor/clip_frac"] == 0


@pytest.mark.parametrize("log_ratio", [-1e4, 1e4])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_extreme_ratios_stay_finite(log_ratio: float, advantage: float) -> None:
    log_probs = torch.tensor([[log_ratio]], requires_grad=True)
    loss, metrics = policy_loss(log_probs, torch.zeros(1, 1), torch.tensor([[advantage]]), None, 0.2, 0.2)
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert log_probs.grad is not None
    assert torch.isfinite(log_probs.grad).all()
    assert all(math.isfinite(value) for value in metrics.finalize().values())


def test_gradient_matches_finite_differences() -> None:
    """Positions on both sides of every kink, none near one."""
    ratios = torch.tensor([[0.5, 0.9, 1.1, 1.6, 5.0]], dtype=torch.float64).repeat(2, 1)
    advantages = torch.tensor([[1.3], [-0.7]], dtype=torch.float64).expand(2, 5)
    log_probs = ratios.log().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: policy_loss(x, torch.zeros_like(ratios), advantages, None, 0.2, 0.28, 3.0)[0], log_probs
    )
