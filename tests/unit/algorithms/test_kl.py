from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_platform.algorithms.kl import KLController, full_kl, kl_estimate, kl_loss_estimate, sequence_mean_kl
from rl_platform.config.schema.algorithm import KLControl
from rl_platform.errors import CheckpointError

DIFFERENCES = [-3.0, -2.0, -0.5, 0.0, 0.5, 2.0]
VALUES_AND_GRADIENTS = {
    "k1": ([-3, -2, -0.5, 0, 0.5, 2], [1, 1, 1, 1, 1, 1]),
    "abs": ([3, 2, 0.5, 0, 0.5, 2], [-1, -1, -1, 0, 1, 1]),
    "k2": ([4.5, 2, 0.125, 0, 0.125, 2], [-3, -2, -0.5, 0, 0.5, 2]),
    "k3": (
        [16.085537, 4.389056, 0.148721, 0, 0.106531, 1.135335],
        [-19.085537, -6.389056, -0.648721, 0, 0.393469, 0.864665],
    ),
    "k1+": ([-3, -2, -0.5, 0, 0.5, 2], [-3, -2, -0.5, 0, 0.5, 2]),
    "abs+": ([3, 2, 0.5, 0, 0.5, 2], [-3, -2, -0.5, 0, 0.5, 2]),
    "k3+": ([16.085537, 4.389056, 0.148721, 0, 0.106531, 1.135335], [-3, -2, -0.5, 0, 0.5, 2]),
}


def estimate(difference: torch.Tensor, estimator: str, clip: float | None = None) -> torch.Tensor:
    return kl_estimate(difference, torch.zeros_like(difference), None, estimator, clip)


