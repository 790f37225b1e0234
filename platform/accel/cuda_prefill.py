"""Attention of prompts that enter the cache of the torch rollout engine on a GPU: a few kernels for all prompts.

A Triton kernel writes new keys and values to the pages of a `KVCache`. Another one reads those of earlier tokens back.
Flash attention computes all prompts at once. `PrefillAttention` launches several kernels for each prompt and page.

Not covered: float32, which flash attention lacks; windows, capped scores, sinks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from rl_platform.accel.cuda_decode_kernels import add_and_norm, gated, rotate
from rl_platform.device_copy import on_device
from rl_platform.engines.rollout.decoder import RowOperations
from rl_platform.engines.rollout.kv_cache import Page
from rl_platform.engines.rollout.paged_attention import PrefillChunk
from rl_platform.models.attention import Features
from rl_platform.models.decoder_layers import RMSNormModule
from rl_platform.models.varlen import flash_attention

Flash = Callable[[Tensor, Tensor, Tensor, tuple[Tensor, int], tuple[Tensor, int], float], Tensor]


class CudaRows(RowOperations):
    """`RowOperations` with Triton kernels, for many tokens."""

    def norm(self, states: Tensor, module: RMSNormModule, more: Tensor | None = None) -> Tensor:
        return add_and_norm(states, more, module)

    def rotate(self, heads: Tensor, count: int, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate(heads, count, cos, sin)

    def gated(self, gate_up: Tensor) -> Tensor:
        return gated(*gate_up.chunk(2, dim=-1))


class PagedPrefill:
    """As `PrefillAttention`, for chunks of prompts in half precision. `flash`: as `varlen.flash_attention`."""

    def __init__(self, chunks: Sequence[PrefillChunk], flash: Flash = flash_attention) -> None:
        self.counts, stops = [chunk.stop - chunk.start for chunk in chunks], [chunk.stop for chunk in chunks]
        self.flash, self.page = flash, chunks[0].tail.shape[3]
        for chunk in chunks:
            _move_tail(chunk)
        all_places = [_places(chunk) for chunk in chunks]
        new = [places[chunk.start :] for chunk, places in zip(chunks, all_places, strict=True)]
        tensors = [torch.from_numpy(np.concatenate(new)), _ends(self.counts)]
        if continued := any(chunk.start for chunk in chunks):
            tensors += [torch.from_numpy(np.concatenate(all_places)), _ends(stops)]
        self.places, query_ends, *earlier = on_device(tensors, chunks[0].tail.device)
        self.stored = earlier[0] if continued else None
        self.queries = query_ends, max(self.counts)
        self.keys = (earlier[1] if continued else query_ends), max(stops)

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, features: Features | None = None
    ) -> Tensor:
        """query [1,Hq,N,D], key and value [1,Hkv,N,D] -> [N,Hq,D]."""
        queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        _copy(_store, self.places, keys, values, layer, self.page)
        if self.stored is not None:
            shape = (len(self.stored), *keys.shape[1:])
            keys, values = keys.new_empty(shape), values.new_empty(shape)
            _copy(_load, self.stored, keys, values, layer, self.page)
        return self.flash(queries, keys, values, self.queries, self.keys, scaling)


def place_of(page: Page) -> tuple[int, int]:
    """Returns the address of a page's keys in the first layer, and the bytes from layer to layer."""
    segment, place = divmod(page.place, page.pool.segment_pages)
    size = page.pool.like[0, 0].nbytes
    return page.pool.segments[segment].data_ptr() + place * size, 2 * page.pool.segment_pages * size


def _ends(counts: Sequence[int]) -> Tensor:
    return torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)


def _move_tail(chunk: PrefillChunk) -> None:
    """Copies earlier tokens of the tail to the page that this chunk fills."""
    full, filled = divmod(chunk.start, chunk.tail.shape[3])
    if filled and len(chunk.pages) > full:
        chunk.pages[full].data[:, :, :, :filled] = chunk.tail[:, :, :, :filled]


def _places(chunk: PrefillChunk) -> NDArray[np.int64]:
    """[stop,2]: of each token the address of its key in the first layer and head, and the bytes from layer to layer."""
    tail = chunk.tail
    pages = [*(place_of(page) for page in chunk.pages), (tail.data_ptr(), tail.stride(0) * tail.itemsize)]
    tokens = np.arange(chunk.stop)
    page = np.minimum(tokens // tail.shape[3], len(chunk.pages))
    places = np.array(pages, dtype=np.int64)[page]
    places[:, 0] += (tokens - page * tail.shape[3]) * (tail.shape[4] * tail.itemsize)
    return places


def _copy(kernel: triton.JITFunction, places: Tensor, keys: Tensor, values: Tensor, layer: int, page: int) -> None:
    """keys, values [N,H,D]: copied to or from the pages."""
    tokens, heads, width = keys.shape
    kernel[tokens, heads](
        keys,
        values,
        places,
        layer,
        *keys.stride()[:2],
        *values.stride()[:2],
        HEAD=page * width * keys.itemsize,
        D=width,
        WIDTH=triton.next_power_of_2(width),
    )


@triton.jit
def _pointers(places, layer, token, head, HEAD: tl.constexpr, type: tl.constexpr):
    stride = tl.load(places + 2 * token + 1)  # values follow keys after half of it
    keys = tl.load(places + 2 * token) + layer * stride + head * HEAD
    values = keys + stride // 2
    return tl.multiple_of(keys.to(tl.pointer_type(type)), 16), tl.multiple_of(values.to(tl.pointer_type(type)), 16)


@triton.jit(do_not_specialize=["layer"])
def _store(
    keys, values, places, layer, key_token, key_head, value_token, value_head, HEAD: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Writes a head of a new token to its page."""
    token, head, place = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, WIDTH)
    keys_at, values_at = _pointers(places, layer, token, head, HEAD, keys.dtype.element_ty)
    new = tl.load(keys + token * key_token + head * key_head + place, place < D, 0.0)
    tl.store(keys_at + place, new, place < D)
    new = tl.load(values + token * value_token + head * value_head + place, place < D, 0.0)
    tl.store(values_at + place, new, place < D)


@triton.jit(do_not_specialize=["layer"])
def _load(
    keys, values, places, layer, key_token, key_head, value_token, value_head, HEAD: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Reads a head of a cached token from its page."""
    token, head, place = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, WIDTH)
    keys_at, values_at = _pointers(places, layer, token, head, HEAD, keys.dtype.element_ty)
    stored = tl.load(keys_at + place, place < D, 0.0)
    tl.store(keys + token * key_token + head * key_head + place, stored, place < D)
    stored = tl.load(values_at + place, place < D, 0.0)
    tl.store(values + token * value_token + head * value_head + place, stored, place < D)
