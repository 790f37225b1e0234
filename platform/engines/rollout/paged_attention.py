"""Attention over the pages of a `KVCache`: for new tokens of prompts, and for one new token per running sequence.

A running sequence attends to each page separately, and few matrix products compute all sequences and pages. The parts
are combined by their normalisers (Dao et al., 2023, flash decoding): softmax(s) V = sum_p w_p softmax(s_p) V_p, with w
the softmax of logsumexp(s_p) over pages p. A page that several sequences share is read once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_platform import acceleration
from rl_platform.engines.rollout.kv_cache import KVCache, Page, Pool
from rl_platform.models.attention import PLAIN, Features, attend, causal_mask
from rl_platform.models.packed import Attention

if TYPE_CHECKING:
    from rl_platform.accel.cuda_prefill import PagedPrefill

HIDDEN = -1e30  # a score without weight; finite, because pages without a visible token have a largest score too


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens `start` to `stop` of a prompt.

    pages: the pages that are full after this chunk; tail [layers, 2, heads, page, head_dim]: keys and values after the
    last full page, before and after this chunk.
    """

    pages: Sequence[Page]
    tail: Tensor
    start: int
    stop: int


class PrefillAttention:
    """Causal attention of new tokens of several prompts to the cached tokens of their prompt and to each other."""

    def __init__(self, chunks: Sequence[PrefillChunk]) -> None:
        self.chunks = chunks
        self.counts = [chunk.stop - chunk.start for chunk in chunks]
        self.pages = [[page.data for page in chunk.pages] for chunk in chunks]
        self._masks: dict[int | None, list[Tensor | None]] = {}

    def _masks_of(self, window: int | None) -> list[Tensor | None]:
        """Returns the masks [new, seen] bool of the chunks; None for the plain causal mask."""
        if window not in self._masks:
            self._masks[window] = [
                causal_mask(chunk.stop - chunk.start, chunk.stop, window, chunk.tail.device)
                if chunk.start or (window or chunk.stop) < chunk.stop
                else None
                for chunk in self.chunks
            ]
        return self._masks[window]

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, features: Features | None = None
    ) -> Tensor:
        """query [1,Hq,N,D], key and value [1,Hkv,N,D] -> [N,Hq,D]."""
        masks = self._masks_of(None if features is None else features.window)
        softcap = None if features is None else features.softcap
        parts = (tensor[0].split(self.counts, dim=1) for tensor in (query, key, value))
        out = []
        for number, (queries, *new) in enumerate(zip(*parts, strict=True)):
            stored = [self._stored(number, layer, which, tensor) for which, tensor in enumerate(new)]
            grouped = queries.unflatten(0, (stored[0].shape[0], -1))  # by the key head that they share
            keys, values = (part[:, None].expand(-1, grouped.shape[1], -1, -1) for part in stored)
            sinks = None
            if features is not None and features.sinks is not None:
                sinks = features.sinks.view(*grouped.shape[:2], 1, 1)
            seen = attend(grouped, keys, values, masks[number], scaling, softcap, sinks)
            out.append(seen.flatten(0, 1).transpose(0, 1))
        return torch.cat(out)

    def _stored(self, number: int, layer: int, which: int, new: Tensor) -> Tensor:
        """Writes `new` [Hkv, stop - start, D] into the cache; returns keys or values (`which` 0, 1) [Hkv, stop, D]."""
        chunk, pages = self.chunks[number], self.pages[number]
        tail = chunk.tail[layer, which]
        size = tail.shape[1]
        full, filled = divmod(chunk.start, size)
        if chunk.start:
            new = torch.cat([*(page[layer, which] for page in pages[:full]), tail[:, :filled], new], dim=1)
        for place, page in enumerate(pages[full:], start=full):
            page[layer, which] = new[:, place * size : (place + 1) * size]
        rest = chunk.stop % size
        tail[:, :rest] = new[:, chunk.stop - rest :]
        return new


class RunningRow(Protocol):
    """A running sequence: its full pages, and the number of its cached tokens."""

    pages: list[Page]

    @property
    def stored(self) -> int: ...


