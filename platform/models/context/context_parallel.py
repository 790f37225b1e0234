"""Context parallelism: ranks split the tokens of a micro-batch (Jacobs et al., "DeepSpeed Ulysses", 2023).

Each rank holds an equal slice of the packed tokens and runs every layer but attention on it. Two all-to-alls surround
attention: the first gives a rank all tokens of its share of the heads, the second its tokens of all heads. Each rank
computes log-probs and values of its own positions; their sum over the ranks is the whole result.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from rl_platform.models.attention import Features
from rl_platform.models.autograd_context import AutogradContext
from rl_platform.models.packed import Attention, PackedTokens

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx


class ContextParallel:
    """The ranks of `group`, which process the same micro-batches together."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def shared(self, packed: PackedTokens, rows: Tensor, columns: Tensor) -> tuple[PackedTokens, Tensor, Tensor]:
        """Returns this rank's slice of the tokens, and the positions (rows, columns) [K] that follow its tokens."""
        local = self.slice(packed)
        own = self.is_own(local, rows, columns)
        return local, rows[own], columns[own]

    def slice(self, packed: PackedTokens, multiple: int = 1) -> PackedTokens:
        """Returns this rank's slice of the tokens. Slices are equally long, a multiple of `multiple`.

        `flat_index` counts from the first token of the slice. Padding tokens fill the last slices.
        """
        count = len(packed.tokens)
        length = -(-count // (self.size * multiple)) * multiple
        start = self.rank * length
        tokens, positions = (
            F.pad(flat, (0, self.size * length - count))[start : start + length]
            for flat in (packed.tokens, packed.positions)
        )
        attention = UlyssesAttention(packed.attention, self, count, length)
        index = packed.flat_index - start
        return replace(packed, tokens=tokens, positions=positions, flat_index=index, attention=attention)

    @staticmethod
    def is_own(local: PackedTokens, rows: Tensor, columns: Tensor) -> Tensor:
        """Returns which of the positions (rows, columns) [K] follow a token of the slice `local`, bool [K]."""
        before = local.flat_index[rows, columns - 1]
        return (before >= 0) & (before < len(local.tokens))

    def whole(self, part: Tensor) -> Tensor:
        """Returns the sum of `part` over the ranks. Backward copies the gradient, as all ranks compute one loss."""
        summed: Tensor = SumOverRanks.apply(part, self.group)  # type: ignore[no-untyped-call]
        return summed


class UlyssesAttention:
    """Runs `attention` over all tokens for this rank's heads. Called as `PackedAttention`, with a slice of the tokens.

    `count`: number of all tokens; `length`: of those of a slice. The number of ranks divides the query heads. Key and
    value heads are repeated until it divides them too, which changes no result.
    """

    def __init__(self, attention: Attention, context: ContextParallel, count: int, length: int) -> None:
        self.attention, self.context, self.count, self.length = attention, context, count, length

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, features: Features | None = None
    ) -> Tensor:
        """query [1,Hq,n,D], key [1,Hkv,n,D], value [1,Hkv,n,V] of this rank's n tokens -> [n,Hq,V]."""
        repeat = self.context.size // key.shape[1] if key.shape[1] % self.context.size else 1
        if repeat > 1:
            key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
        query, key, value = (self._heads(tensor) for tensor in (query, key, value))
        if features is not None and features.sinks is not None:
            features = replace(features, sinks=features.sinks.chunk(self.context.size)[self.context.rank])
        out = self.attention(layer, query, key, value, scaling, features)
        return self._tokens(out)

    def _heads(self, tensor: Tensor) -> Tensor:
        """[1,H,n,D] of this rank's tokens -> [1,H/ranks,N,D] of this rank's heads."""
        ranks = self.context.size
        parts = torch.unflatten(tensor[0], 0, (ranks, -1)).transpose(1, 2)  # [ranks,n,H/ranks,D], by receiver
        received = _exchange(parts, self.context.group).flatten(0, 1)  # [ranks*n,H/ranks,D]
        return received[: self.count].transpose(0, 1)[None]

    def _tokens(self, out: Tensor) -> Tensor:
        """[N,H/ranks,D] of this rank's heads -> [n,H,D] of this rank's tokens."""
        ranks = self.context.size
        filled = F.pad(out, (0, 0, 0, 0, 0, ranks * self.length - self.count))
        parts = _exchange(torch.unflatten(filled, 0, (ranks, -1)), self.context.group)  # [ranks,n,H/ranks,D]
        return parts.transpose(0, 1).flatten(1, 2)


def _exchange(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-to-all of parts [ranks,...]: sends part r to rank r and returns the parts received, in order of rank."""
    received: Tensor = _AllToAll.apply(parts.contiguous(), group)  # type: ignore[no-untyped-call]
    return received


class _AllToAllContext(AutogradContext):
    group: dist.ProcessGroup


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _AllToAllContext, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: _AllToAllContext, gradient: Tensor) -> tuple[Tensor, None]:
        return _exchange(gradient, ctx.group), None


class SumOverRanks(torch.autograd.Function):
    """All-reduce. The backward pass copies the gradient, because every rank computes the same loss from the sum."""

    @staticmethod
    def forward(ctx: FunctionCtx, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        summed = part.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
