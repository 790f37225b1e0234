"""Rollouts in their order, collected when asked for or one ahead."""

from __future__ import annotations

import threading

import pytest
import torch

from rl_platform.errors import Diverged
from rl_platform.metrics import Sample
from rl_platform.records import RolloutBatch
from rl_platform.runners.rollouts import Collected, Rollouts


def batch(number: int) -> RolloutBatch:
    mask = torch.ones(2, 3, dtype=torch.bool)
    return RolloutBatch(
        inputs={"tokens": torch.full((2, 3), number)},
        action_mask=mask,
        sample_mask=mask[:, 0],
        group_ids=torch.arange(2),
        rewards=torch.zeros(2, 3),
        rollout_log_probs=torch.zeros(2, 3),
    )


class Task:
    """Collects a batch that holds the number of the step, when it is let."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, str]] = []
        self.let = threading.Event()
        self.let.set()

    def collect(self, step: int) -> Collected:
        self.asked.append((step, threading.current_thread().name))
        assert self.let.wait(5)
        if step == 7:
            raise Diverged("no rollout")
        return Collected(batch(step), {"perf/samples": float(step)}, [Sample("2 + 2", "4", 1.0)])


def taken(rollouts: Rollouts, step: int) -> int:
    found = rollouts.take(step)
    assert found.metrics == {"perf/samples": step}
    assert found.samples == [Sample("2 + 2", "4", 1.0)]
    return int(found.batch.inputs["tokens"][0, 0])


def test_when_asked_for() -> None:
    task = Task()
    rollouts = Rollouts(task, ahead=False)
    for step in range(2):
        assert taken(rollouts, step) == step
        rollouts.begin(step + 1)
        assert not rollouts.pending
        rollouts.settle()
    assert task.asked == [(0, "MainThread"), (1, "MainThread")]
    assert rollouts.state_dict() == {}


def test_one_ahead_is_collected_beside_the_caller_and_once() -> None:
    task = Task()
    rollouts = Rollouts(task, ahead=True)
    assert taken(rollouts, 0) == 0
    task.let.clear()
    rollouts.begin(1)  # returns although nothing can be collected now
    assert rollouts.pending
    task.let.set()
    rollouts.settle()
    assert taken(rollouts, 1) == 1
    assert not rollouts.pending
    assert task.asked == [(0, "MainThread"), (1, "runner (ahead)")]


def test_an_error_of_the_collection_is_raised_where_the_run_waits() -> None:
    rollouts = Rollouts(Task(), ahead=True)
    rollouts.begin(7)
    with pytest.raises(Diverged, match="no rollout"):
        rollouts.settle()
    with pytest.raises(Diverged, match="no rollout"):
        rollouts.take(7)


def test_what_was_collected_and_not_taken_is_saved() -> None:
    rollouts, task = Rollouts(Task(), ahead=True), Task()
    rollouts.begin(3)
    rollouts.settle()
    resumed = Rollouts(task, ahead=True)
    resumed.load_state_dict(rollouts.state_dict())
    assert resumed.pending
    assert taken(resumed, 3) == 3
    assert task.asked == []
    resumed.load_state_dict({})
    assert not resumed.pending