@dataclass(frozen=True)
class PageSegment:
    """The pages in use of one segment of a pool, and the rows that read them.

    layers: keys and values of each layer, [pages * Hkv, page, D]. readers: the most rows that read one of the pages.
    rows [pages * readers]: the rows that read each page, padded to `readers`. starts: of each page, the position of its
    first token in the sequence.
    """

    layers: list[tuple[Tensor, ...]]
    rows: Tensor
    readers: int
    starts: list[int]


class Readers:
    """The rows that read each page. Valid until pages or rows change.

    Attention has one partial result per row, of its tail, and then one per entry of the segments' `rows`. results:
    number of partial results. parts [n,K]: indices of each row's partial results, with 0 where `absent` [n,K,1,1,1] is
    -inf.
    """

    def __init__(self, cache: KVCache, rows: Sequence[RunningRow]) -> None:
        readers_of: dict[Pool, list[list[int]]] = {pool: [[] for _ in pool.pages] for pool in cache.pools.values()}
        starts_of = {pool: [0] * len(pool.pages) for pool in cache.pools.values()}
        for number, row in enumerate(rows):
            for start, page in enumerate(row.pages):
                readers_of[page.pool][page.place].append(number)
                starts_of[page.pool][page.place] = start * cache.page
        device = cache.tails.device
        self.segments: list[PageSegment] = []
        self.results = len(rows)
        parts = [[number] for number in range(len(rows))]
        for pool, readers in readers_of.items():
            for number, data in enumerate(pool.segments):
                here = readers[number * pool.segment_pages :][: pool.segment_pages]
                most = max(map(len, here))
                if not most:  # reserved for sequences that start later
                    continue
                for place, numbers in enumerate(here):
                    for position, row_number in enumerate(numbers, start=self.results + place * most):
                        parts[row_number].append(position)
                    numbers += [0] * (most - len(numbers))  # padding: no row uses the result
                layers = [tuple(layer) for layer in data[:, :, : len(here)].flatten(2, 3)]
                starts = starts_of[pool][number * pool.segment_pages :][: len(here)]
                self.segments.append(PageSegment(layers, torch.tensor(here, device=device).flatten(), most, starts))
                self.results += len(here) * most
        widest = max(map(len, parts))
        self.parts = torch.tensor([places + [0] * (widest - len(places)) for places in parts], device=device)
        counts = torch.tensor([len(places) for places in parts], device=device)
        missing = torch.arange(widest, device=device) >= counts[:, None]
        absent = torch.zeros(missing.shape, device=device).masked_fill(missing, -torch.inf)
        self.absent = absent[..., None, None, None]


