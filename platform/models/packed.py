"""Unequal sequences side by side in one forward pass, without padding and with their common beginning computed once.

A `PackedTokens` is one flat row of tokens: first the prefix that all sequences share (a chat template's system turn,
say), then each sequence's own rest. Linear layers, norms and embeddings see only real tokens; `PackedAttention` keeps
sequences apart. The gradient of the shared prefix is the sum over the sequences, so losses and gradients equal those of
separate padded rows.

Does not cover sequence or context parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

ATTENTION = "rl_platform"


@dataclass(frozen=True)
class PackedTokens:
    """tokens, positions: [N] int64, N = prefix + sum of the rests. attention: how they see each other.

    flat_index [B,T] int64: where position t of row b stands in the flat row (padding points at 0).
    """

    tokens: Tensor
    positions: Tensor
    flat_index: Tensor
    attention: PackedAttention


class PackedAttention:
    """Causal attention over packed sequences: every sequence sees the shared prefix and itself.

    rest_index [B,S] int64: flat positions of each sequence's rest, right-padded with 0; rest_mask [B,S] bool: not
    padding.
    Padding stands right of the real tokens, so the causal mask alone hides it from them.
    """

    def __init__(self, prefix: int, rest_index: Tensor, rest_mask: Tensor) -> None:
        self.prefix = prefix
        self.rows, self.width = rest_index.shape
        self.gather_index = rest_index.reshape(-1)
        self.scatter_index = rest_mask.reshape(-1).nonzero().squeeze(1)
        self.mask: Tensor | None = None
        if prefix:
            sees_prefix = torch.ones(self.width, prefix, dtype=torch.bool, device=rest_index.device)
            sees_rest = torch.ones(self.width, self.width, dtype=torch.bool, device=rest_index.device).tril()
            self.mask = torch.cat([sees_prefix, sees_rest], dim=1)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """query [1,Hq,N,D], key and value [1,Hkv,N,D] -> [N,Hq,D]."""
        repeat = query.shape[1] // key.shape[1]
        if repeat > 1:
            key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
        own = [self._rows_of(tensor) for tensor in (query, key, value)]
        if self.prefix:
            head = [tensor[:, :, : self.prefix] for tensor in (query, key, value)]
            out_prefix = F.scaled_dot_product_attention(*head, is_causal=True, scale=scaling)[0].transpose(0, 1)
            own[1:] = [
                torch.cat([shared.expand(self.rows, -1, -1, -1), rest], dim=2)
                for shared, rest in zip(head[1:], own[1:], strict=True)
            ]
        out = F.scaled_dot_product_attention(*own, attn_mask=self.mask, is_causal=self.mask is None, scale=scaling)
        flat = out.transpose(1, 2).reshape(self.rows * self.width, *out.shape[1:2], out.shape[3])
        flat = flat.index_select(0, self.scatter_index)
        return torch.cat([out_prefix, flat]) if self.prefix else flat

    def _rows_of(self, tensor: Tensor) -> Tensor:
        """[1,H,N,D] -> [B,H,S,D]."""
        rows = tensor[0].transpose(0, 1).index_select(0, self.gather_index)
        return rows.view(self.rows, self.width, *rows.shape[1:]).transpose(1, 2)


def pack(sequences: Sequence[Tensor], *, share_prefix: bool = True) -> PackedTokens:
    """Pack int64 token sequences [L_b] (each at least one token), sharing the longest prefix common to all of them."""
    device = sequences[0].device
    lengths = torch.tensor([len(sequence) for sequence in sequences], device=device)
    prefix = common_prefix(sequences) if share_prefix and len(sequences) > 1 else 0
    rest = lengths - prefix
    starts = prefix + torch.cumsum(rest, 0) - rest
    columns = torch.arange(int(rest.max()), device=device)
    rest_mask = columns < rest[:, None]
    rest_index = torch.where(rest_mask, starts[:, None] + columns, 0)
    tokens = torch.cat([sequences[0][:prefix], *(sequence[prefix:] for sequence in sequences)])
    positions = torch.cat([torch.arange(prefix, device=device), (prefix + columns).expand_as(rest_mask)[rest_mask]])
    shared = torch.arange(prefix, device=device).expand(len(sequences), -1)
    return PackedTokens(
        tokens, positions, torch.cat([shared, rest_index], dim=1), PackedAttention(prefix, rest_index, rest_mask)
    )


def common_prefix(sequences: Sequence[Tensor]) -> int:
    """Number of leading tokens that all sequences share, at most one less than the shortest sequence."""
    limit = min(len(sequence) for sequence in sequences) - 1
    heads = torch.stack([sequence[:limit] for sequence in sequences])
    same = (heads == heads[:1]).all(dim=0)
    return int(same.long().cumprod(0).sum())
