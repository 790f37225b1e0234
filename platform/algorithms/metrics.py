"""Metrics of the losses as partial sums and extrema, so that merging micro-batches, mini-batches and ranks is exact.

Metrics that share a count are one vector, as an embodied run has tens of thousands of mini-batches of about a
millisecond. Nothing waits for a device before `finalize`. Names and log writers are not here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float, Int, Shaped

    from rl_platform.algorithms.shapes import BoolBT, FloatBT

Names = tuple[str, ...]
Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Sums:
    """`total` [K] of K metrics, and the `count` all of them are divided by in the end."""

    total: Shaped[Tensor, " metrics"] | np.ndarray
    count: Shaped[Tensor, ""] | float

    def __add__(self, other: Sums) -> Sums:
        return Sums(self.total + other.total, self.count + other.count)


@dataclass(frozen=True)
class Metrics:
    """means: the names of K metrics -> their sums. minima, maxima: name -> scalar tensor, or a number."""

    means: dict[Names, Sums] = field(default_factory=dict)
    minima: dict[str, Float[Tensor, ""] | float] = field(default_factory=dict)
    maxima: dict[str, Float[Tensor, ""] | float] = field(default_factory=dict)

    def merge(self, other: Metrics) -> Metrics:
        """Returns both together: sums and counts add up, extrema are compared."""
        return Metrics.together([self, other])

    @classmethod
    def together(cls, parts: Sequence[Metrics]) -> Metrics:
        """Returns all of them merged, in one pass."""
        return cls(
            _merged((part.means for part in parts), _sum_of),
            _merged((part.minima for part in parts), lambda values: _extremum(values, min, torch.minimum)),
            _merged((part.maxima for part in parts), lambda values: _extremum(values, max, torch.maximum)),
        )

    def mean(self, name: str) -> float | None:
        """Returns one of the means; None if no position contributed to it. Waits for the device."""
        return self._means().get(name)

    def finalize(self) -> dict[str, float]:
        """Returns numbers for the log, without metrics that no position contributed to (count 0, infinite extremum)."""
        result = self._means()
        for extrema, nothing in ((self.minima, float("inf")), (self.maxima, float("-inf"))):
            values = {name: float(value) for name, value in extrema.items()}
            result.update((name, value) for name, value in values.items() if value != nothing)
        return result

    def _means(self) -> dict[str, float]:
        """Returns the means by name. Several vectors may hold a name: mini-batches may be computed differently."""
        totals: dict[str, float] = {}
        counts: dict[str, float] = {}
        for names, sums in self.means.items():
            count = float(sums.count)
            for name, total in zip(names, sums.total.tolist(), strict=True):
                totals[name], counts[name] = totals.get(name, 0.0) + total, counts.get(name, 0.0) + count
        return {name: total / counts[name] for name, total in totals.items() if counts[name] > 0}


def _merged(parts: Iterable[dict[Key, Value]], combine: Callable[[Sequence[Value]], Value]) -> dict[Key, Value]:
    values: dict[Key, list[Value]] = defaultdict(list)
    for part in parts:
        for key, value in part.items():
            values[key].append(value)
    return {key: combine(several) for key, several in values.items()}


def _sum_of(parts: Sequence[Sums]) -> Sums:
    if all(isinstance(part.total, np.ndarray) and isinstance(part.count, float) for part in parts):
        return Sums(np.add.reduce([part.total for part in parts]), sum(part.count for part in parts))
    return reduce(Sums.__add__, parts)


def _extremum(
    values: Sequence[Tensor | float],
    of_numbers: Callable[[Sequence[float]], float],
    of_tensors: Callable[[Tensor, Tensor], Tensor],
) -> Tensor | float:
    numbers = [value for value in values if isinstance(value, float)]
    return of_numbers(numbers) if len(numbers) == len(values) else reduce(of_tensors, map(torch.as_tensor, values))


def over(count: Shaped[Tensor, ""] | float, totals: dict[str, Shaped[Tensor, ""]]) -> dict[Names, Sums]:
    """Returns the sums of some scalars of one type, to be divided by `count` in the end."""
    return {tuple(totals): Sums(torch.stack(list(totals.values())), count)}


def active_positions(like: FloatBT, mask: BoolBT | None) -> Int[Tensor, ""] | float:
    """Returns the number of positions of a tensor [B,T] that count; `mask` None: all."""
    return float(like.numel()) if mask is None else torch.count_nonzero(mask)
