"""The backward pass of log-probs on the logits' own memory has the bits of autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rl_platform.models.language import LogitTransform, Statistic, token_log_probs

ROWS, WIDTH, VOCABULARY = 37, 5, 301
TRANSFORMS = [LogitTransform(), LogitTransform(scale=0.5), LogitTransform(scale=1.5, softcap=2.0)]


def by_autograd(
    states: Tensor, targets: Tensor, weight: Tensor, temperature: float, transform: LogitTransform
) -> tuple[Tensor, Tensor]:
    logits = transform(F.linear(states, weight).float()) / temperature
    norm = torch.logsumexp(logits, dim=-1)
    entropy = (norm - (torch.exp(logits - norm[:, None]) * logits).sum(dim=-1)).detach()
    return logits.gather(1, targets[:, None]).squeeze(1) - norm, entropy


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    states = torch.randn(ROWS, WIDTH, generator=random).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=random).requires_grad_()
    return states, torch.randint(VOCABULARY, (ROWS,), generator=random), weight


@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
@pytest.mark.parametrize("statistic", ["none", "entropy"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("half", [False, True])
def test_values_and_gradients_are_those_of_autograd(
    half: bool, temperature: float, statistic: Statistic, transform: LogitTransform
) -> None:
    states, targets, weight = inputs()
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        log_probs, entropies = token_log_probs(states, targets, weight, temperature, statistic, transform)
        expected, expected_entropies = by_autograd(states, targets, weight, temperature, transform)
    assert torch.equal(log_probs, expected)
    assert (entropies is None) == (statistic == "none")
    assert entropies is None or (torch.equal(entropies, expected_entropies) and not entropies.requires_grad)
    factors = torch.linspace(-1, 1, ROWS)
    gradients, expected_gradients = (
        torch.autograd.grad((values * factors).sum(), (states, weight)) for values in (log_probs, expected)
    )
    assert all(torch.equal(*pair) for pair in zip(gradients, expected_gradients, strict=True))


def test_logits_are_the_only_tensor_of_their_size_in_training() -> None:
    states, targets, weight = inputs()
    saved: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        token_log_probs(states, targets, weight, 0.7, "entropy")
    assert sum(numel == ROWS * VOCABULARY for numel in saved) == 1


def test_on_a_cpu_logits_are_allocated_once() -> None:
    states, weight, targets = torch.randn(64, WIDTH), torch.randn(VOCABULARY, WIDTH), torch.arange(64) % VOCABULARY
    states.requires_grad_()
    with torch.profiler.profile(profile_memory=True) as profile:
        token_log_probs(states, targets, weight, 0.7, "entropy")[0].sum().backward()  # type: ignore[no-untyped-call]
    size = 64 * VOCABULARY * 4
    assert sum(event.self_cpu_memory_usage >= size for event in profile.events()) == 1


def test_no_positions_have_no_log_probs() -> None:
    log_probs, entropies = token_log_probs(
        torch.zeros(0, WIDTH), torch.zeros(0, dtype=torch.int64), torch.randn(VOCABULARY, WIDTH), 0.7, "entropy"
    )
    assert entropies is not None
    assert len(log_probs) == len(entropies) == 0


def test_a_second_backward_pass_is_refused() -> None:
    states, targets, weight = inputs()
    total = token_log_probs(states, targets, weight, 0.7, "none")[0].sum()
    total.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()  # type: ignore[no-untyped-call]
