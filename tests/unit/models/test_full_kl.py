"""KL over the whole vocabulary from hidden states: chunks change nothing, and both models may differ in width."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from rl_platform.algorithms.kl import full_kl
from rl_platform.models import full_kl as module
from rl_platform.models.full_kl import full_kl_of_states


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_chunks_change_neither_values_nor_gradients(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = torch.Generator().manual_seed(0)
    states, weight, reference_states, reference_weight = (
        torch.randn(shape, generator=numbers) for shape in ((7, 4), (11, 4), (7, 6), (11, 6))
    )
    leaves = [states.requires_grad_(), weight.requires_grad_()]
    logits, reference_logits = F.linear(states, weight) / 0.7, F.linear(reference_states, reference_weight) / 0.7
    expected = full_kl(logits, reference_logits)
    gradients = torch.autograd.grad(expected.square().sum(), leaves)
    monkeypatch.setattr(module, "TOKENS_PER_CHUNK", chunk)
    divergence = full_kl_of_states(states, weight, reference_states, reference_weight, temperature=0.7)
    torch.testing.assert_close(divergence, expected)
    torch.testing.assert_close(torch.autograd.grad(divergence.square().sum(), leaves), gradients)
    with torch.no_grad():
        torch.testing.assert_close(full_kl_of_states(states, weight, reference_states, reference_weight, 0.7), expected)
