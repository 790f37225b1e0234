"""Attention of one new token per running sequence as one compiled loop: float32 or bfloat16, on a CPU.

The threads of torch's own operations take pairs of key head and sequence from a shared counter. Pages are read in
place. The contribution of a page is computed while the page is in a core's cache. It is added to the sum so far, with
weights relative to the largest score so far (FlashAttention, Dao et al., 2022). One thread computes each number in a
fixed order, so the number of threads changes no bit.

bfloat16 halves the memory that is read. Each page is converted once for all query heads that share it; scores, weights
and sums are float32, and only the result is rounded.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch
from numba import carray
from torch import Tensor

from rl_platform.accel.compiling import Array
from rl_platform.accel.openmp_team import run_by_team
from rl_platform.accel.tensor_loops import (
    FLOAT,
    STORED_AS,
    address_of,
    at,
    from_ordered,
    inlined,
    ordered,
    power,
    prefetch,
    rounded,
    taken,
    widened,
)
from rl_platform.engines.rollout.kv_cache import KVCache
from rl_platform.engines.rollout.paged_attention import RunningRow
from rl_platform.models.attention import Features

LINE = 64  # bytes that a core fetches together
NO_SCORE = FLOAT(-3e38)


class _KernelArguments(ctypes.Structure):
    """Arguments of the kernel. Arrays are addresses; `_head`, `_row`: bytes to the next one.

    started: the counter of pairs of key head and row.
    """

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("started", "rows", "heads", "group", "page", "layer")),
        *((name, ctypes.c_int64) for name in ("starts", "pages", "filled", "out")),
        *((name + part, ctypes.c_int64) for name in ("query", "key", "value") for part in ("", "_head", "_row")),
        ("scaling", ctypes.c_double),
    )


class PageTable:
    """The pages that each row reads; valid until pages or rows change.

    pages [K,2]: full pages and the tail of each row, as address in the first layer and bytes from layer to layer.
    starts [n+1]: index of each row's first page.
    """

    def __init__(self, cache: KVCache, rows: Sequence[RunningRow]) -> None:
        tensors = [[*(page.data for page in row.pages), cache.tails[:, :, slot]] for slot, row in enumerate(rows)]
        self.starts = np.cumsum([0] + [len(row) for row in tensors])
        addresses = [(tensor.data_ptr(), tensor.stride(0) * tensor.itemsize) for row in tensors for tensor in row]
        self.pages = np.array(addresses, dtype=np.int64)


class CompiledDecodeAttention:
    """As `DecodeAttention`."""

    def __init__(self, cache: KVCache, rows: Sequence[RunningRow], table: PageTable) -> None:
        filled = np.array([row.stored - cache.page * len(row.pages) for row in rows], dtype=np.int64)
        self.arrays = (table.starts, table.pages, filled)  # keeps the memory behind the addresses alive
        _, _, _, heads, page, head_dim = cache.tails.shape
        starts, pages, places = (array.ctypes.data for array in self.arrays)
        self.call = _KernelArguments(rows=len(rows), heads=heads, page=page, starts=starts, pages=pages, filled=places)
        self.kernel = _kernel(head_dim, cache.tails.dtype)
        self.longest = max(row.stored for row in rows) + 1

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, features: Features | None = None
    ) -> Tensor:
        """query [1,Hq,n,D], key and value [1,Hkv,n,D] -> [n,Hq,D]. A window must be as long as the longest row."""
        assert features is None or (features.softcap, features.sinks) == (None, None)
        assert features is None or features.window is None or features.window >= self.longest
        call, (_, heads, rows, head_dim) = self.call, query.shape
        out = query.new_empty(rows, heads, head_dim)
        call.query, call.query_head, call.query_row = _layout(query)
        call.key, call.key_head, call.key_row = _layout(key)
        call.value, call.value_head, call.value_row = _layout(value)
        call.layer, call.group, call.scaling, call.out = layer, heads // call.heads, scaling, out.data_ptr()
        call.started = 0
        run_by_team(self.kernel, ctypes.addressof(call), torch.get_num_threads())
        return out


def _layout(tensor: Tensor) -> tuple[int, int, int]:
    """Returns the address, and the bytes from head to head and from row to row."""
    _, head, row, number = tensor.stride()
    assert number == 1
    return tensor.data_ptr(), head * tensor.itemsize, row * tensor.itemsize


@cache
def _kernel(head_dim: int, dtype: torch.dtype) -> int:
    """Returns the address of `decode`, compiled at the first call."""
    return address_of(_loop(head_dim, STORED_AS[dtype]), _KernelArguments)


@inlined
def _convert(stored: Array, count: int, numbers: Array) -> None:
    """stored [page,D] -> numbers [page,D] float32, of the first `count`."""
    for token in range(count):
        for place in range(stored.shape[1]):
            numbers[token, place] = widened(stored[token, place])


@inlined
def _score(query: Array, keys: Array, count: int, scores: Array, values_at: int, size: int) -> None:
    """query [Q,D], keys [page,D] -> scores [Q,page] of the first `count`.

    Their values, of `size` bytes each, will be needed next.
    """
    for token in range(count):
        for place in range(0, size * keys.shape[1], LINE):
            prefetch(values_at + size * token * keys.shape[1] + place)
        for member in range(len(query)):
            score = FLOAT(0)
            for place in range(keys.shape[1]):
                score += query[member, place] * keys[token, place]
            scores[member, token] = score


@inlined
def _weigh(scores: Array, largest: float) -> tuple[float, float]:
    """scores [count] become weights 2^(score - top) with top = max(scores, largest) -> (top, sum of the weights)."""
    highest, total = ordered(largest), FLOAT(0)
    for score in scores:
        highest = max(highest, ordered(score))
    top = from_ordered(highest)
    for token in range(len(scores)):
        scores[token] = power(scores[token] - top)
        total += scores[token]
    return top, total


@inlined
def _add_up(weights: Array, values: Array, sums: Array) -> None:
    """sums [D] += weights [count] @ values [>= count,D]. Four at a time, as each time the sums are read and written."""
    fours = len(weights) & ~3
    for token in range(0, fours, 4):
        a, b, c, d = weights[token], weights[token + 1], weights[token + 2], weights[token + 3]
        for place in range(values.shape[1]):
            more = a * values[token, place] + b * values[token + 1, place]
            sums[place] += more + c * values[token + 2, place] + d * values[token + 3, place]
    for token in range(fours, len(weights)):
        for place in range(values.shape[1]):
            sums[place] += weights[token] * values[token, place]


def _loop(head_dim: int, stored_as: type[np.generic]) -> Callable[[object], None]:
    """Returns what each thread runs, with the size of the heads and the type of the tensors as constants."""
    size, converts = np.dtype(stored_as).itemsize, stored_as is not FLOAT

    def decode(pointer: object) -> None:
        call = carray(pointer, 1)[0]
        starts = carray(at(call.starts), call.rows + 1, np.int64)
        filled = carray(at(call.filled), call.rows, np.int64)
        pages = carray(at(call.pages), (starts[call.rows], 2), np.int64)
        page, group = (call.page, head_dim), (call.group, head_dim)
        query, sums, scores = np.empty(group, FLOAT), np.empty(group, FLOAT), np.empty((call.group, call.page), FLOAT)
        tops, totals = np.empty(call.group, FLOAT), np.empty(call.group, FLOAT)
        if converts:
            numbers = np.empty(page, FLOAT)
        pair = taken(pointer)
        while pair < call.rows * call.heads:
            head, row = pair // call.rows, pair % call.rows  # the rows of a head in turn: they may share pages
            for member in range(call.group):
                given_at = call.query + row * call.query_row + (head * call.group + member) * call.query_head
                given = carray(at(given_at), head_dim, stored_as)
                for place in range(head_dim):
                    query[member, place] = widened(given[place]) * FLOAT(call.scaling * math.log2(math.e))
                    sums[member, place] = FLOAT(0)
                tops[member], totals[member] = NO_SCORE, FLOAT(0)
            for number in range(starts[row], starts[row + 1]):
                keys_at = pages[number, 0] + pages[number, 1] * call.layer + size * head * call.page * head_dim
                values_at = keys_at + pages[number, 1] // 2
                keys, values = carray(at(keys_at), page, stored_as), carray(at(values_at), page, stored_as)
                count = call.page
                if number == starts[row + 1] - 1:  # the tail: the new token enters it
                    key_at = call.key + row * call.key_row + head * call.key_head
                    value_at = call.value + row * call.value_row + head * call.value_head
                    new_key, new_value = (
                        carray(at(key_at), head_dim, stored_as),
                        carray(at(value_at), head_dim, stored_as),
                    )
                    for place in range(head_dim):
                        keys[filled[row], place], values[filled[row], place] = new_key[place], new_value[place]
                    count = filled[row] + 1
                if converts:
                    _convert(keys, count, numbers)
                    _score(query, numbers, count, scores, values_at, size)
                    _convert(values, count, numbers)
                else:
                    _score(query, keys, count, scores, values_at, size)
                for member in range(call.group):
                    top, total = _weigh(scores[member, :count], tops[member])
                    shrink = power(tops[member] - top)
                    tops[member], totals[member] = top, totals[member] * shrink + total
                    for place in range(head_dim):
                        sums[member, place] *= shrink
                    if converts:
                        _add_up(scores[member, :count], numbers, sums[member])
                    else:
                        _add_up(scores[member, :count], values, sums[member])
            out = carray(at(call.out + size * (row * call.heads + head) * call.group * head_dim), group, stored_as)
            for member in range(call.group):
                for place in range(head_dim):
                    mean = sums[member, place] / totals[member]
                    if converts:
                        out[member, place] = rounded(mean)
                    else:
                        out[member, place] = mean
            pair = taken(pointer)

    return decode
