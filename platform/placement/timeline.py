"""What runs when in one PPO step: phases as soon as their inputs are there and their devices are free; a text picture.

    sync weights -> generate (rollout, env; reward beside it) -> [reference] [log-probs] [values] -> advantages
                 -> [train critic] [train actor]

Phases between two arrows need nothing of one another: on devices of their own they run side by side, on shared ones in
this order. Advantages are computed by the runner in no time that matters here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl_platform.placement.cost import Cost
from rl_platform.placement.layout import Layout

BARS = 64  # characters of the longest step
STAGES = (
    ("sync weights",),
    ("generate", "collect"),
    ("reference", "log-probs", "values"),
    ("train critic", "train actor"),
)


@dataclass(frozen=True)
class Span:
    """One phase of the step: which component works in it, from when to when (seconds), and what bounds it."""

    phase: str
    component: str
    start: float
    stop: float
    bound: str
    note: str = ""

    @property
    def seconds(self) -> float:
        return self.stop - self.start


def timeline(phases: Mapping[str, tuple[str, Cost]], layout: Layout) -> tuple[Span, ...]:
    """The spans of one step, ordered by stage."""
    spans: list[Span] = []
    free: dict[str, float] = {}  # when each component's devices are free again
    ready = 0.0
    for stage in STAGES:
        finished = ready
        for phase in stage:
            if phase not in phases:
                continue
            name, cost = phases[phase]
            start = max(ready, free.get(name, 0.0))
            span = Span(phase, name, start, start + cost.seconds, cost.bound)
            spans.append(span)
            for other in (name, *layout.turns[name]):
                free[other] = max(free.get(other, 0.0), span.stop)
            finished = max(finished, span.stop)
            spans += _beside(span, layout)
        ready = finished
    return tuple(spans)


def _beside(span: Span, layout: Layout) -> list[Span]:
    """What works along with a phase on the CPU: rewards are scored while responses are generated, environments are
    stepped between the actions."""
    partner = {"generate": "reward", "collect": "env"}.get(span.phase)
    if partner is None or partner not in layout.parts:
        return []
    name = {"reward": "score", "env": "simulate"}[partner]
    return [Span(name, partner, span.start, span.stop, span.bound, f"beside {span.phase}")]


def step_seconds(spans: Sequence[Span]) -> float:
    return max((span.stop for span in spans), default=0.0)


def gantt(spans: Sequence[Span]) -> list[str]:
    """One row per phase: its bar on the step's time, seconds, share of the step, and what bounds it."""
    total = step_seconds(spans)
    if not total:
        return []
    names = [f"{span.component}: {span.phase}" for span in spans]
    margin = max(map(len, names))
    lines = [f"  {'':{margin}}  0{duration(total):>{BARS - 1}}"]
    for name, span in zip(names, spans, strict=True):
        first = min(round(span.start / total * BARS), BARS - 1)
        width = max(1, round(span.stop / total * BARS) - first)
        bar = " " * first + ("-" if span.note else "#") * width
        share = span.note or f"{span.seconds / total:4.0%}, {span.bound}"
        lines.append(f"  {name:<{margin}}  {bar:<{BARS}}  {duration(span.seconds):>7}  {share}")
    return lines


def duration(seconds: float) -> str:
    """`3.2 s`, `45 ms`, `12 min`, `3.4 h` ..."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