class DecodeAttention:
    """Attention of one new token of each sequence in `rows`, which occupy the first slots; their tails are not full."""

    def __init__(self, cache: KVCache, rows: Sequence[RunningRow], readers: Readers) -> None:
        self.cache, self.readers, self.count = cache, readers, len(rows)
        tails, device = cache.tails, cache.tails.device
        self.heads, self.head_dim = tails.shape[3], tails.shape[-1]
        filled = torch.tensor([row.stored - cache.page * len(row.pages) for row in rows], device=device)
        lines = torch.arange(self.count * self.heads, device=device).view(-1, self.heads) * cache.page
        self.places = (lines + filled[:, None]).view(-1)  # of new tokens in the flattened tails
        self.filled, self.width = filled, int(filled.max()) + 1
        hidden = torch.arange(self.width, device=device) > filled[:, None]
        self.mask = self._of_heads(torch.zeros_like(hidden, dtype=tails.dtype).masked_fill(hidden, -torch.inf))
        self.last = [row.stored for row in rows]  # positions of new tokens
        self._windows: dict[int, tuple[Tensor, list[Tensor]]] = {}

    def _of_heads(self, mask: Tensor) -> Tensor:
        """[rows, L] -> [rows * heads, 1, L]."""
        return mask.repeat_interleave(self.heads, dim=0)[:, None]

    def _masks_of(self, window: int, group: int) -> tuple[Tensor, list[Tensor]]:
        """Returns the masks of the tails and of each segment for a window; `group` query heads share a key head."""
        if window not in self._windows:
            device, dtype, page = self.filled.device, self.mask.dtype, self.cache.page
            places = torch.arange(page, device=device)
            far = self.filled[:, None] - places[: self.width] >= window
            tails = self.mask + self._of_heads(torch.zeros_like(far, dtype=dtype).masked_fill(far, HIDDEN))
            last, segments = torch.tensor(self.last, device=device), []
            for segment in self.readers.segments:
                positions = torch.tensor(segment.starts, device=device)[:, None] + places
                far = last[segment.rows].view(-1, segment.readers, 1) - positions[:, None] >= window
                mask = torch.zeros_like(far, dtype=dtype).masked_fill(far, HIDDEN)[:, None, :, None]
                mask = mask.expand(-1, self.heads, -1, group, -1)
                segments.append(mask.reshape(-1, segment.readers * group, page))
            self._windows[window] = tails, segments
        return self._windows[window]

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, features: Features | None = None
    ) -> Tensor:
        """query [1,Hq,n,D], key and value [1,Hkv,n,D] -> [n,Hq,D]."""
        tails = self.cache.layers[layer]
        for target, tensor in zip(tails, (key, value), strict=True):
            new = tensor[0].transpose(0, 1).reshape(len(self.places), -1)
            target.view(-1, self.head_dim).index_copy_(0, self.places, new)
        # query heads that share a key head become its queries
        queries = (query[0].transpose(0, 1) * scaling).view(self.count, self.heads, -1, self.head_dim)
        features = features or PLAIN
        own_mask = self.mask
        masks: Sequence[Tensor | None] = [None] * len(self.readers.segments)
        if features.window is not None:
            own_mask, masks = self._masks_of(features.window, queries.shape[2])
        sums = queries.new_empty(self.readers.results, *queries.shape[1:])
        largest, totals = (torch.empty_like(sums[..., :1], dtype=torch.float32) for _ in range(2))
        results = (sums, largest, totals)
        keys, values = (tail.flatten(0, 1)[: len(self.mask), : self.width] for tail in tails)
        own_results = [part[: self.count].flatten(0, 1) for part in results]
        _attend(queries.flatten(0, 1), keys, values, own_mask, own_results, features.softcap)
        end = self.count
        for segment, mask in zip(self.readers.segments, masks, strict=True):
            start, end = end, end + len(segment.rows)
            page_results = [part[start:end] for part in results]
            _attend_to_pages(queries[segment.rows], segment, layer, mask, page_results, features.softcap)
        return self._combined(sums, largest, totals, features.sinks)

    def _combined(self, sums: Tensor, largest: Tensor, totals: Tensor, sinks: Tensor | None) -> Tensor:
        """Returns the attention of each row [n,Hq,D] from its partial results, those of `_attend` [results,Hkv,Q,...].

        sinks [Hq]: scores of a part of every sequence that has no value.
        """
        if not self.readers.segments and sinks is None:
            return sums.div_(totals).flatten(1, 2)
        logs = (largest + totals.log())[self.readers.parts] + self.readers.absent
        if sinks is not None:
            of_rows = sinks.float().view(1, 1, self.heads, -1, 1).expand(self.count, -1, -1, -1, -1)
            logs = torch.cat([logs, of_rows], dim=1)
        # w_p = softmax_p(logsumexp(s_p)), and the attention is sum_p w_p softmax(s_p) V_p
        shares = torch.softmax(logs, dim=1)[:, : self.readers.parts.shape[1]].to(sums.dtype)
        return (sums.div_(totals)[self.readers.parts] * shares).sum(dim=1).flatten(1, 2)


