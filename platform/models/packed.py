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
# Pairs of positions that cost as much as one more call for a group of sequences.
SPLIT = {"cpu": 2**14, "cuda": 2**23}


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
    Sequences of about the same length are computed together, padded to the longest of them. Padding stands right of
    the real tokens, so the causal mask alone hides it from them.
    """

    def __init__(self, prefix: int, rest_index: Tensor, rest_mask: Tensor) -> None:
        self.prefix = prefix
        lengths = rest_mask.sum(1).tolist()
        worth = SPLIT.get(rest_index.device.type, SPLIT["cuda"])
        groups = similar(lengths, prefix, worth)
        self.shapes = [(len(rows), max(lengths[row] for row in rows)) for rows in groups]
        padded = [
            (rest_index[rows, :width], rest_mask[rows, :width])
            for rows, (_, width) in zip(groups, self.shapes, strict=True)
        ]
        self.gathered, real = (torch.cat([pair[part].reshape(-1) for pair in padded]) for part in (0, 1))
        places = real.nonzero().squeeze(1)
        self.returned = places[self.gathered[places].argsort()]
        self.masks = [causal_after(prefix, width, rest_index.device) if prefix else None for _, width in self.shapes]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """query [1,Hq,N,D], key and value [1,Hkv,N,D] -> [N,Hq,D]."""
        repeat = query.shape[1] // key.shape[1]
        if repeat > 1:
            key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
        head = [tensor[:, :, : self.prefix] for tensor in (query, key, value)]
        groups = zip(*(self._groups_of(tensor) for tensor in (query, key, value)), self.masks, strict=True)
        outs = [self._attend(own, head, mask, scaling) for *own, mask in groups]
        out = torch.cat(outs).index_select(0, self.returned)
        if not self.prefix:
            return out
        first = F.scaled_dot_product_attention(*head, is_causal=True, scale=scaling)[0].transpose(0, 1)
        return torch.cat([first, out])

    def _groups_of(self, tensor: Tensor) -> list[Tensor]:
        """[1,H,N,D] -> of every group [B,H,S,D]."""
        rows = tensor[0].transpose(0, 1).index_select(0, self.gathered)
        groups = rows.split([count * width for count, width in self.shapes])
        return [group.unflatten(0, shape).transpose(1, 2) for group, shape in zip(groups, self.shapes, strict=True)]

    def _attend(self, own: list[Tensor], head: list[Tensor], mask: Tensor | None, scaling: float) -> Tensor:
        """own: query, key and value [B,H,S,D]; head: those of the prefix [1,H,P,D] -> [B*S,H,D]."""
        if mask is not None:
            shared = [tensor.expand(len(own[0]), -1, -1, -1) for tensor in head[1:]]
            own[1:] = [torch.cat(pair, dim=2) for pair in zip(shared, own[1:], strict=True)]
        out = F.scaled_dot_product_attention(*own, attn_mask=mask, is_causal=mask is None, scale=scaling)
        return out.transpose(1, 2).flatten(0, 1)


def causal_after(prefix: int, width: int, device: torch.device) -> Tensor:
    """[width, prefix + width] bool: each position sees all of the prefix, those before it and itself."""
    sees_prefix = torch.ones(width, prefix, dtype=torch.bool, device=device)
    return torch.cat([sees_prefix, torch.ones(width, width, dtype=torch.bool, device=device).tril()], dim=1)


def similar(lengths: Sequence[int], prefix: int, worth: int) -> list[list[int]]:
    """Indices of lengths in groups, longest first, whose padding is cheaper than another group.

    Cost of a group: its rows times its longest length times what that sees, prefix included, in pairs of positions. A
    group ends where ending it saves `worth` pairs of those that are left. One group keeps the order of `lengths`.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    groups: list[list[int]] = [[]]
    for done, index in enumerate(order):
        longest, own = lengths[groups[-1][0]] if groups[-1] else lengths[index], lengths[index]
        saved = longest * (prefix + longest) - own * (prefix + own)
        if saved * (len(order) - done) > worth:
            groups.append([])
        groups[-1].append(index)
    return groups if len(groups) > 1 else [sorted(order)]


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
