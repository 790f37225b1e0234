"""Metrics of responses of several turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rl_platform.records import Trajectory


def conversation_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Turns of the policy, answers of the tool per response, tools that failed, tokens of answers per response; empty
    for responses of one turn. A response has the turns and answers of all its rows."""
    conversations = [trajectory.conversation for trajectory in trajectories if trajectory.conversation is not None]
    if not conversations:
        return {}
    parts = [[row.conversation for row in (one, *one.rows) if row.conversation is not None] for one in trajectories]
    turns = [sum(len(row.turns) for row in rows) for rows in parts if rows]
    count, rows = len(conversations), [row for rows in parts for row in rows]
    called = Counter[str]()
    for conversation in conversations:
        for name, number in conversation.counts:
            called[name] += number
    return {
        **{f"tool/{name}": float(number) for name, number in called.items()},
        "turns/mean": sum(turns) / count,
        "turns/max": float(max(turns)),
        "tool/calls": sum(row.observations for row in rows) / count,
        "turns/rows": sum(1 + len(trajectory.rows) for trajectory in trajectories) / len(trajectories),
        "tool/retries": float(sum(conversation.retries for conversation in conversations)),
        "tool/errors": float(sum(conversation.failed for conversation in conversations)),
        "len/observation_mean": sum(sum(row.observed) for row in rows) / count,
    }
