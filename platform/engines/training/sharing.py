"""Splits a mini-batch over the data-parallel ranks of a model and merges their metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_platform.algorithms.balance import balance_metrics, balanced_parts, contiguous_parts, sequence_cost
from rl_platform.algorithms.metrics import Metrics, Sums, over
from rl_platform.engines.training.base import MicroBatches, row_lengths
from rl_platform.records import RolloutBatch
from rl_platform.runtime.collective_limit import collective_limit

T = TypeVar("T")


def group_along(axis: int, shape: Sequence[int]) -> dist.ProcessGroup:
    """Forms groups of ranks and returns the group of this rank. All ranks must call it in the same order.

    The ranks are laid out in an array of `shape`. Ranks whose positions differ along `axis` only form a group.
    """
    ranks = torch.arange(math.prod(shape)).view(*shape).movedim(axis, -1).reshape(-1, shape[axis])
    own, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=collective_limit())
    return own


@dataclass(frozen=True)
class Group:
    """A process group with this rank's index; `handle` None: this is the only rank."""

    handle: dist.ProcessGroup | None
    rank: int
    size: int

    @classmethod
    def of(cls, handle: dist.ProcessGroup) -> Group:
        """Returns the group of a process group of torch."""
        size = handle.size()
        return cls(handle if size > 1 else None, handle.rank(), size)

    def sum(self, tensor: Tensor) -> Tensor:
        """Sums `tensor` over the ranks, in place."""
        if self.handle is not None:
            dist.all_reduce(tensor, group=self.handle)
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Returns the equally shaped tensors of all ranks, in order of rank."""
        if self.handle is None:
            return [tensor]
        tensors = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(tensors, tensor.contiguous(), group=self.handle)
        return tensors

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Overwrites `tensor` with that of rank `source` of the group."""
        if self.handle is not None:
            dist.broadcast(tensor, group=self.handle, group_src=source)
        return tensor

    def broadcast_object(self, value: T, source: int) -> T:
        """Returns the object of rank `source` of the group."""
        if self.handle is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, group=self.handle, group_src=source)
        return box[0]


def shares(
    batch: RolloutBatch,
    micro_batches: MicroBatches,
    rank: int,
    world_size: int,
    hidden_size: int = 0,
    balance: bool = True,
) -> list[Sequence[int]]:
    """Returns one rank's micro-batches as row indices.

    Each row belongs to one rank. The numbers of rows differ by at most one, and with `balance` the work is similar on
    all ranks, measured by `sequence_cost` with the model's `hidden_size`; without it rows are cut in order. Every rank
    gets the same number of micro-batches, so that collectives match; the last ones may be empty.
    """
    plans = [micro_batches.split(batch, rows) for rows in _rows_of_ranks(batch, world_size, hidden_size, balance)]
    longest = max(len(plan) for plan in plans)
    return [*plans[rank], *([] for _ in range(longest - len(plans[rank])))]


def _rows_of_ranks(batch: RolloutBatch, world_size: int, hidden_size: int, balance: bool) -> list[Sequence[int]]:
    """Returns the row indices of each rank. The arguments are those of `shares`."""
    rows = range(len(batch))
    if world_size == 1:
        return [rows]
    lengths = row_lengths(batch)
    if min(lengths) == max(lengths):  # transitions of an embodied task: any equal split has equal work
        return [rows[start::world_size] for start in range(world_size)]
    if not balance:
        return [*contiguous_parts(len(batch), world_size)]
    return [*balanced_parts([sequence_cost(length, hidden_size) for length in lengths], world_size)]


def balance_metrics_of(batch: RolloutBatch, world_size: int, hidden_size: int, balance: bool) -> Metrics:
    """Returns metrics of the balance of work over ranks; empty if all rows are equally long."""
    lengths = row_lengths(batch)
    if min(lengths) == max(lengths):
        return Metrics()
    values = balance_metrics(lengths, _rows_of_ranks(batch, world_size, hidden_size, balance), hidden_size)
    return Metrics(means=over(1.0, {name: torch.tensor(value) for name, value in values.items()}))


def hidden_size_of(model: nn.Module) -> int:
    """Returns the hidden size of a language model; 0 for other models, whose rows are equally long."""
    return getattr(model, "hidden_size", 0)


def part_of(batch: RolloutBatch, rows: Sequence[int]) -> RolloutBatch:
    """Returns the given rows. For no rows it returns one masked row, so that an idle rank joins all collectives."""
    if not rows:
        return replace(batch.select(torch.tensor([0])), sample_mask=torch.tensor([False]))
    return batch if rows == range(len(batch)) else batch.select(torch.tensor(rows))


def over_ranks(metrics: Metrics, device: torch.device, group: Group) -> Metrics:
    """Merges the metrics of all ranks of `group`, on every rank. All must have the same names in the same order."""

    def reduced(tensors: Sequence[Tensor | np.ndarray | float], operation: dist.ReduceOp.RedOpType) -> list[Tensor]:
        if not tensors:
            return []
        parts = [torch.as_tensor(tensor, dtype=torch.float64, device=device) for tensor in tensors]
        flat = torch.cat([part.reshape(-1) for part in parts])
        dist.all_reduce(flat, operation, group.handle)
        return [new.view_as(part) for new, part in zip(flat.split([p.numel() for p in parts]), parts, strict=True)]

    totals = reduced([sums.total for sums in metrics.means.values()], dist.ReduceOp.SUM)
    counts = reduced([sums.count for sums in metrics.means.values()], dist.ReduceOp.SUM)
    minima = reduced(list(metrics.minima.values()), dist.ReduceOp.MIN)
    maxima = reduced(list(metrics.maxima.values()), dist.ReduceOp.MAX)
    return Metrics(
        means={names: Sums(*sums) for names, sums in zip(metrics.means, zip(totals, counts, strict=True), strict=True)},
        minima=dict(zip(metrics.minima, minima, strict=True)),
        maxima=dict(zip(metrics.maxima, maxima, strict=True)),
    )
