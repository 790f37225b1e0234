"""Proposed placements and their ranking: the result of `search.py`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from rl_platform.errors import ConfigError
from rl_platform.placement.estimates.hardware import Device
from rl_platform.planner.config_variants import Changes
from rl_platform.planner.placement_text import number_ranges
from rl_platform.planner.step_timeline import Span, step_seconds

TRIES = 8  # candidates with other results that are checked
Keys = tuple[tuple[tuple[str, ...], range], ...]


@dataclass(frozen=True)
class Candidate:
    """A placement, its predicted step, the bytes of its fullest device, and whether it fits into memory.

    rollout_devices: of a rollout rank. changes: other keys of the config that it changes. overlapping: seconds from
    step to step if the generation is ahead of the training. worked: seconds of work in a step, summed over the devices.
    """

    keys: Keys
    spans: tuple[Span, ...]
    peak: int
    fits: bool = True
    rollout_devices: int = 1
    changes: Changes = field(default_factory=dict)
    overlapping: float | None = None
    worked: float = 0.0

    @property
    def seconds(self) -> float:
        return step_seconds(self.spans) if self.overlapping is None else self.overlapping

    @property
    def ahead(self) -> bool:
        """Whether it changes results: it generates with weights that are one update older."""
        return "runner.max_staleness" in self.changes

    def idle(self, available: int) -> float:
        """Returns the share of the time of `available` devices in which none of their components works."""
        return max(0.0, 1 - self.worked / (self.seconds * available))

    @property
    def devices(self) -> int:
        return sum(len(devices) for _, devices in self.keys)

    @property
    def component_placement(self) -> dict[str, str]:
        """The value of `cluster.component_placement`."""
        value = {}
        for names, devices in self.keys:
            together = tuple(name for name in names if name != "rollout" or self.rollout_devices == 1)
            text = number_ranges(devices)
            if together:
                value[",".join(together)] = text
            if together != names:
                value["rollout"] = f"{text}:{number_ranges(range(len(devices) // self.rollout_devices))}"
        return value

    @property
    def order(self) -> tuple[float, int, int, int, str]:
        """The sort key: faster, then fewer devices, then simpler."""
        simpler = len(self.changes), len(self.keys), f"{self.component_placement} {self.changes}"
        return (self.seconds, self.devices, *simpler)

    @property
    def overrides(self) -> list[str]:
        """The candidate as overrides of the config."""
        placement = f"cluster.component_placement={json.dumps(self.component_placement)}"
        return [placement, *(f"{key}={json.dumps(value)}" for key, value in self.changes.items())]


@dataclass(frozen=True)
class SearchResult:
    """Candidates that fit, best first. too_large: number of others. smallest_peak: bytes of the smallest of these.

    ahead: candidates that fit, best first, and change results. device: of several kinds (`mixed`) the least memory and
    the lowest rates.
    """

    candidates: tuple[Candidate, ...]
    too_large: int
    smallest_peak: int
    device: Device
    mixed: bool
    available: int
    ahead: tuple[Candidate, ...] = ()

    @property
    def best_of_groupings(self) -> list[Candidate]:
        """The best candidate of each grouping of components, best first."""
        best = {frozenset(names for names, _ in candidate.keys): candidate for candidate in reversed(self.candidates)}
        return sorted(best.values(), key=lambda candidate: candidate.order)

    @property
    def best_ahead(self) -> Candidate | None:
        """The best candidate that changes results, if it is faster than all that do not."""
        faster = self.ahead and (not self.candidates or self.ahead[0].seconds < self.candidates[0].seconds)
        return self.ahead[0] if faster else None

    def checked(self, check: Callable[[Candidate], object]) -> SearchResult:
        """Returns the result without the candidates for which `check` raises ConfigError, as far as they are the best
        of a grouping. Raises the last error if none is left."""
        left, passed = self, set[int]()
        for candidate in self.ahead[:TRIES]:
            try:
                check(candidate)
            except ConfigError:
                left = replace(left, ahead=left.ahead[1:])
            else:
                break
        else:
            left = replace(left, ahead=())
        while True:
            refused = set[int]()
            for candidate in left.best_of_groupings:
                if id(candidate) in passed:
                    continue
                try:
                    check(candidate)
                    passed.add(id(candidate))
                except ConfigError as error:
                    refused.add(id(candidate))
                    last = error
            if not refused:
                return left
            candidates = tuple(candidate for candidate in left.candidates if id(candidate) not in refused)
            if not candidates:
                raise last
            left = replace(left, candidates=candidates)
