"""Keys and values of running sequences, one slot each, and the two ways of attention that fill and read them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_platform.models.packed import PackedTokens


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

    def move(self, source: int, target: int) -> None:
        """Slot `target` becomes what slot `source` is."""
        self.data[:, :, target] = self.data[:, :, source]


class PrefillAttention:
    """Attention over packed prompts that leaves their keys and values in the slots from `first` on."""

    def __init__(self, cache: KVCache, packed: PackedTokens, first: int) -> None:
        self.attention = packed.attention
        self.flat_index = packed.flat_index
        rows, width = packed.flat_index.shape
        self.target = cache.data[:, :, first : first + rows, :, :width]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        for target, tensor in zip(self.target[layer], (key, value), strict=True):
            target.copy_(tensor[0].transpose(0, 1)[self.flat_index].transpose(1, 2))
        return self.attention(layer, query, key, value, scaling)


class DecodeAttention:
    """One new token per active sequence: `lengths` [n] tokens stand in its slot already."""

    def __init__(self, cache: KVCache, lengths: Tensor) -> None:
        self.width = int(lengths.max()) + 1
        self.data = cache.data[:, :, : len(lengths), :, : self.width]
        self.rows = torch.arange(len(lengths), device=lengths.device)
        self.lengths = lengths
        self.mask = (torch.arange(self.width, device=lengths.device) <= lengths[:, None])[:, None, None]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """query [1,Hq,n,D], key and value [1,Hkv,n,D] -> [n,Hq,D].

        Query heads that share a key head stand as its queries.
        """
        keys, values = self.data[layer]
        keys[self.rows, :, self.lengths] = key[0].transpose(0, 1)
        values[self.rows, :, self.lengths] = value[0].transpose(0, 1)
        count, heads, _, dim = keys.shape
        grouped = query[0].transpose(0, 1).reshape(count, heads, -1, dim)
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self.mask, scale=scaling)
        return out.reshape(count, -1, dim)
