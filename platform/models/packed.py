"""Packs sequences of different lengths into one forward pass, without padding and with a shared prefix computed once.

`PackedTokens` is one flat row of tokens: the prefix that all sequences share (such as the system turn of a chat
template), then the rest of each sequence. Linear layers, norms and embeddings process only real tokens;
`PackedAttention` separates the sequences. The gradient of the prefix is the sum over the sequences, so losses and
gradients equal those of separate padded rows. GPUs share long prefixes only, see `pack`.

Not covered: splitting tokens over ranks, see `context_parallel`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Required, TypedDict

import torch
from torch import Tensor

from rl_platform.device_copy import on_device
from rl_platform.models.attention import Features, attend, causal_mask
from rl_platform.models.varlen import VarlenAttention, half_precision

ATTENTION = "rl_platform"
CPU = torch.device("cpu")
Attention = Callable[[int, Tensor, Tensor, Tensor, float, Features | None], Tensor]
"""(layer, query [1,Hq,N,D], key [1,Hkv,N,D], value [1,Hkv,N,V], scaling, features) -> [N,Hq,V]. features None: plain
causal attention."""
# Pairs of positions whose attention costs as much as one more kernel call.
SPLIT = {"cpu": 2**14, "cuda": 2**23}
# Least tokens of a common prefix that is computed once. On a GPU a shorter prefix costs less than an attention with
# masks, or than the copies of its keys and values.
SHARED = {"cpu": 1, "cuda": 256}


class _Options(TypedDict, total=False):
    """Arguments of `attend`."""

    scaling: Required[float]
    softcap: float | None
    sinks: Tensor | None


@dataclass(frozen=True)
class PackedTokens:
    """tokens, positions [N] int64, N = prefix + sum of the rests; attention: which of them attend to each other.

    flat_index [B,T] int64: the index of position t of row b in the flat row; 0 for padding.
    """

    tokens: Tensor
    positions: Tensor
    flat_index: Tensor
    attention: Attention

    def to(self, device: torch.device, *others: Tensor) -> tuple[PackedTokens, list[Tensor]]:
        """Returns the tokens on `device`, and other tensors of main memory that are part of the same copy."""
        own = [self.tokens, self.positions, self.flat_index]
        tokens, positions, flat_index, *copies = on_device([*own, *others], device)
        return PackedTokens(tokens, positions, flat_index, self.attention), copies


class PackedAttention:
    """Causal attention over packed sequences: every sequence attends to the shared prefix and to itself.

    lengths [B]: of each sequence's rest; rest_index [B,S] int64 in main memory: flat indices of the rests, padded on
    the right with 0. Sequences of similar length are computed together, padded to the longest of them. Padding is on
    the right, so the causal mask hides it from real tokens. If a GPU has a kernel for sequences of any length
    (`varlen`), it computes them instead.
    """

    def __init__(self, prefix: int, lengths: Sequence[int], rest_index: Tensor) -> None:
        self.prefix, self.lengths, self._rest_index = prefix, lengths, rest_index
        self._varlen: VarlenAttention | None = None
        self._masks: dict[int | None, tuple[Tensor | None, list[Tensor | None]]] = {}
        self.shapes: list[tuple[int, int]] = []

    def _group(self, device: torch.device) -> None:
        """Plans the groups of similar lengths in main memory and copies their indices to `device`."""
        lengths = self.lengths
        groups = similar(lengths, self.prefix, SPLIT.get(device.type, SPLIT["cuda"]))
        self.shapes = [(len(rows), max(lengths[row] for row in rows)) for rows in groups]
        rest_mask = torch.arange(self._rest_index.shape[1]) < torch.tensor(lengths)[:, None]
        padded = [
            (self._rest_index[rows, :width], rest_mask[rows, :width])
            for rows, (_, width) in zip(groups, self.shapes, strict=True)
        ]
        gathered, real = (torch.cat([pair[part].reshape(-1) for pair in padded]) for part in (0, 1))
        places = real.nonzero().squeeze(1)
        returned = places[gathered[places].argsort()]
        self.gathered, self.returned = on_device([gathered, returned], device)

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, features: Features | None = None
    ) -> Tensor:
        """query [1,Hq,N,D], key [1,Hkv,N,D], value [1,Hkv,N,V] -> [N,Hq,V]."""
        halves = half_precision(query, key, value, features)
        if halves is not None:
            if self._varlen is None:
                self._varlen = VarlenAttention(self.prefix, self.lengths, query.device)
            return self._varlen(*halves, scaling, None if features is None else features.window)
        if not self.shapes:
            self._group(query.device)
        options: _Options = {"scaling": scaling}
        if features is not None:
            options["softcap"] = features.softcap
            options["sinks"] = None if features.sinks is None else features.sinks[:, None, None]
        first_mask, masks = self._masks_of(None if features is None else features.window, query.device)
        repeat = query.shape[1] // key.shape[1]
        if repeat > 1:
            key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
        head = [tensor[:, :, : self.prefix] for tensor in (query, key, value)]
        groups = zip(*(self._groups_of(tensor) for tensor in (query, key, value)), masks, strict=True)
        outs = [self._attend(own, head, mask, options) for *own, mask in groups]
        out = torch.cat(outs).index_select(0, self.returned)
        if not self.prefix:
            return out
        first = attend(head[0], head[1], head[2], first_mask, **options)
        return torch.cat([first[0].transpose(0, 1), out])

    def _masks_of(self, window: int | None, device: torch.device) -> tuple[Tensor | None, list[Tensor | None]]:
        """Returns the masks of the prefix and of each group; None where plain causal attention is the same."""
        if window is not None and window >= self.prefix + max(width for _, width in self.shapes):
            window = None
        if window not in self._masks:
            spans = [(self.prefix, 0), *((width, self.prefix) for _, width in self.shapes)]
            first, *rest = [
                causal_mask(width, before + width, window, device) if before or (window or width) < width else None
                for width, before in spans
            ]
            self._masks[window] = first, rest
        return self._masks[window]

    def _groups_of(self, tensor: Tensor) -> list[Tensor]:
        """[1,H,N,D] -> of every group [B,H,S,D]."""
        rows = tensor[0].transpose(0, 1).index_select(0, self.gathered)
        groups = rows.split([count * width for count, width in self.shapes])
        return [group.unflatten(0, shape).transpose(1, 2) for group, shape in zip(groups, self.shapes, strict=True)]

    def _attend(self, own: list[Tensor], head: list[Tensor], mask: Tensor | None, options: _Options) -> Tensor:
        """own: query, key and value [B,H,S,D]; head: those of the prefix [1,H,P,D] -> [B*S,H,D]."""
        query, key, value = own
        if self.prefix:
            first_key, first_value = (tensor.expand(len(query), -1, -1, -1) for tensor in head[1:])
            key, value = torch.cat([first_key, key], dim=2), torch.cat([first_value, value], dim=2)
        return attend(query, key, value, mask, **options).transpose(1, 2).flatten(0, 1)


def similar(lengths: Sequence[int], prefix: int, worth: int) -> list[list[int]]:
    """Returns groups of indices into `lengths`, longest first, so that padding costs less than another group would.

    The cost of a group in pairs of positions is rows * longest * (prefix + longest). A group ends where a new one saves
    more than `worth` pairs of the remaining rows. A single group keeps the order of `lengths`.
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


