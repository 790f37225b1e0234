"""Filters of the user: which groups of responses a step trains on, and which single responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import torch

from rl_platform.records import Trajectory
from rl_platform.user_code import Extension

if TYPE_CHECKING:
    from rl_platform.algorithms.shapes import BoolB


@runtime_checkable
class GroupFilter(Protocol):
    """Selects groups, in place of the comparison of their scores."""

    def __call__(self, group: Sequence[Trajectory], /) -> bool:
        """Returns True if the group is trained on, False if another prompt replaces it.

        group: all scored responses to a prompt.
        """


@runtime_checkable
class SampleFilter(Protocol):
    """Selects responses. The group still compares itself to a dropped one, unless `group_ignore_masked` is set."""

    def __call__(self, response: Trajectory, /) -> bool:
        """Returns True if the scored response is trained on, False if it is masked out of the losses."""


GROUPS = Extension(
    "filter of groups", "algorithm.dynamic_sampling.filter", GroupFilter, "function(group: list of Trajectory) -> bool"
)
SAMPLES = Extension(
    "filter of samples", "algorithm.sample_filter", SampleFilter, "function(response: Trajectory) -> bool"
)


def selection(name: str) -> Callable[[Sequence[Trajectory]], BoolB]:
    """Returns a function from responses to [B] bool: those that the user's filter selects.

    Responses without a score are not shown to it. Raises ConfigError for a filter that cannot be imported.
    """
    function: SampleFilter = SAMPLES.load(name)

    def select(trajectories: Sequence[Trajectory]) -> BoolB:
        selected = [each.valid and decision(SAMPLES, name, function, each) for each in trajectories]
        return torch.tensor(selected, dtype=torch.bool)

    return select


def decision(kind: Extension, name: str, function: Callable[..., object], item: object) -> bool:
    """Returns whether a filter keeps `item`. Raises ConfigError if it returns no bool, WorkerError if it fails."""
    with kind.running(name):
        keeps = function(item)
    if not isinstance(keeps, bool | np.bool_):
        raise kind.misfit(name, f"returned {keeps!r}, not True or False")
    return bool(keeps)
