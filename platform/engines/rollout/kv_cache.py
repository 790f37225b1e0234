"""Keys and values of running sequences, one slot each, and the two ways of attention that fill and read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS_TOGETHER = 16  # sequences that are attended to in one call, as wide as the longest of them


class KVCache:
    """data [layers, 2, slots, heads, length, head_dim]; active sequences always occupy the first slots."""

    def __init__(
        self,
        layers: int,
        slots: int,
        heads: int,
        length: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.slots = slots
        self.data = torch.zeros(layers, 2, slots, heads, length, head_dim, dtype=dtype, device=device)
        self.layers = [tuple(layer) for layer in self.data]  # keys, values

    def copy(self, source: int, target: int, length: int) -> None:
        """The first `length` tokens of slot `target` become those of slot `source`."""
        self.data[:, :, target, :, :length] = self.data[:, :, source, :, :length]

    def beginning(self, slot: int, length: int) -> Tensor:
        """A copy of the first `length` tokens: [layers, 2, heads, length, head_dim]."""
        return self.data[:, :, slot, :, :length].clone()

    def begin(self, slot: int, beginning: Tensor) -> None:
        """Slot `slot` holds the tokens of `beginning`."""
        self.data[:, :, slot, :, : beginning.shape[3]] = beginning


@dataclass(frozen=True)
class Span:
    """Tokens `start` to `stop` of the sequence in a slot, whose tokens before are in the cache."""

    slot: int
    start: int
    stop: int


class PrefillAttention:
    """New tokens side by side, several of each sequence. They see what their slot holds and each other, causally."""

    def __init__(self, cache: KVCache, spans: Sequence[Span]) -> None:
        self.cache, self.spans = cache, spans
        self.counts = [span.stop - span.start for span in spans]
        self.masks = [self._mask(span) for span in spans]

    def _mask(self, span: Span) -> Tensor | None:
        """[new, seen] bool; None: the plain causal one."""
        if span.start == 0:
            return None
        shape = (span.stop - span.start, span.stop)
        return torch.ones(shape, dtype=torch.bool, device=self.cache.data.device).tril(span.start)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """query [1,Hq,N,D], key and value [1,Hkv,N,D] -> [N,Hq,D]."""
        parts = (tensor[0].split(self.counts, dim=1) for tensor in (query, key, value))
        out = []
        for span, mask, queries, *new in zip(self.spans, self.masks, *parts, strict=True):
            stored = [part[span.slot, :, : span.stop] for part in self.cache.layers[layer]]
            for target, tensor in zip(stored, new, strict=True):
                target[:, span.start :] = tensor
            grouped = queries.unflatten(0, (stored[0].shape[0], -1))  # by the key head that they share
            keys, values = (part[:, None].expand(-1, grouped.shape[1], -1, -1) for part in stored)
            options = {"attn_mask": mask, "is_causal": mask is None, "scale": scaling}
            seen = F.scaled_dot_product_attention(grouped, keys, values, **options)
            out.append(seen.flatten(0, 1).transpose(0, 1))
        return torch.cat(out)


class DecodeAttention:
    """One new token per active sequence: `lengths` [n] tokens stand in its slot already.

    A slot is read as far as the longest sequence of its ROWS_TOGETHER neighbours reaches.
    """

    def __init__(self, cache: KVCache, lengths: Tensor) -> None:
        self.cache = cache
        _, _, _, heads, length, _ = cache.data.shape
        lines = torch.arange(len(lengths) * heads, device=lengths.device).view(-1, heads) * length
        self.places = (lines + lengths[:, None]).view(-1)  # of the new tokens, counting every head's tokens
        self.groups: list[tuple[slice, int, Tensor]] = []
        for first in range(0, len(lengths), ROWS_TOGETHER):
            rows = slice(first, min(first + ROWS_TOGETHER, len(lengths)))
            width = int(lengths[rows].max()) + 1
            hidden = torch.arange(width, device=lengths.device) > lengths[rows, None]
            mask = torch.zeros(hidden.shape, dtype=cache.data.dtype, device=lengths.device)
            self.groups.append((rows, width, mask.masked_fill(hidden, -torch.inf)[:, None, None]))

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """query [1,Hq,n,D], key and value [1,Hkv,n,D] -> [n,Hq,D].

        Query heads that share a key head stand as its queries.
        """
        keys, values = self.cache.layers[layer]
        for target, tensor in ((keys, key), (values, value)):
            new = tensor[0].transpose(0, 1).reshape(len(self.places), -1)
            target.view(-1, target.shape[-1]).index_copy_(0, self.places, new)
        grouped = query[0].transpose(0, 1).unflatten(1, (keys.shape[1], -1))
        out = [
            F.scaled_dot_product_attention(
                grouped[rows], keys[rows, :, :width], values[rows, :, :width], attn_mask=mask, scale=scaling
            )
            for rows, width, mask in self.groups
        ]
        return (out[0] if len(out) == 1 else torch.cat(out)).flatten(1, 2)
