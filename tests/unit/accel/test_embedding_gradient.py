"""Gradients of embeddings that are added in place: autograd's bits, without a dense tensor of their own."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_platform.accel.embedding_gradient import add_in_place

TOKENS = torch.tensor([[3, 5, 3, 0], [3, 0, 6, 3]])
VOCABULARY, WIDTH = 7, 5


def embedding(padding: int | None) -> nn.Embedding:
    torch.manual_seed(1)
    return nn.Embedding(VOCABULARY, WIDTH, padding_idx=padding)


def passes(module: nn.Embedding, *, tied: bool, number: int) -> Tensor:
    """Returns the gradient after some backward passes."""
    for _ in range(number):
        states = module(TOKENS) * torch.linspace(0.1, 0.7, WIDTH)
        outputs = F.linear(states.cumsum(1), module.weight) if tied else states.cumsum(1)
        outputs.sin().sum().backward()
    assert module.weight.grad is not None
    return module.weight.grad


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("padding", [None, 0])
def test_gradients_have_the_bits_of_autograd(padding: int | None, tied: bool, number: int) -> None:
    plain = embedding(padding)
    lean = copy.deepcopy(plain)
    add_in_place(lean)
    assert torch.equal(lean(TOKENS), plain(TOKENS))
    assert torch.equal(passes(lean, tied=tied, number=number), passes(plain, tied=tied, number=number))


def test_a_tied_matrix_has_one_dense_gradient() -> None:
    def dense(module: nn.Embedding) -> int:
        """Returns how many tensors of the size of the matrix a backward pass allocates."""
        loss = F.linear(module(TOKENS), module.weight).sum()
        with torch.profiler.profile(profile_memory=True, record_shapes=True) as profile:
            loss.backward()
        size = module.weight.nbytes
        return sum(event.cpu_memory_usage >= size for event in profile.events() if not event.cpu_children)

    torch.manual_seed(1)
    plain = nn.Embedding(1000, WIDTH)
    lean = copy.deepcopy(plain)
    add_in_place(lean)
    assert dense(lean) < dense(plain)


def test_frozen_matrices_and_evaluations_are_torchs() -> None:
    module = embedding(None)
    add_in_place(module)
    with torch.no_grad():
        assert not module(TOKENS).requires_grad
    module.requires_grad_(False)
    assert not module(TOKENS).requires_grad
