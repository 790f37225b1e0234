"""On a GPU: flash attention of packed sequences equals attention with masks."""

from __future__ import annotations

import pytest
import torch

from rl_platform.models.attention import Features
from rl_platform.models.packed import pack
from rl_platform.models.varlen import VarlenAttention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("shared", [0, 300])
def test_outputs_and_gradients(shared: int, window: int | None) -> None:
    lengths = [500, 301, 400]
    sequences = [torch.arange(length) + 1000 * row for row, length in enumerate(lengths)]
    for sequence in sequences:
        sequence[:shared] = torch.arange(shared)
    attention = pack(sequences).attention
    count = shared + sum(length - shared for length in lengths)
    random = torch.Generator().manual_seed(1)
    tensors = [torch.randn((1, heads, count, 64), generator=random, requires_grad=True) for heads in (4, 2, 2)]
    weight = torch.randn(count, 4, 64, generator=random)
    expected = attention(0, *tensors, 0.125, Features(window))
    wanted = [expected, *torch.autograd.grad((expected * weight).sum(), tensors)]

    device = torch.device("cuda", 0)
    there = [tensor.detach().to(device, torch.bfloat16).requires_grad_() for tensor in tensors]
    flash = VarlenAttention(shared, [length - shared for length in lengths], device)
    out = flash(*there, 0.125, window)
    found = [out, *torch.autograd.grad((out * weight.to(device)).sum(), there)]
    for actual, exact in zip(found, wanted, strict=True):
        difference = (actual.detach().cpu().float() - exact.detach()).norm() / exact.detach().norm()
        assert difference < 0.02  # bfloat16
