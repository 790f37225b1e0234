"""Triton kernels of a decoding step: all but the matrix products.

Attention reads the pages of a `KVCache` in place. A program computes a part of the pages of one row and one key head,
for all query heads that share the key head. Another kernel combines several parts by their normalisers (Dao et al.
2023, flash decoding). The kernels read from device memory which pages a row has, and how many tokens, so a CUDA graph
that contains them stays valid as sequences grow.

Scores, weights and sums are float32. Products of float32 are exact float32 products, not TF32.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_platform.models.decoder_layers import RMSNormModule

LOG2_E = 1.4426950408889634
PROGRAMS = 512  # enough for every multiprocessor to have several
MOST_SPLITS = 32
BLOCK = 1024  # numbers of a program of an elementwise kernel


@triton.jit
def _page(table, page_stride, page, row, layer, offset, type: tl.constexpr):
    """Returns pointers to keys and values, `offset` bytes from the start of the page in `layer`."""
    entry = table + page * page_stride + 2 * row
    stride = tl.load(entry + 1)  # bytes from layer to layer; values follow keys after half of it
    keys = tl.load(entry) + layer * stride + offset
    values = keys + stride // 2
    # without the hint each number is loaded alone
    return tl.multiple_of(keys.to(tl.pointer_type(type)), 16), tl.multiple_of(values.to(tl.pointer_type(type)), 16)


@triton.jit
def _rotated(start, places, cos, sin, norm, epsilon, D: tl.constexpr, NORMED: tl.constexpr):
    """A head [D] at `start`, normed where `NORMED`, with the rotary embedding (x cos + (-x2, x1) sin), in float32."""
    half: tl.constexpr = D // 2
    partners = tl.where(places < half, places + half, places - half)
    numbers = tl.load(start + places, places < D, 0.0).to(tl.float32)
    others = tl.load(start + partners, places < D, 0.0).to(tl.float32)
    if NORMED:
        shrink = tl.rsqrt(tl.sum(numbers * numbers, 0) / D + epsilon)
        numbers *= shrink * tl.load(norm + places, places < D, 0.0).to(tl.float32)
        others *= shrink * tl.load(norm + partners, places < D, 0.0).to(tl.float32)
    cosines = tl.load(cos + places, places < D, 0.0).to(tl.float32)
    sines = tl.load(sin + places, places < D, 0.0).to(tl.float32)
    return numbers * cosines + tl.where(places < half, -others, others) * sines


@triton.jit(do_not_specialize=["layer"])
def _place(
    query,
    key,
    value,
    cos,
    sin,
    query_norm,
    key_norm,
    epsilon,
    placed,
    lengths,
    table,
    layer,
    query_row,
    key_row,
    value_row,
    page_stride,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    NORMED: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Writes a rotated query head to `placed`, or a rotated key head and its values to the last page of the row."""
    row, head, places = tl.program_id(0), tl.program_id(1), tl.arange(0, WIDTH)
    cosines, sines = cos + row * D, sin + row * D
    type: tl.constexpr = query.dtype.element_ty
    if head < HEADS:
        rotated = _rotated(query + row * query_row + head * D, places, cosines, sines, query_norm, epsilon, D, NORMED)
        tl.store(placed + (row * HEADS + head) * D + places, rotated.to(type), places < D)
    else:
        head -= HEADS
        last = tl.load(lengths + row).to(tl.int32) - 1
        if last >= 0:
            offset = (head * PAGE + last % PAGE) * D * SIZE
            keys, values = _page(table, page_stride, last // PAGE, row, layer, offset, type)
            rotated = _rotated(key + row * key_row + head * D, places, cosines, sines, key_norm, epsilon, D, NORMED)
            tl.store(keys + places, rotated.to(type), places < D)
            new = tl.load(value + row * value_row + head * D + places, places < D, 0.0)
            tl.store(values + places, new, places < D)


@triton.jit(do_not_specialize=["layer"])
def _attend(
    query,
    lengths,
    table,
    parts,
    logs,
    layer,
    scale,
    page_stride,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    SPLITS: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Writes the mean of the values of some pages [GROUP,D], and the base-2 logarithm of its normaliser [GROUP] where
    there are several parts."""
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    type: tl.constexpr = query.dtype.element_ty
    length = tl.load(lengths + row).to(tl.int32)
    pages = (length + PAGE - 1) // PAGE
    each = (pages + SPLITS - 1) // SPLITS
    members, places, tokens = tl.arange(0, MEMBERS), tl.arange(0, WIDTH), tl.arange(0, PAGE)
    number = head * GROUP + members
    used = (members < GROUP)[:, None] & (places < D)[None, :]
    first = row * tl.num_programs(1) * GROUP
    queries = tl.load(query + (first + number)[:, None] * D + places[None, :], used, 0.0)
    top = tl.full([MEMBERS], float("-inf"), tl.float32)
    total = tl.zeros([MEMBERS], tl.float32)
    sums = tl.zeros([MEMBERS, WIDTH], tl.float32)
    for page in range(split * each, tl.minimum(split * each + each, pages)):
        keys_at, values_at = _page(table, page_stride, page, row, layer, head * (PAGE * D * SIZE), type)
        seen = page * PAGE + tokens < length
        keys_here = (places < D)[:, None] & seen[None, :]
        keys = tl.load(keys_at + tokens[None, :] * D + places[:, None], keys_here, 0.0)
        scores = tl.dot(queries, keys, input_precision="ieee") * scale
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
    line = (first + number) * SPLITS + split
    tl.store(parts + line[:, None] * D + places[None, :], means.to(parts.dtype.element_ty), used)
    if SPLITS > 1:
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


@triton.jit
def _add_and_norm(states, more, weight, out, epsilon, ADDS: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr):
    """Adds `more` [H] to `states` [H] in place where `ADDS`, and writes the RMS norm of the sum."""
    row, places = tl.program_id(0), tl.arange(0, WIDTH)
    type: tl.constexpr = states.dtype.element_ty
    numbers = tl.load(states + row * H + places, places < H, 0.0).to(tl.float32)
    if ADDS:
        added = (numbers + tl.load(more + row * H + places, places < H, 0.0).to(tl.float32)).to(type)
        tl.store(states + row * H + places, added, places < H)
        numbers = added.to(tl.float32)
    shrink = tl.rsqrt(tl.sum(numbers * numbers, 0) / H + epsilon)
    weights = tl.load(weight + places, places < H, 0.0).to(tl.float32)
    tl.store(out + row * H + places, (numbers * shrink * weights).to(type), places < H)


@triton.jit
def _rotate(heads, cos, sin, out, row_stride, COUNT: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """x cos + roll(x, D / 2) sin of some heads."""
    row, number = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place, used, half = number % D, number < COUNT * D, D // 2
    partner = number + tl.where(place < half, half, -half)
    numbers = tl.load(heads + row * row_stride + number, used, 0.0).to(tl.float32)
    others = tl.load(heads + row * row_stride + partner, used, 0.0).to(tl.float32)
    cosines = tl.load(cos + row * D + place, used, 0.0).to(tl.float32)
    sines = tl.load(sin + row * D + place, used, 0.0).to(tl.float32)
    rotated = numbers * cosines + others * sines
    tl.store(out + row * COUNT * D + number, rotated.to(heads.dtype.element_ty), used)


@triton.jit
def _gate(gate, up, out, gate_row, up_row, INNER: tl.constexpr, BLOCK: tl.constexpr):
    """silu(gate) up."""
    row, places = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    opened = tl.load(gate + row * gate_row + places, places < INNER, 0.0).to(tl.float32)
    given = tl.load(up + row * up_row + places, places < INNER, 0.0).to(tl.float32)
    gated = opened / (1.0 + tl.exp(-opened)) * given
    tl.store(out + row * INNER + places, gated.to(gate.dtype.element_ty), places < INNER)


def current(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the current one, on which Triton launches kernels."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()  # Triton's interpreter runs on CPUs


def add_and_norm(states: Tensor, more: Tensor | None, module: RMSNormModule) -> Tensor:
    """Adds `more` [n,H] to `states` [n,H] in place and returns the RMS norm of the sum [n,H]."""
    rows, width = states.shape
    out = torch.empty_like(states)
    shape = {"H": width, "WIDTH": triton.next_power_of_2(width)}
    adds = more is not None
    warps = 8 if width > 2048 else 4
    _add_and_norm[(rows,)](
        states,
        more if adds else states,
        module.weight,
        out,
        module.variance_epsilon,
        ADDS=adds,
        **shape,
        num_warps=warps,
    )
    return out


def rotate(heads: Tensor, count: int, cos: Tensor, sin: Tensor) -> Tensor:
    """As `RowOperations.rotate`; heads [N,heads,D] of rows whose heads follow each other in memory."""
    rows, _, width = heads.shape
    out = heads.new_empty(rows, count, width)
    blocks = triton.cdiv(count * width, BLOCK)
    _rotate[rows, blocks](heads, cos, sin, out, heads.stride(0), COUNT=count, D=width, BLOCK=BLOCK)
    return out


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) up: [n,I], [n,I] -> [n,I]."""
    rows, inner = gate.shape
    out = gate.new_empty(rows, inner)
    _gate[rows, triton.cdiv(inner, BLOCK)](gate, up, out, gate.stride(0), up.stride(0), INNER=inner, BLOCK=BLOCK)
    return out


class PagedAttention:
    """Attention of one new token per row, whose key and value it first writes into the cache.

    lengths [n] int64: tokens of each row with the new one; 0: a row without a sequence, whose output is 0.
    table [pages,rows >= n,2] int64: for each page of a row, the address of its keys in the first layer and the bytes
    from layer to layer. The last page of a row is its tail. page: tokens of a page.
    cos, sin [n,D]: the rotary embedding.
    """

    def __init__(self, lengths: Tensor, table: Tensor, page: int, cos: Tensor, sin: Tensor) -> None:
        self.lengths, self.table, self.page, self.cos, self.sin = lengths, table, page, cos, sin

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        norms: Sequence[RMSNormModule] = (),
    ) -> Tensor:
        """query [n,Hq D], key and value [n,Hkv D], not rotated -> [n,Hq D]. norms: of query and key heads, or none."""
        (rows, width), head_dim = query.shape, self.cos.shape[-1]
        heads, key_heads = width // head_dim, key.shape[1] // head_dim
        group = heads // key_heads
        shape = {"D": head_dim, "WIDTH": triton.next_power_of_2(head_dim)}
        stored = {**shape, "PAGE": self.page, "SIZE": key.element_size()}
        placed = query.new_empty(rows, width)
        _place[rows, heads + key_heads](
            query,
            key,
            value,
            self.cos,
            self.sin,
            *((norm.weight for norm in norms) if norms else (query, key)),
            norms[0].variance_epsilon if norms else 0.0,
            placed,
            self.lengths,
            self.table,
            layer,
            query.stride(0),
            key.stride(0),
            value.stride(0),
            self.table.stride(0),
            HEADS=heads,
            KEY_HEADS=key_heads,
            NORMED=bool(norms),
            **stored,
        )
        splits = max(1, min(MOST_SPLITS, triton.next_power_of_2(PROGRAMS // (rows * key_heads))))
        out = torch.empty_like(placed)
        parts = query.new_empty(rows, heads, splits, head_dim, dtype=torch.float32) if splits > 1 else out
        logs = query.new_empty(rows, heads, splits, dtype=torch.float32)
        _attend[rows, key_heads, splits](
            placed,
            self.lengths,
            self.table,
            parts,
            logs,
            layer,
            scaling * LOG2_E,
            self.table.stride(0),
            GROUP=group,
            MEMBERS=max(16, triton.next_power_of_2(group)),  # a matrix product has at least 16 rows
            SPLITS=splits,
            **stored,
        )
        if splits > 1:
            _combine[(rows * heads,)](parts, logs, out, SPLITS=splits, **shape)
        return out
