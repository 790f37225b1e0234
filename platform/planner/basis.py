"""The inputs of a prediction beside the config: lengths, rates, and corrections measured in an earlier run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rl_platform.planner.lengths import Lengths
from rl_platform.planner.rates import Rates

COMPUTE = {"arithmetic", "memory traffic", "launches"}  # bounds of work without other devices
Bounds = dict[str, float]
"""Seconds of a part of a phase by kind of work. The part takes as long as the slowest kind."""


@dataclass(frozen=True)
class Correction:
    """The measured seconds of a phase in multiples of the prediction, and the bound of the prediction.

    If a phase is slower than predicted, `apply` scales its bound, or all work of the device itself if the bound is of
    this kind. If it is faster, `apply` scales everything.
    """

    factor: float
    bound: str

    def apply(self, bounds: Bounds) -> Bounds:
        slower = COMPUTE if self.bound in COMPUTE else {self.bound}
        return {
            name: seconds * self.factor if name in slower or self.factor < 1 else seconds
            for name, seconds in bounds.items()
        }


@dataclass(frozen=True)
class Basis:
    """The inputs of a prediction. None: greatest lengths, rates of the data sheet.

    corrections: by phase, or by timing of other work. other_seconds: measured seconds of uncorrected other work.
    """

    lengths: Lengths | None = None
    rates: Rates | None = None
    corrections: Mapping[str, Correction] = field(default_factory=dict)
    other_seconds: Mapping[str, float] = field(default_factory=dict)
