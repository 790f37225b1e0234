"""Which parts of whole tensors a Megatron parameter is made of, as views into the memory that holds it.

A rank's parameter may be rows of several tensors in turn, and its optimizer may hold any stretch of that parameter,
laid flat. Plain tensor work.
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
    """`rows` rows of a parameter from row `local` on: rows of tensor number `index` of its source from `first` on."""

    index: int
    local: int
    first: int
    rows: int


def placed(
    source: Source, rank: int, shape: Shape, whole: Sequence[Shape], values: Tensor, start: int = 0
) -> Iterator[tuple[int, Offsets, Tensor]]:
    """The parts (number of the tensor in `source`, offsets in it, view) that `values` consists of.

    shape: of the parameter that `rank` of those who share the source holds; whole: of the source's tensors. values: as
    many elements of the flat parameter from `start` on. What only fills a vocabulary up belongs to no tensor.
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
    """The elements [start:stop] of a flat tensor as boxes (offsets, sizes), in order.

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
        case _:  # equal shares one after the other; the last ones may be filled up
            first = rank * rows
            return [Run(0, 0, first, min(rows, whole[0][0] - first))]
