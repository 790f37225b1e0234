"""Maps Megatron parameters to the parts of whole tensors that they consist of, as views.

A rank's parameter may interleave rows of several tensors, and its optimizer may hold any slice of the flattened
parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from rl_platform.engines.training.megatron.weights import Source
from rl_platform.engines.training.sharded_state import Offsets

Shape = Sequence[int]


@dataclass(frozen=True)
class Run:
    """Rows [local, local + rows) of a parameter are rows [first, first + rows) of tensor `index` of its source."""

    index: int
    local: int
    first: int
    rows: int


def placed(
    source: Source, rank: int, shape: Shape, whole: Sequence[Shape], values: Tensor, start: int = 0
) -> Iterator[tuple[int, Offsets, Tensor]]:
    """Yields the parts of `values` as (index of the tensor in `source`, offsets in it, view).

    shape: of the parameter of `rank`, one of the ranks that share the source; whole: shapes of the source's tensors;
    values: elements of the flattened parameter from `start` on. Padding of the vocabulary belongs to no tensor.
    """
    values = values.reshape(-1)
    runs = _runs(source, rank, shape[0], whole)
    column = rank * shape[1] if source.sharing == "columns" else 0
    done = 0
    for (row, *others), (rows, *sizes) in boxes(shape, start, start + len(values)):
        if others:
            others[0] += column
        width = math.prod(sizes)
        for run in runs:
            low, high = max(row, run.local), min(row + rows, run.local + run.rows)
            if low < high:
                part = values[done + (low - row) * width : done + (high - row) * width]
                yield run.index, (run.first + low - run.local, *others), part.view(high - low, *sizes)
        done += rows * width


def boxes(shape: Shape, start: int, stop: int) -> Iterator[tuple[Offsets, tuple[int, ...]]]:
    """Yields the elements [start:stop] of a flattened tensor as boxes (offsets, sizes), in order.

    >>> list(boxes((3, 4), 2, 9))
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    inner = math.prod(shape[1:])
    row, within = divmod(start, inner)
    if within or stop - start < inner:  # a part of a row
        end = min(stop, (row + 1) * inner)
        for offsets, sizes in boxes(shape[1:], within, end - row * inner):
            yield (row, *offsets), (1, *sizes)
        yield from boxes(shape, end, stop)
        return
    rows = (stop - start) // inner
    yield (row, *(0 for _ in shape[1:])), (rows, *shape[1:])
    yield from boxes(shape, start + rows * inner, stop)


def _runs(source: Source, rank: int, rows: int, whole: Sequence[Shape]) -> list[Run]:
    match source.sharing:
        case "replicated" | "columns":
            return [Run(0, 0, 0, rows)]
        case "gate_up":
            half = rows // 2
            return [Run(index, index * half, rank * half, half) for index in range(2)]
        case "qkv":  # for each key head its queries, the key, the value
            queries, size = whole[0][0] // source.key_heads, source.head_size
            together = queries + 2 * size
            runs = []
            for number in range(rows // together):
                head, local = rank * (rows // together) + number, number * together
                runs.append(Run(0, local, head * queries, queries))
                runs.append(Run(1, local + queries, head * size, size))
                runs.append(Run(2, local + queries + size, head * size, size))
            return runs
        case _:  # consecutive equal shares; the last ones may have padding
            first = rank * rows
            return [Run(0, 0, first, min(rows, whole[0][0] - first))]