@pytest.mark.parametrize("estimator", VALUES_AND_GRADIENTS)
def test_values_and_gradients(estimator: str) -> None:
    difference = torch.tensor([DIFFERENCES], requires_grad=True)
    kl = estimate(difference, estimator)
    kl.sum().backward()
    values, gradients = VALUES_AND_GRADIENTS[estimator]
    torch.testing.assert_close(kl.detach(), torch.tensor([values], dtype=torch.float32), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(difference.grad, torch.tensor([gradients], dtype=torch.float32), rtol=1e-5, atol=1e-6)


def test_output_clip_bounds_k3_and_its_gradient() -> None:
    difference = torch.tensor([DIFFERENCES], requires_grad=True)
    clipped = estimate(difference, "k3", clip=10.0)
    clipped.sum().backward()
    assert clipped[0, 0] == 10
    assert difference.grad is not None
    assert difference.grad[0, 0] == 0
    torch.testing.assert_close(clipped[0, 1:], estimate(difference, "k3")[0, 1:])


def test_output_clip_bounds_only_the_value_of_a_straight_through_form() -> None:
    difference = torch.tensor([DIFFERENCES], requires_grad=True)
    clipped = estimate(difference, "k3+", clip=10.0)
    clipped.sum().backward()
    expected = torch.tensor([[10, 4.389056, 0.148721, 0, 0.106531, 1.135335]])
    torch.testing.assert_close(clipped.detach(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(difference.grad, difference.detach())


@pytest.mark.parametrize(
    ("name", "alias"), [("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl"), ("k1+", "kl+"), ("k3+", "low_var_kl+")]
)
def test_aliases(name: str, alias: str) -> None:
    difference = torch.tensor([DIFFERENCES])
    assert torch.equal(estimate(difference, name), estimate(difference, alias))


def test_k3_survives_extreme_differences() -> None:
    kl = estimate(torch.tensor([[-1e4, -30.0, 30.0, 1e4]]), "k3")
    assert torch.isfinite(kl).all()
    assert (kl >= 0).all()


@given(st.floats(-1e-3, 1e-3))
def test_k3_keeps_its_digits_near_zero(difference: float) -> None:
    exact = estimate(torch.tensor([[difference]], dtype=torch.float64), "k2")
    kl = estimate(torch.tensor([[difference]], dtype=torch.float32), "k3")
    torch.testing.assert_close(kl.double(), exact, rtol=1e-3, atol=1e-12 + 2e-7 * abs(difference))


@pytest.mark.parametrize("estimator", VALUES_AND_GRADIENTS)
def test_nothing_leaks_from_masked_positions(estimator: str) -> None:
    log_probs = torch.tensor([[-1.0, float("nan"), float("inf")]], requires_grad=True)
    mask = torch.tensor([[True, False, False]])
    kl = kl_estimate(log_probs, torch.tensor([[-1.5, 0.0, float("nan")]]), mask, estimator)
    kl.sum().backward()
    assert not kl[0, 1:].any()
    assert log_probs.grad is not None
    assert not log_probs.grad[0, 1:].any()


@pytest.mark.parametrize("gradient", ["path", "k2", "score"])
@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3", "k1+"])
def test_nothing_leaks_into_the_loss_term_from_masked_positions(estimator: str, gradient: str) -> None:
    nan, inf = float("nan"), float("inf")
    log_probs = torch.tensor([[-1.0, nan, inf]], requires_grad=True)
    old, reference = torch.tensor([[-1.2, 0.0, nan]]), torch.tensor([[-1.5, nan, inf]])
    kl = kl_loss_estimate(log_probs, old, reference, torch.tensor([[True, False, False]]), estimator, gradient)
    kl.sum().backward()
    assert not kl[0, 1:].any()
    assert log_probs.grad is not None
    assert log_probs.grad[0, 0] != 0
    assert not log_probs.grad[0, 1:].any()


@pytest.mark.parametrize("gradient", ["path", "k2", "score"])
def test_extreme_loss_terms_stay_finite(gradient: str) -> None:
    log_probs = torch.tensor([[-1e4, -30.0, 30.0, 1e4]], requires_grad=True)
    zeros = torch.zeros_like(log_probs)
    kl = kl_loss_estimate(log_probs, zeros, zeros, None, "k3", gradient)
    kl.sum().backward()
    assert log_probs.grad is not None
    assert torch.isfinite(kl).all()
    assert torch.isfinite(log_probs.grad).all()


LOGITS = torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64)
OLD = torch.tensor([0.3, 0.9, -0.4], dtype=torch.float64).log_softmax(0)  # where off-policy samples come from
REFERENCE = torch.ones(3, dtype=torch.float64).log_softmax(0)
OF_KL = [0.282587, -0.140770, -0.141817]  # the gradient of KL(pi || ref) in the logits


@pytest.mark.parametrize(
    ("estimator", "mode", "value", "gradient"),
    [
        ("k1", "path", 0.266217, [0, 0, 0]),
        ("k2", "path", 0.247638, OF_KL),
        ("k3", "path", 0.266217, [0.331908, -0.088605, -0.243303]),
        ("k1+", "path", 0.266217, OF_KL),
        ("k3+", "path", 0.266217, OF_KL),
        ("k1", "k2", 0.266217, OF_KL),
        ("k3", "k2", 0.266217, OF_KL),
        ("k1", "score", 0.266217, OF_KL),
        ("k3", "score", 0.266217, OF_KL),
    ],
)
def test_expected_gradient_by_enumeration(estimator: str, mode: str, value: float, gradient: list[float]) -> None:
    """Over the whole vocabulary: k1 as a loss regularises nothing, k2 has the gradient of KL(pi || ref)."""
    logits = LOGITS.clone().requires_grad_()
    log_probs = logits.log_softmax(0)
    kl = kl_loss_estimate(log_probs, log_probs.detach(), REFERENCE, None, estimator, mode)
    expectation = (log_probs.detach().exp() * kl).sum()
    expectation.backward()
    torch.testing.assert_close(expectation.item(), value, rtol=0, atol=1e-6)
    torch.testing.assert_close(logits.grad, torch.tensor(gradient, dtype=torch.float64), rtol=0, atol=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_score_form_is_right_off_policy_too(estimator: str) -> None:
    """Samples from old weights; a plain exp(log pi - stop(log pi)) would be right only for samples of pi."""
    logits = LOGITS.clone().requires_grad_()
    kl = kl_loss_estimate(logits.log_softmax(0), OLD, REFERENCE, None, estimator, "score")
    expectation = (OLD.exp() * kl).sum()
    expectation.backward()
    torch.testing.assert_close(expectation.item(), 0.266217, rtol=0, atol=1e-6)
    torch.testing.assert_close(logits.grad, torch.tensor(OF_KL, dtype=torch.float64), rtol=0, atol=1e-6)


def test_full_kl() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0], [5.0, 5.0, 5.0]], requires_grad=True)
    kl = full_kl(logits, torch.tensor([[1.0, 1.0, 1.0], [-3.0, -3.0, -3.0]]))
    kl.sum().backward()
    torch.testing.assert_close(kl.detach(), torch.tensor([0.266217, 0.0]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits.grad, torch.tensor([OF_KL, [0.0] * 3]), rtol=1e-5, atol=1e-6)
    other_way = full_kl(torch.ones(1, 3), torch.tensor([[2.0, 1.0, 0.0]]))
    assert other_way.item() == pytest.approx(0.308994, rel=1e-5)


@given(st.integers(0, 10_000))
def test_full_kl_is_what_the_sampled_estimators_estimate(seed: int) -> None:
    logits, reference = torch.randn(2, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    exact = full_kl(logits, reference)
    log_probs = logits.log_softmax(-1)
    for estimator in ("k1", "k3"):
        kl = kl_estimate(log_probs, reference.log_softmax(-1), None, estimator)
        torch.testing.assert_close((log_probs.exp() * kl).sum(-1), exact)


def test_mean_over_sequences_of_the_means_over_tokens() -> None:
    kl = torch.tensor([[1.0, 3.0, float("nan")], [4.0, 9.0, 9.0], [9.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]], dtype=torch.bool)
    assert sequence_mean_kl(kl, mask) == 3.0
    assert sequence_mean_kl(kl, torch.zeros_like(mask)) == 0.0


ADAPTIVE = KLControl(type="adaptive", kl_coef=0.1, target_kl=0.1, horizon=10_000.0)


def test_adaptive_controller() -> None:
    controller = KLController(ADAPTIVE)
    expected = [0.100512, 0.100512, 0.09999737856, 0.10025337184911]
    for kl, coefficient in zip([0.3, 0.1, 0.02, 0.11], expected, strict=True):
        controller.update(kl, trajectories=256)
        assert controller.coefficient == pytest.approx(coefficient, rel=1e-9)
    resumed = KLController(ADAPTIVE)
    resumed.load_state_dict(controller.state_dict())
    for one in (controller, resumed):
        one.update(0.02, 256)
    assert resumed.coefficient == controller.coefficient


def test_a_resume_with_another_initial_coefficient_begins_there() -> None:
    controller = KLController(ADAPTIVE)
    controller.update(0.3, trajectories=256)
    changed = KLController(ADAPTIVE.model_copy(update={"kl_coef": 0.5}))
    changed.load_state_dict(controller.state_dict())
    assert changed.coefficient == 0.5
    again = KLController(ADAPTIVE)
    again.load_state_dict({"coefficient": controller.coefficient})  # of a checkpoint without the initial value
    assert again.coefficient == controller.coefficient


@given(kl=st.floats(0, 1e6), trajectories=st.integers(1, 4096), target=st.floats(1e-3, 10))
def test_adaptive_step_has_the_right_sign_and_is_bounded(kl: float, trajectories: int, target: float) -> None:
    controller = KLController(ADAPTIVE.model_copy(update={"target_kl": target}))
    controller.update(kl, trajectories)
    change = controller.coefficient / 0.1 - 1
    assert abs(change) <= 0.2 * trajectories / 10_000 + 1e-12
    assert (change >= -1e-12) if kl >= target else (change <= 1e-12)


def test_fixed_controller_stays_and_its_state_is_refused_by_an_adaptive_one() -> None:
    fixed = KLController(KLControl(kl_coef=0.2))
    fixed.update(100.0, 256)
    fixed.load_state_dict({"coefficient": 7.0})
    assert fixed.coefficient == 0.2
    with pytest.raises(CheckpointError, match=r"kl_ctrl\.type=fixed"):
        KLController(ADAPTIVE).load_state_dict(fixed.state_dict())
