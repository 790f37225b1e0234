"""Triton kernels of a decoding step: attention of one new token per running sequence, over the pages of a `KVCache`.

A program computes a part of the pages of one row and one key head, for all query heads that share the key head. A
second kernel combines the parts by their normalisers (Dao et al. 2023, flash decoding). Which pages a row has, and how
many tokens, is read from device memory, so a CUDA graph that contains the kernels stays valid as sequences grow.

Scores, weights and sums are float32. Products of float32 are exact float32 products, not TF32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_platform.models.attention import Features

LOG2_E = 1.4426950408889634
PROGRAMS = 512  # enough for every multiprocessor to have several
MOST_SPLITS = 32


@triton.jit
def _page(table, page_stride, page, row, layer, offset, type: tl.constexpr):
    """Pointers to keys and values, `offset` bytes from the start of the page in `layer`."""
    entry = table + page * page_stride + 2 * row
    stride = tl.load(entry + 1)  # bytes from layer to layer; values follow keys after half of it
    keys = tl.load(entry) + layer * stride + offset
    values = keys + stride // 2
    # without the hint each number is loaded alone
    return tl.multiple_of(keys.to(tl.pointer_type(type)), 16), tl.multiple_of(values.to(tl.pointer_type(type)), 16)


@triton.jit(do_not_specialize=["layer"])
def _write(
    key,
    value,
    lengths,
    table,
    layer,
    key_row,
    key_head,
    value_row,
    value_head,
    page_stride,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Writes the new key and value [D] of a row and a head to the row's last page."""
    row, head = tl.program_id(0), tl.program_id(1)
    last = tl.load(lengths + row).to(tl.int32) - 1
    if last >= 0:
        type: tl.constexpr = key.dtype.element_ty
        offset = (head * PAGE + last % PAGE) * D * SIZE
        keys, values = _page(table, page_stride, last // PAGE, row, layer, offset, type)
        places = tl.arange(0, WIDTH)
        tl.store(keys + places, tl.load(key + row * key_row + head * key_head + places, places < D), places < D)
        tl.store(values + places, tl.load(value + row * value_row + head * value_head + places, places < D), places < D)


@triton.jit(do_not_specialize=["layer"])
def _attend(
    query,
    lengths,
    table,
    parts,
    logs,
    layer,
    scale,
    query_row,
    query_head,
    page_stride,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    SPLITS: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Writes the mean of the values of some pages [GROUP,D] and the base-2 logarithm of its normaliser [GROUP]."""
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    type: tl.constexpr = query.dtype.element_ty
    length = tl.load(lengths + row).to(tl.int32)
    pages = (length + PAGE - 1) // PAGE
    each = (pages + SPLITS - 1) // SPLITS
    members, places, tokens = tl.arange(0, MEMBERS), tl.arange(0, WIDTH), tl.arange(0, PAGE)
    number = head * GROUP + members
    used = (members < GROUP)[:, None] & (places < D)[None, :]
    asked = tl.load(query + row * query_row + number[:, None] * query_head + places[None, :], used, 0.0)
    top = tl.full([MEMBERS], float("-inf"), tl.float32)
    total = tl.zeros([MEMBERS], tl.float32)
    sums = tl.zeros([MEMBERS, WIDTH], tl.float32)
    for page in range(split * each, tl.minimum(split * each + each, pages)):
        keys_at, values_at = _page(table, page_stride, page, row, layer, head * (PAGE * D * SIZE), type)
        seen = page * PAGE + tokens < length
        keys_here = (places < D)[:, None] & seen[None, :]
        keys = tl.load(keys_at + tokens[None, :] * D + places[:, None], keys_here, 0.0)
        scores = tl.dot(asked, keys, input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - highest[:, None])
        shrink = tl.exp2(top - highest)
        total = total * shrink + tl.sum(weights, 1)
        values_here = seen[:, None] & (places < D)[None, :]
        values = tl.load(values_at + tokens[:, None] * D + places[None, :], values_here, 0.0)
        sums = sums * shrink[:, None] + tl.dot(weights.to(type), values, input_precision="ieee")
        top = highest
    empty = total == 0.0
    means = sums / tl.where(empty, 1.0, total)[:, None]
    line = (row * tl.num_programs(1) * GROUP + number) * SPLITS + split
    tl.store(parts + line[:, None] * D + places[None, :], means, used)
    tl.store(logs + line, tl.where(empty, float("-inf"), top + tl.log2(total)), members < GROUP)


@triton.jit
def _combine(parts, logs, out, SPLITS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """parts [SPLITS,D], logs [SPLITS] -> their mean [D], weighted by 2^logs; 0 if all are -inf."""
    line = tl.program_id(0)
    splits, places = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    normalisers = tl.load(logs + line * SPLITS + splits)
    top = tl.max(normalisers, 0)
    weights = tl.exp2(normalisers - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weights, 0)
    means = tl.load(parts + (line * SPLITS + splits)[:, None] * D + places[None, :], (places < D)[None, :], 0.0)
    mean = tl.sum(means * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + line * D + places, mean.to(out.dtype.element_ty), places < D)


class PagedAttention:
    """Attention of one new token per row, whose key and value it first writes into the cache.

    lengths [n] int64: tokens of each row with the new one; 0: a row without a sequence, whose output is 0.
    table [pages,rows >= n,2] int64: of each page of a row, the last of which is the row's tail, the address of the keys
    in the first layer and the bytes from layer to layer. page: tokens of a page.
    """

    def __init__(self, lengths: Tensor, table: Tensor, page: int) -> None:
        self.lengths, self.table, self.page = lengths, table, page

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, features: Features | None = None
    ) -> Tensor:
        """query [1,Hq,n,D], key and value [1,Hkv,n,D] -> [n,Hq,D]. A window must be as long as the longest row."""
        assert features is None or (features.softcap, features.sinks) == (None, None)
        (_, heads, rows, width), key_heads = query.shape, key.shape[1]
        group = heads // key_heads
        shape = {"D": width, "WIDTH": triton.next_power_of_2(width)}
        stored = {**shape, "PAGE": self.page, "SIZE": key.element_size()}
        strides = [tensor.stride(dim) for tensor in (key, value) for dim in (2, 1)]
        given = (self.lengths, self.table)
        _write[rows, key_heads](key, value, *given, layer, *strides, self.table.stride(0), **stored)
        splits = max(1, min(MOST_SPLITS, triton.next_power_of_2(PROGRAMS // (rows * key_heads))))
        parts = query.new_empty(rows, heads, splits, width, dtype=torch.float32)
        logs = query.new_empty(rows, heads, splits, dtype=torch.float32)
        _attend[rows, key_heads, splits](
            query,
            *given,
            parts,
            logs,
            layer,
            scaling * LOG2_E,
            query.stride(2),
            query.stride(1),
            self.table.stride(0),
            GROUP=group,
            MEMBERS=max(16, triton.next_power_of_2(group)),  # a matrix product has at least 16 rows
            SPLITS=splits,
            **stored,
        )
        out = query.new_empty(rows, heads, width)
        _combine[(rows * heads,)](parts, logs, out, SPLITS=splits, **shape)
        return out
