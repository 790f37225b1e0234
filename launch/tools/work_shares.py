"""Shares of a run's time: physics, inference, optimizer steps and the rest, from its timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from rl_platform.tracing import covered


class Event(TypedDict):
    """A span of trace.json. ts, dur: begin and length in microseconds; cat: step, phase, call, wait or work."""

    name: str
    cat: str
    ts: float
    dur: float


REST = "rest"


def work_shares(lanes: Mapping[str, Sequence[Event]]) -> dict[str, float]:
    """Returns the share of the recorded steps' wall-clock by kind of work, largest first, and `rest`.

    * physics: MuJoCo's steps and the starts of episodes for tasks that are computed here; whole steps of other
      environments, or the wait for their processes. Evaluations count.
    * inference: forwards of the policy, with drawing actions.
    * optimizer step: loss, gradient and update of a mini-batch.
    * rest: time without any of these (observations, rewards, normalisers, advantages, weights, logs, checkpoints).

    The first step loads and compiles, so it is left out if there are others. Work that overlaps counts once for each
    kind, so the shares may add up to more than 1. Empty for a run without physics.
    """
    steps = [event for event in lanes.get("steps", []) if event["name"] != "start"]
    steps = steps[1:] or steps
    work = [event for events in lanes.values() for event in events if event["cat"] == "work"]
    if not steps or all(event["name"] != "physics" for event in work):
        return {}
    begin, end = steps[0]["ts"], steps[-1]["ts"] + steps[-1]["dur"]

    def share(events: Sequence[Event]) -> float:
        clipped = [(max(event["ts"], begin), min(event["ts"] + event["dur"], end)) for event in events]
        return covered((first, last - first) for first, last in clipped if last > first) / (end - begin)

    kinds = {name: share([event for event in work if event["name"] == name]) for name in {e["name"] for e in work}}
    ordered = dict(sorted(kinds.items(), key=lambda kind: -kind[1]))
    return ordered | {REST: 1.0 - share(work)}


def as_text(shares: Mapping[str, float]) -> str:
    """Returns the shares as one line, empty if there are none."""
    if not shares:
        return ""
    kinds = ", ".join(f"{name} {share:.1%}" for name, share in shares.items() if name != REST)
    return f"share of the time: {kinds}; {REST} {shares[REST]:.1%}"