def pack(sequences: Sequence[Tensor], device: torch.device = CPU) -> PackedTokens:
    """Packs token sequences [L_b] int64 of main memory, L_b > 0. Their longest common prefix is stored once.

    The result is in main memory; `PackedTokens.to` copies it. `device`: the device of the forward pass; a prefix
    shorter than SHARED of its type is stored with every sequence.
    """
    prefix = common_prefix(sequences) if len(sequences) > 1 else 0
    if prefix < SHARED.get(device.type, SHARED["cuda"]):
        prefix = 0
    lengths = [len(sequence) - prefix for sequence in sequences]
    rest = torch.tensor(lengths)
    starts = prefix + torch.cumsum(rest, 0) - rest
    columns = torch.arange(max(lengths))
    rest_mask = columns < rest[:, None]
    rest_index = torch.where(rest_mask, starts[:, None] + columns, 0)
    tokens = torch.cat([sequences[0][:prefix], *(sequence[prefix:] for sequence in sequences)])
    positions = torch.cat([torch.arange(prefix), (prefix + columns).expand_as(rest_mask)[rest_mask]])
    shared = torch.arange(prefix).expand(len(sequences), -1)
    flat_index = torch.cat([shared, rest_index], dim=1)
    return PackedTokens(tokens, positions, flat_index, PackedAttention(prefix, lengths, rest_index))


def common_prefix(sequences: Sequence[Tensor]) -> int:
    """Returns the number of leading tokens that all sequences share, at most one less than the shortest length."""
    limit = min(len(sequence) for sequence in sequences) - 1
    heads = torch.stack([sequence[:limit] for sequence in sequences])
    same = (heads == heads[:1]).all(dim=0)
    return int(same.long().cumprod(0).sum())
