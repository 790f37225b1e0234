"""A property: two ways to compute the same numbers, which must agree for all inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_platform.config.schema import Config
from rl_platform.launch.check.samples import CheckedConfig

ALLOWED = 1e-5  # float32 sums in another order
SMALLEST_SCALE = 1e-3  # the least scale of a comparison: smaller numbers are compared as if the largest were this


@dataclass(frozen=True)
class PropertyDifference:
    """The largest difference between two results: the numbers `left` and `right` at that position.

    apart: |left - right| over the largest magnitude of both results, infinite if one is NaN. allowed: its limit.
    """

    what: str
    left: float
    right: float
    apart: float
    allowed: float

    @property
    def holds(self) -> bool:
        return self.apart <= self.allowed


@dataclass(frozen=True)
class Property:
    """A property of a config. compared: both sides in words. differences: yields all comparisons on a case.

    not_asked: returns the reason why the property does not apply to a config, None if it applies.
    """

    name: str
    compared: str
    differences: Callable[[CheckedConfig], Iterator[PropertyDifference]]
    not_asked: Callable[[Config], str | None] = lambda config: None


@dataclass(frozen=True)
class PropertyOutcome:
    """The result of a property: its largest difference, an error, or the reason why it does not apply."""

    name: str
    compared: str
    difference: PropertyDifference | None = None
    error: str = ""
    not_asked: str = ""

    @property
    def failed(self) -> bool:
        return bool(self.error) or (self.difference is not None and not self.difference.holds)

    def __str__(self) -> str:
        difference = self.difference
        if difference is None:
            return f"{self.name}: {self.error or self.not_asked}"
        return (
            f"{self.name}: {difference.what}: {difference.left:.6g} and {difference.right:.6g}, "
            f"difference {difference.apart:.2g}, {difference.allowed:g} allowed"
        )


def compare(
    what: str, left: Tensor | float, right: Tensor | float, allowed: float = ALLOWED, scale: float = SMALLEST_SCALE
) -> PropertyDifference:
    """Returns the largest difference between two tensors of one shape, relative to their largest number or `scale`."""
    left, right = (torch.as_tensor(side).detach().double() for side in (left, right))
    if left.shape != right.shape:
        return PropertyDifference(
            f"{what}, shapes {list(left.shape)} and {list(right.shape)}", math.nan, math.nan, math.inf, 0
        )
    if left.numel() == 0:
        return PropertyDifference(f"{what}, of nothing", math.nan, math.nan, math.inf, 0)
    apart = torch.where(left == right, 0.0, (left - right).abs()).nan_to_num(math.inf, math.inf)
    size = max(float(side.nan_to_num(0, 0, 0).abs().max()) for side in (left, right))
    place = tuple(int(index) for index in torch.unravel_index(apart.argmax(), apart.shape))
    where = f"{what} at {list(place)}" if place else what
    return PropertyDifference(
        where, float(left[place]), float(right[place]), float(apart[place]) / max(size, scale), allowed
    )
