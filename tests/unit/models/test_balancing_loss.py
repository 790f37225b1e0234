"""The load-balancing loss of routers: numbers by hand, and independence of how sequences are packed and split."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rl_platform.models.experts.balancing_loss import sequence_balance


def same(counts: Tensor) -> Tensor:
    return counts


def test_by_hand() -> None:
    """Two experts, one per token; two sequences of two tokens and one token."""
    scores = torch.tensor([[0.75, 0.25], [0.5, 0.5], [1.0, 3.0]])  # the last are sigmoids that add up to 4
    selected = torch.tensor([[True, False], [True, False], [False, True]])
    membership = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    found = sequence_balance(scores, selected, membership, torch.tensor([2.0, 1.0]), 1, same)
    # 2 (1 * (0.75 + 0.5) / 2) and 2 (1 * 3 / 4)
    assert found.tolist() == pytest.approx([1.25, 1.5])


def test_equal_shares_are_one() -> None:
    selected = torch.eye(4, dtype=torch.bool) | torch.eye(4, dtype=torch.bool).roll(1, 0)
    lengths = torch.tensor([4.0])
    found = sequence_balance(torch.full((4, 4), 0.25), selected, torch.ones(1, 4), lengths, 2, same)
    assert found.tolist() == pytest.approx([1.0])


def test_a_shared_prefix_and_split_tokens_change_nothing() -> None:
    draw = torch.Generator().manual_seed(0)
    scores = torch.rand(7, 4, generator=draw, requires_grad=True)
    selected = torch.zeros(7, 4, dtype=torch.bool).scatter(1, scores.topk(2).indices, True)
    lengths = torch.tensor([5.0, 4.0])
    packed = torch.tensor([[1.0, 1, 1, 1, 1, 0, 0], [1.0, 1, 0, 0, 0, 1, 1]])  # both begin with two tokens
    expected = sequence_balance(scores, selected, packed, lengths, 2, same)
    for row, tokens in enumerate(([0, 1, 2, 3, 4], [0, 1, 5, 6])):
        alone = sequence_balance(
            scores[tokens], selected[tokens], torch.ones(1, len(tokens)), lengths[row : row + 1], 2, same
        )
        torch.testing.assert_close(alone, expected[row : row + 1])
    counts = packed @ selected.float()
    parts = [
        sequence_balance(scores[part], selected[part], packed[:, part], lengths, 2, lambda _: counts)
        for part in (slice(0, 3), slice(3, 7))
    ]
    torch.testing.assert_close(parts[0] + parts[1], expected)
    gradients = [torch.autograd.grad(loss.sum(), scores, retain_graph=True)[0] for loss in (expected, sum(parts))]
    torch.testing.assert_close(gradients[1], gradients[0])
