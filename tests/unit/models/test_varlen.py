"""Flash attention of packed sequences equals attention with masks: outputs and gradients.

A CPU has no such kernel. A slow one of the same signature, whose queries and keys are aligned at their ends, stands in.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from rl_platform.models import packed
from rl_platform.models.attention import Features, attend, causal_mask
from rl_platform.models.packed import pack
from rl_platform.models.varlen import VarlenAttention, half_precision, kernel_parameters

SIGNATURE = inspect.signature(varlen.varlen_attn)


@functools.wraps(varlen.varlen_attn)
def slow_varlen_attn(*args: Any, **kwargs: Any) -> Tensor:
    """`torch.nn.attention.varlen.varlen_attn`, sequence by sequence."""
    call = SIGNATURE.bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    assert given["cu_seq_q"].dtype == given["cu_seq_k"].dtype == torch.int32
    before, after = given["window_size"]
    assert after == 0
    window = None if before == -1 else before + 1
    query_ends, key_ends = given["cu_seq_q"].tolist(), given["cu_seq_k"].tolist()
    assert given["max_q"] == max(b - a for a, b in pairwise(query_ends))
    assert given["max_k"] == max(b - a for a, b in pairwise(key_ends))
    outs = []
    for (first, last), (first_key, last_key) in zip(pairwise(query_ends), pairwise(key_ends), strict=True):
        query = given["query"][first:last].transpose(0, 1)
        repeat = given["query"].shape[1] // given["key"].shape[1]
        key, value = (
            given[name][first_key:last_key].transpose(0, 1).repeat_interleave(repeat, dim=0)
            for name in ("key", "value")
        )
        mask = causal_mask(last - first, last_key - first_key, window, query.device)
        outs.append(attend(query, key, value, mask, given["scale"]).transpose(0, 1))
    return torch.cat(outs)


@pytest.fixture(params=["torch 2.12", "torch 2.11"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-in as torch's kernel; that of torch 2.11 has no `enable_gqa`, and shares key heads without it."""

    def older(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)) -> Tensor:
        options = {"scale": scale, "window_size": window_size}
        return slow_varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, **options)

    monkeypatch.setattr(varlen, "varlen_attn", older if request.param == "torch 2.11" else slow_varlen_attn)
    kernel_parameters.cache_clear()
    yield
    kernel_parameters.cache_clear()


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("window", [None, 3, 1])
@pytest.mark.parametrize("lengths", [[9, 5, 7], [6, 6], [8]], ids=str)
@pytest.mark.parametrize("shared", [0, 4])
def test_outputs_and_gradients_equal_those_with_masks(shared: int, lengths: list[int], window: int | None) -> None:
    shared = shared if len(lengths) > 1 else 0
    sequences = [torch.arange(length) + 100 * row for row, length in enumerate(lengths)]
    for sequence in sequences:
        sequence[:shared] = torch.arange(shared)
    attention = pack(sequences).attention
    assert isinstance(attention, packed.PackedAttention)
    assert attention.prefix == shared
    count = shared + sum(length - shared for length in lengths)
    flash = VarlenAttention(shared, [length - shared for length in lengths], torch.device("cpu"))

    random = torch.Generator().manual_seed(1)
    shapes = [(1, heads, count, 8) for heads in (4, 2, 2)]
    tensors = [torch.randn(shape, generator=random, dtype=torch.float64, requires_grad=True) for shape in shapes]
    weight = torch.randn(count, 4, 8, generator=random, dtype=torch.float64)
    results = []
    for out in (attention(0, *tensors, 0.3, Features(window)), flash(*tensors, 0.3, window)):
        results.append([out, *torch.autograd.grad((out * weight).sum(), tensors)])
    for actual, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def test_a_gpu_stores_short_prefixes_with_every_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = [torch.tensor([5, 6, 7, 1]), torch.tensor([5, 6, 7, 2, 3])]
    monkeypatch.setitem(packed.SHARED, "cpu", 4)
    own = pack(sequences)
    assert own.tokens.tolist() == [5, 6, 7, 1, 5, 6, 7, 2, 3]
    assert own.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4]
    monkeypatch.setitem(packed.SHARED, "cpu", 3)
    assert pack(sequences).tokens.tolist() == [5, 6, 7, 1, 2, 3]


class OnGPU(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize(
    ("width", "dtype", "features", "covered"),
    [
        (8, torch.bfloat16, None, True),
        (8, torch.bfloat16, Features(window=3), True),
        (8, torch.float32, None, False),
        (6, torch.bfloat16, None, False),
        (512, torch.bfloat16, None, False),
        (8, torch.bfloat16, Features(softcap=1.0), False),
        (8, torch.bfloat16, Features(sinks=torch.zeros(2)), False),
    ],
)
def test_what_the_kernel_covers(
    width: int, dtype: torch.dtype, features: Features | None, covered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.zeros(1, 2, 3, width, dtype=dtype)
    assert half_precision(tensor, tensor, tensor, features) is None, "on a CPU"
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    there = tensor.as_subclass(OnGPU)
    assert (half_precision(there, there, there, features) is not None) == covered


def test_tensors_are_computed_in_the_precision_of_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    tensor = torch.zeros(1, 2, 3, 8).as_subclass(OnGPU)
    with torch.autocast("cpu", torch.bfloat16):
        halves = half_precision(tensor, tensor, tensor, None)
    assert halves is not None
    assert {half.dtype for half in halves} == {torch.bfloat16}


def test_a_torch_without_scale_or_without_the_kernel_uses_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    tensor = torch.zeros(1, 2, 3, 8, dtype=torch.bfloat16).as_subclass(OnGPU)
    for parameters in (frozenset({"is_causal", "return_aux"}), frozenset()):  # torch 2.10, 2.9
        monkeypatch.setattr("rl_platform.models.varlen.kernel_parameters", lambda found=parameters: found)
        assert half_precision(tensor, tensor, tensor, None) is None
