"""Several choices from one row of logits, against a calculation by hand."""

from __future__ import annotations

import math

import torch
from torch.testing import assert_close

from rl_platform.models.choices import chosen, entropies, log_distributions, of_choices

LOGITS = torch.tensor([[0.0, math.log(3), 0.0, 0.0, math.log(2)]])  # probabilities 1/4, 3/4 | 1/4, 1/4, 1/2


def test_probabilities_and_entropies_by_hand() -> None:
    log_probs = log_distributions(LOGITS, (2, 3))
    assert_close(log_probs.exp(), torch.tensor([[[0.25, 0.75, 0.0], [0.25, 0.25, 0.5]]]))
    # H = log 4 - 3/4 log 3, and 1/4 log 4 + 1/4 log 4 + 1/2 log 2 = 3/2 log 2
    assert_close(entropies(log_probs), torch.tensor([[math.log(4) - 0.75 * math.log(3), 1.5 * math.log(2)]]))
    assert_close(of_choices(log_probs, torch.tensor([[1, 2]])), torch.tensor([[math.log(0.75), math.log(0.5)]]))


def test_gradients_are_those_of_separate_softmaxes() -> None:
    logits = LOGITS.clone().requires_grad_()
    log_probs = log_distributions(logits, (2, 3))
    (of_choices(log_probs, torch.tensor([[1, 2]])).sum() + entropies(log_probs).sum()).backward()
    apart = LOGITS.clone().requires_grad_()
    parts = [part.log_softmax(-1) for part in apart.split([2, 3], -1)]
    (parts[0][0, 1] + parts[1][0, 2] - sum((part.exp() * part).sum() for part in parts)).backward()
    assert_close(logits.grad, apart.grad)


def test_samples_have_these_frequencies_and_never_a_choice_that_does_not_exist() -> None:
    log_probs = log_distributions(LOGITS.expand(4000, -1), (2, 3))
    drawn, _ = chosen(log_probs, torch.Generator().manual_seed(0), False, None)
    frequencies = torch.nn.functional.one_hot(drawn, 3).float().mean(0)
    assert_close(frequencies, torch.tensor([[0.25, 0.75, 0.0], [0.25, 0.25, 0.5]]), atol=0.03, rtol=0)
    assert chosen(log_probs[:1], None, True, None)[0].tolist() == [[1, 2]]