def _attend_to_pages(
    queries: Tensor,
    segment: PageSegment,
    layer: int,
    mask: Tensor | None,
    out: Sequence[Tensor],
    softcap: float | None,
) -> None:
    """Attends with the queries of `segment.rows` [pages * readers, Hkv, Q, D], each to the page that it reads.

    Writes into `out` what `_attend` returns, [pages * readers, Hkv, Q, ...]. All readers of a page are queries of one
    matrix product.
    """
    keys, values = segment.layers[layer]
    if segment.readers == 1:
        _attend(queries.flatten(0, 1), keys, values, mask, [part.flatten(0, 1) for part in out], softcap)
        return
    by_page = [part.unflatten(0, (-1, segment.readers)).transpose(1, 2) for part in (queries, *out)]
    flat = [part.reshape(-1, part.shape[2] * part.shape[3], part.shape[4]) for part in by_page]
    _attend(flat[0], keys, values, mask, flat[1:], softcap)
    for part, result in zip(by_page[1:], flat[1:], strict=True):
        if result.data_ptr() != part.data_ptr():  # equal if `flat` is a view, for example with one key head
            part.copy_(result.view(part.shape))


def _attend(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, out: Sequence[Tensor], softcap: float | None
) -> None:
    """Attends with scaled queries [B,Q,D] to keys and values [B,L,D]; `mask` [B,1 or Q,L] is added to the scores.

    Writes into `out` the weighted sums of values [B,Q,D], the largest score [B,Q,1] and the sum of the weights [B,Q,1].
    A weight is exp(score - largest).
    """
    sums, largest, totals = out
    transposed = keys.transpose(1, 2)
    if softcap is not None:
        scores = softcap * torch.tanh(torch.bmm(queries, transposed).float() / softcap)
        scores = scores if mask is None else scores + mask
    else:
        scores = torch.bmm(queries, transposed) if mask is None else torch.baddbmm(mask, queries, transposed)
        scores = scores.float()
    weights = scores.sub_(torch.amax(scores, dim=-1, keepdim=True, out=largest)).exp_()
    torch.sum(weights, dim=-1, keepdim=True, out=totals)
    torch.bmm(weights.to(values.dtype), values, out=sums)


def decode_attention(cache: KVCache, *, plain: bool = True) -> tuple[Any, Any]:
    """Returns (Readers, DecodeAttention), or their compiled equivalents, which are faster.

    `plain` False: some layers have `Features`, which the compiled ones do not compute.
    """
    compiled = None
    if plain and cache.tails.device.type == "cpu" and cache.tails.dtype in (torch.float32, torch.bfloat16):
        compiled = acceleration.find("decode_attention")
    return compiled or (Readers, DecodeAttention)


class StepAttention:
    """Attention of one forward pass: first the new tokens of prompts, then those of running sequences."""

    def __init__(self, prompts: PrefillAttention | PagedPrefill | None, running: DecodeAttention | None) -> None:
        self.prompts, self.running = prompts, running
        self.count = 0 if prompts is None else sum(prompts.counts)

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, features: Features | None = None
    ) -> Tensor:
        """query [1,Hq,N,D], key and value [1,Hkv,N,D] -> [N,Hq,D]."""
        count, outputs = self.count, []
        if self.prompts is not None:
            new = query[:, :, :count], key[:, :, :count], value[:, :, :count]
            outputs.append(self.prompts(layer, *new, scaling, features))
        if self.running is not None:
            new = query[:, :, count:], key[:, :, count:], value[:, :, count:]
            outputs.append(self.running(layer, *new, scaling, features))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


class PaddedHeads:
    """Runs `attention` on heads that are padded with zeros to one width: latent attention has heads of two widths."""

    def __init__(self, attention: Attention, width: int) -> None:
        self.attention, self.width = attention, width

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, features: Features | None = None
    ) -> Tensor:
        """query [1,Hq,N,D], key [1,Hkv,N,D], value [1,Hkv,N,V] -> [N,Hq,V]."""
        width = value.shape[-1]
        query, key, value = (F.pad(tensor, (0, self.width - tensor.shape[-1])) for tensor in (query, key, value))
        return self.attention(layer, query, key, value, scaling, features)[..., :width]
