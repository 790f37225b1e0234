"""The hand-written backward pass of log-probs and entropies equals autograd. GPUs use it; a CPU computes it here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rl_platform import acceleration
from rl_platform.accel.fused_log_probs import fused_log_probs
from rl_platform.models import language
from rl_platform.models.language import LogitTransform, Statistic, token_log_probs

STATISTICS: list[Statistic] = ["none", "entropy", "entropy_gradient"]
TRANSFORMS = [LogitTransform(), LogitTransform(scale=0.5), LogitTransform(scale=1.5, softcap=2.0)]
ROWS, WIDTH, VOCABULARY = 7, 5, 11


@pytest.fixture(autouse=True)
def _chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "TOKENS_PER_CHUNK", 3)


def inputs(dtype: torch.dtype, *, frozen: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    states = torch.randn(ROWS, WIDTH, generator=random, dtype=dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=random, dtype=dtype).requires_grad_(not frozen)
    return states, torch.randint(VOCABULARY, (ROWS,), generator=random), weight


@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_equal_autograd(
    temperature: float, statistic: Statistic, transform: LogitTransform
) -> None:
    states, targets, weight = inputs(torch.float32)
    results = []
    for function in (fused_log_probs, token_log_probs):
        log_probs, entropies = function(states, targets, weight, temperature, statistic, transform)
        assert (entropies is None) == (statistic == "none")
        loss = (log_probs * torch.arange(ROWS)).sum()
        if entropies is not None and statistic == "entropy_gradient":
            loss = loss + (entropies * torch.arange(ROWS).flip(0)).sum()
        values = [log_probs, *([] if entropies is None else [entropies])]
        results.append([*values, *torch.autograd.grad(loss, (states, weight))])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
def test_gradients_of_both_outputs_equal_differences(
    transform: LogitTransform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tensor, "float", lambda self: self)  # the plain forward pass computes in float32
    states, targets, weight = inputs(torch.float64)

    def function(states: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        return fused_log_probs(states, targets, weight, 0.7, "entropy_gradient", transform)

    assert torch.autograd.gradcheck(function, (states, weight))


def test_a_frozen_matrix_gets_no_gradient_and_logged_entropies_have_none() -> None:
    states, targets, weight = inputs(torch.float32, frozen=True)
    log_probs, entropies = fused_log_probs(states, targets, weight, 1.0, "entropy", LogitTransform())
    assert entropies is not None
    assert not entropies.requires_grad
    log_probs.sum().backward()
    assert weight.grad is None
    assert states.grad is not None


def test_products_are_computed_in_the_precision_of_autocast() -> None:
    states, targets, weight = inputs(torch.float32)
    exact = fused_log_probs(states, targets, weight, 1.0, "none", LogitTransform())[0]
    with torch.autocast("cpu", torch.bfloat16):
        half = fused_log_probs(states, targets, weight, 1.0, "none", LogitTransform())[0]
        plain = token_log_probs(states, targets, weight, 1.0, "none", LogitTransform())[0]
    assert half.dtype == torch.float32
    assert torch.equal(half, plain)
    assert not torch.equal(half, exact)
    half.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


def test_a_cpu_and_a_run_without_accelerators_use_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    assert acceleration.find("log_probs_function", torch.device("cpu")) is None
    assert acceleration.find("log_probs_function", gpu) is fused_log_probs
    monkeypatch.setenv(acceleration.VARIABLE, "off")
    assert acceleration.find("log_probs_function", gpu) is None
