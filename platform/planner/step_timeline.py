"""The timeline of one PPO step: phases start when their inputs and their devices are available.

    sync weights -> generate (rollout, env; reward beside it) -> score (a reward model)
                 -> [reference] [log-probs] [values] -> advantages -> [train critic] [train actor]

Phases between two arrows are independent: on different devices they run side by side, on shared ones in this order.
Early evaluations, and a reward model apart from the rollout, begin while responses are still generated. Components that
leave a device or come back take time at the beginning of a phase. Advantages take time if this machine was measured.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from rl_platform.placement.layout import Layout
from rl_platform.planner.cost import ADVANTAGES, Cost, SwapCost

BARS = 64  # characters of the longest step
EVALUATION = ("reference", "log-probs", "values")
TRAINING = ("train critic", "train actor")
STAGES = (("sync weights",), ("generate", "collect"), ("score",), EVALUATION, (ADVANTAGES,), TRAINING)


@dataclass(frozen=True)
class Span:
    """One phase of the step: its component, start and stop (seconds), and its bound. leaves, comes: moves to and from
    host memory before it, in words."""

    phase: str
    component: str
    start: float
    stop: float
    bound: str
    note: str = ""
    leaves: tuple[str, ...] = ()
    comes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return self.stop - self.start


def timeline(
    phases: Mapping[str, tuple[str, Cost]],
    layout: Layout,
    streams: Collection[str] = (),
    waves: int = 1,
    swaps: Mapping[str, SwapCost] | None = None,
    full_kl: bool = False,
) -> tuple[Span, ...]:
    """Returns the spans of one step, ordered by stage.

    streams: components that evaluate finished responses while the rest of `waves` waves is generated. swaps: by phase.
    full_kl: log-probs wait for the reference's states.
    """
    spans: list[Span] = []
    free: dict[str, float] = {}  # when each component's devices are free again
    linked = {layout.policy: {"reference"}, "reference": {layout.policy}} if full_kl else {}
    ready = 0.0
    for stage in STAGES:
        finished = ready
        for phase in stage:
            if phase not in phases:
                continue
            name, cost = phases[phase]
            meets = layout.sharing[name] | linked.get(name, set())
            start = max(ready, free.get(name, 0.0))
            span = _span(phase, name, start, cost, (swaps or {}).get(phase))
            scores_apart = phase == "score" and "rollout" not in layout.around_reward
            if waves > 1 and (scores_apart or (stage is EVALUATION and name in streams)):
                before = (phases[other] for other in stage[: stage.index(phase)] if other in phases)
                ahead = sum(cost.seconds for other, cost in before if other in streams and other in meets)
                span = _streamed(span, next(other for other in spans if other.phase == "generate"), waves, ahead)
            spans.append(span)
            for other in (name, *meets):
                free[other] = max(free.get(other, 0.0), span.stop)
            finished = max(finished, span.stop)
            if "score" not in phases:
                spans += _beside(span, layout)
        ready = finished
    return tuple(spans)


def _span(phase: str, name: str, start: float, cost: Cost, swap: SwapCost | None) -> Span:
    if swap is None:
        return Span(phase, name, start, start + cost.seconds, cost.bound)
    bound = "offload" if swap.seconds > cost.seconds else cost.bound
    leaves, comes = (tuple(map(str, moves)) for moves in (swap.moves.leaves, swap.moves.comes))
    return Span(phase, name, start, start + swap.seconds + cost.seconds, bound, leaves=leaves, comes=comes)


def _streamed(span: Span, generation: Span, waves: int, ahead: float) -> Span:
    """Returns an evaluation from the first wave of responses to the rows of the last one. ahead: seconds of other
    components on its devices, which take each part first."""
    start = generation.start + generation.seconds / waves
    work = ahead + span.seconds
    stop = max(start + work, generation.stop + work / waves)
    return replace(span, start=start, stop=stop, note="streams beside generate")


def _beside(span: Span, layout: Layout) -> list[Span]:
    """Returns components that work on the CPU during a phase: rewards while responses are generated, environments
    between the actions."""
    partner = {"generate": "reward", "collect": "env"}.get(span.phase)
    if partner is None or partner not in layout.parts:
        return []
    name = {"reward": "score", "env": "simulate"}[partner]
    return [Span(name, partner, span.start, span.stop, span.bound, f"beside {span.phase}")]


def step_seconds(spans: Sequence[Span]) -> float:
    """Returns the seconds from the start of a step to the end of its last span; 0 without spans."""
    return max((span.stop for span in spans), default=0.0)


def gantt(spans: Sequence[Span]) -> list[str]:
    """Returns one row per phase: its bar on the step's time, seconds, share of the step, and bound."""
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
        marks = [
            f"{word}: {', '.join(move.partition(' ')[0] for move in moves)}"
            for word, moves in (("out", span.leaves), ("in", span.comes))
            if moves
        ]
        share = "; ".join([share, *marks])
        lines.append(f"  {name:<{margin}}  {bar:<{BARS}}  {duration(span.seconds):>7}  {share}")
    return lines


def duration(seconds: float) -> str:
    """Returns a text as `3.2 s`, `45 ms`, `12 min` or `3.4 h`."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
