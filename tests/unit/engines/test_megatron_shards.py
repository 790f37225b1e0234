"""Any stretch of any rank's parameter is put where it belongs in the whole tensors, as a view."""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rl_platform.engines.training.megatron.shards import boxes, placed
from rl_platform.engines.training.megatron.weights import source_of

CONFIG = SimpleNamespace(num_attention_heads=8, num_key_value_heads=4, head_dim=3, vocab_size=31, hidden_size=10)
WHOLE = {
    "decoder.layers.1.self_attention.linear_qkv.weight": [(24, 10), (12, 10), (12, 10)],
    "decoder.layers.1.self_attention.linear_qkv.bias": [(24,), (12,), (12,)],
    "decoder.layers.1.self_attention.linear_proj.weight": [(10, 24)],
    "decoder.layers.1.mlp.linear_fc1.weight": [(12, 10), (12, 10)],
    "decoder.layers.1.mlp.linear_fc2.weight": [(10, 12)],
    "embedding.word_embeddings.weight": [(31, 10)],
    "decoder.final_layernorm.weight": [(10,)],
}


@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=4), data=st.data())
def test_boxes_are_the_stretch_in_order(shape: list[int], data: st.DataObject) -> None:
    stop = data.draw(st.integers(0, math.prod(shape)))
    start = data.draw(st.integers(0, stop))
    numbers = torch.arange(math.prod(shape)).view(shape)
    elements = []
    for offsets, sizes in boxes(shape, start, stop):
        box = numbers[tuple(slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))]
        assert box.shape == sizes
        elements += box.flatten().tolist()
    assert elements == list(range(start, stop))


@pytest.mark.parametrize("cuts", [1, 3], ids=["parameters", "stretches of them"])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", WHOLE)
def test_all_ranks_together_make_up_the_whole(name: str, size: int, cuts: int) -> None:
    """What `split` deals out comes back to its place, each element once; and a view writes through."""
    source = source_of(name, 0, CONFIG, size, value_head=False)
    shapes = WHOLE[name]
    whole = [torch.rand(shape) for shape in shapes]
    joined = [torch.full(shape, math.nan) for shape in shapes]
    times = [torch.zeros(shape) for shape in shapes]
    for rank in range(1 if source.sharing == "replicated" else size):
        own = source.split(whole, rank).clone()
        for start, values in stretches(own, cuts):
            for index, offsets, part in placed(source, rank, own.shape, shapes, values, start):
                assert part.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()
                where = tuple(slice(first, first + count) for first, count in zip(offsets, part.shape, strict=True))
                joined[index][where] = part
                times[index][where] += 1
    assert all(torch.equal(*pair) for pair in zip(joined, whole, strict=True))
    assert all(bool((count == 1).all()) for count in times)


def stretches(own: Tensor, cuts: int) -> list[tuple[int, Tensor]]:
    """As the distributed optimizer deals them out: across rows."""
    flat = own.view(-1)
    ends = [round(len(flat) * number / cuts) for number in range(cuts + 1)]
    return [(start, flat[start:stop]) for start, stop in pairwise(ends)]
