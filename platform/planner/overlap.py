"""Generation that runs ahead of training (`runner.max_staleness`): seconds from step to step, and idle shares.

Times of a plan do not vary, so every k above 0 gives the same step. A larger k helps only where times vary, which no
plan predicts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl_platform.placement.layout import Layout
from rl_platform.planner.cost import ADVANTAGES
from rl_platform.planner.step_timeline import EVALUATION, TRAINING, Span, step_seconds

UPDATE = (*EVALUATION, ADVANTAGES, *TRAINING)
SYNC = "sync weights"


@dataclass(frozen=True)
class Overlap:
    """Steps that overlap. staleness: age of the weights after the first steps, in updates; seconds: from step to step.

    idle, alternating: shares of the time in which the devices of a component do nothing, with and without overlap.
    """

    staleness: int
    seconds: float
    idle: Mapping[str, float]
    alternating: Mapping[str, float]


def overlap(spans: Sequence[Span], layout: Layout, staleness: int) -> Overlap | None:
    """Returns the estimate for the phases of one step; None if they alternate, or if nothing is known."""
    whole = step_seconds(spans)
    if not staleness or not whole:
        return None
    busy = {name: _busy(spans, {name, *layout.sharing[name]}) for name in layout.parts}
    training = [span for span in spans if span.phase in UPDATE]
    generation = [span for span in spans if span.phase not in UPDATE and span.phase != SYNC]
    sync = sum(span.seconds for span in spans if span.phase == SYNC)
    # max(sync + generation, sync + training, the busiest devices): the slower side sets the pace
    seconds = max(sync + _length(generation), sync + _length(training), *busy.values())
    idle, alternating = ({name: 1 - time / total for name, time in busy.items()} for total in (seconds, whole))
    return Overlap(staleness, seconds, idle, alternating)


def _busy(spans: Sequence[Span], components: set[str]) -> float:
    return sum(span.seconds for span in spans if span.component in components)


def _length(spans: Sequence[Span]) -> float:
    return max((span.stop for span in spans), default=0.0) - min((span.start for span in spans), default=0.0)
