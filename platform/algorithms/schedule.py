"""The rows of each optimizer step: mini-batches, shuffled in every epoch. Engines split them into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rl_platform.records import RolloutBatch

if TYPE_CHECKING:
    from jaxtyping import Int, Shaped

LARGEST_KEPT = 2**24  # bytes of a batch whose copies stay for the next one
Orders = Callable[[int], torch.Generator | None]
"""Epoch -> generator of its order; None: the rows stay in their order."""


@dataclass
class ShuffleBuffers:
    """Memory and thread of the shuffled epochs, which one batch passes on to the next.

    copies: up to two copies of a batch, each with its mini-batches; those larger than `LARGEST_KEPT` are not reused.
    thread: fills the copies; it starts with its first task.
    """

    copies: list[tuple[RolloutBatch, list[RolloutBatch]]] = field(default_factory=list)
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "shuffle"))


class MiniBatches:
    """The rows of a batch in mini-batches of `size`, epoch by epoch.

    Shuffled epochs alternate between two copies of the batch: while one is trained on, a thread fills the other. A
    mini-batch is therefore valid until the next epoch begins.
    """

    def __init__(self, batch: RolloutBatch, size: int, buffers: ShuffleBuffers | None = None) -> None:
        """Stores the batch. `size` must divide its rows: a smaller last mini-batch would give its rows a larger weight.

        buffers: given by a caller that shuffles many batches.
        """
        self._batch, self._size = batch, size
        self._buffers = ShuffleBuffers() if buffers is None else buffers
        for copy, parts in self._buffers.copies[:1]:
            if len(parts[0]) != size or not _alike(copy, batch):
                self._buffers.copies.clear()
        assert len(batch) % size == 0, f"mini-batches of {size} do not divide {len(batch)} rows"

    def epochs(self, count: int, orders: Orders) -> Iterator[list[RolloutBatch]]:
        """Yields the mini-batches of `count` epochs; every epoch has every row once."""
        parts = self._epoch(0, orders)
        try:
            for number in range(1, count):
                following = self._buffers.thread.submit(self._epoch, number, orders)
                try:
                    yield parts
                finally:
                    wait([following])  # a caller that stops early may reuse the buffers at once
                parts = following.result()
            yield parts
        finally:
            if sum(tensor.nbytes for tensor in self._batch.tensors()) > LARGEST_KEPT:
                self._buffers.copies.clear()

    def _epoch(self, number: int, orders: Orders) -> list[RolloutBatch]:
        if (generator := orders(number)) is None:
            return self._batch.split(self._size)
        if len(self._buffers.copies) <= number < 2:
            copy = self._batch.empty_like()
            self._buffers.copies.append((copy, copy.split(self._size)))
        shuffled, parts = self._buffers.copies[number % 2]
        order = torch.randperm(len(self._batch), generator=generator)
        for source, target in zip(self._batch.tensors(), shuffled.tensors(), strict=True):
            _take(source, order, target)
        return parts


def _alike(one: RolloutBatch, other: RolloutBatch) -> bool:
    """Returns whether two batches have the same fields, of the same shapes, types and devices."""
    both = ({**batch.inputs, **vars(batch)} for batch in (one, other))
    first, second = (
        {name: (x.shape, x.dtype, x.device) for name, x in fields.items() if isinstance(x, Tensor)} for fields in both
    )
    return first == second


def _take(source: Shaped[Tensor, "rows ..."], order: Int[Tensor, " rows"], target: Shaped[Tensor, "rows ..."]) -> None:
    """Writes the rows of `source` into `target`, in the order of their indices `order` [rows]."""
    if source.device.type != "cpu":
        torch.index_select(source, 0, order, out=target)
        return
    if source.dtype == torch.bfloat16:  # numpy has no such type
        source, target = source.view(torch.int16), target.view(torch.int16)
    # torch would start an OpenMP thread pool in this thread, which nothing ends; mode "raise" would copy twice
    np.take(source.numpy(), order.numpy(), axis=0, out=target.numpy(), mode="clip")


def mini_batches(batch: RolloutBatch, size: int, generator: torch.Generator | None) -> list[RolloutBatch]:
    """Returns one epoch of `MiniBatches`."""
    return next(MiniBatches(batch, size).epochs(1, lambda _: generator))
