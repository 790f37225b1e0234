"""Rollouts in their order: collected when asked for, or several updates ahead."""

from __future__ import annotations

import threading

import pytest
import torch
from neutral_batches import neutral_batch

from rl_platform.errors import Diverged
from rl_platform.records import RolloutBatch, Weights
from rl_platform.reporter import Sample
from rl_platform.runners.collection.rollouts_ahead import RolloutsAhead
from rl_platform.runners.rollouts import Collected, Rollouts


def batch(step: int, version: int) -> RolloutBatch:
    mask = torch.ones(2, 3, dtype=torch.bool)
    return neutral_batch(mask, inputs={"tokens": torch.full((2, 3), step)}, versions=torch.full((2,), version))


class Task:
    """Collects batches with the numbers of the step and of the weights. broken: the step that has no rollout."""

    def __init__(self, steps: int = 100, broken: int = -1) -> None:
        self.asked: list[tuple[int, str]] = []
        self.let = threading.Semaphore(1000)
        self.began, self.takes = threading.Semaphore(0), False  # weights while it generates
        self.held: list[int] = []  # versions that were published and not received
        self.version, self.data, self.broken = -1, steps, broken

    def publish(self, version: int) -> Weights:
        self.held.append(version)
        return Weights(version, {})

    def receive(self, weights: Weights) -> dict[str, float]:
        self.version = weights.version
        self.held = [version for version in self.held if version > weights.version]
        return {"weights/bytes": float(weights.version)}

    def update(self, weights: Weights) -> bool:
        if self.takes:
            self.receive(weights)
        return self.takes

    def exhausted(self) -> bool:
        return len(self.asked) >= self.data

    def collect(self, step: int) -> Collected:
        self.asked.append((step, threading.current_thread().name))
        self.began.release()
        assert self.let.acquire(timeout=60)
        if step == self.broken:
            raise Diverged("no rollout")
        return Collected(batch(step, self.version), {"reward/mean": float(step)}, [Sample("2 + 2", "4", 1.0)])


def shut(task: Task) -> None:
    """No rollout is collected before `task.let.release()`."""
    while task.let.acquire(blocking=False):
        pass


def taken(rollouts: Rollouts, step: int) -> int:
    """The version of the rollout of `step`."""
    found = rollouts.take(step)
    assert found.metrics["reward/mean"] == step
    assert found.samples == [Sample("2 + 2", "4", 1.0)]
    assert int(found.batch.inputs["tokens"][0, 0]) == step
    assert found.batch.versions is not None
    return int(found.batch.versions[0])


def rollouts_of(task: Task, ahead: int, steps: int) -> Rollouts:
    return RolloutsAhead(task, ahead, steps) if ahead else Rollouts(task, steps)


def test_when_asked_for() -> None:
    task = Task()
    rollouts = Rollouts(task, 2)
    rollouts.start(0, 0)
    for step in range(2):
        assert rollouts.more(step)
        assert taken(rollouts, step) == step
        assert rollouts.publish(step + 1, step + 1) == {"weights/bytes": step + 1}
    assert not rollouts.more(2)
    assert task.asked == [(0, "MainThread"), (1, "MainThread")]
    assert rollouts.state_dict() == {}


@pytest.mark.parametrize("ahead", [1, 2, 4, 20])
@pytest.mark.parametrize("slow", ["generation", "training"])
def test_ahead_by_k_updates_whatever_is_slower(ahead: int, slow: str) -> None:
    steps, task = 10, Task()
    rollouts = RolloutsAhead(task, ahead, steps)
    rollouts.start(0, 0)
    ages = []
    for step in range(steps):
        assert rollouts.more(step)
        if slow == "generation":
            shut(task)
            task.let.release()  # one at a time
        ages.append(step - taken(rollouts, step))
        if slow == "training":
            last = min(step + ahead, steps - 1)
            with rollouts._changed:
                assert rollouts._changed.wait_for(lambda last=last: rollouts._next > last, 60)
        assert len(task.asked) <= step + 1 + ahead, "issued <= trained + (k + 1) x batch"
        task.let.release(ahead + 1)
        rollouts.publish(step + 1, step + 1)
        assert len(task.held) <= ahead + 1, "more are not readable"
    assert ages == [min(step, ahead) for step in range(steps)]
    assert [step for step, _ in task.asked] == list(range(steps))


def test_the_age_and_the_order_do_not_depend_on_validations_and_checkpoints() -> None:
    task = Task()
    rollouts = RolloutsAhead(task, 3, 6)
    rollouts.start(0, 0)
    versions = []
    for step in range(6):
        versions.append(taken(rollouts, step))
        rollouts.publish(step + 1, step + 1)
        if step in (1, 4):
            rollouts.settle()
            assert task.version == step + 1, "a validation has the newest weights"
    assert versions == [0, 0, 0, 0, 1, 2]
    assert not rollouts.more(6)


def test_a_resumed_run_continues_with_the_same_versions() -> None:
    task, again = Task(), Task()
    rollouts, resumed = RolloutsAhead(task, 3, 6), RolloutsAhead(again, 3, 6)
    rollouts.start(0, 0)
    for step in range(2):
        taken(rollouts, step)
        rollouts.publish(step + 1, step + 1)
    rollouts.settle()
    resumed.load_state_dict(rollouts.state_dict())
    assert len(resumed.ready) == 3
    resumed.start(2, 2)
    versions = []
    for step in range(2, 6):
        assert resumed.more(step)
        versions.append(taken(resumed, step))
        resumed.publish(step + 1, step + 1)
    assert versions == [0, 0, 1, 2]
    assert [step for step, _ in again.asked] == [5]


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_rollouts_of_a_run_with_another_staleness_are_taken_first(ahead: int) -> None:
    rollouts, again = RolloutsAhead(Task(), 3, 9), Task()
    rollouts.start(0, 0)
    taken(rollouts, 0)
    rollouts.publish(1, 1)
    rollouts.settle()
    resumed = rollouts_of(again, ahead, 6)
    resumed.load_state_dict(rollouts.state_dict())
    resumed.start(1, 1)
    versions = []
    for step in range(1, 6):
        assert resumed.more(step)
        versions.append(taken(resumed, step))
        resumed.publish(step + 1, step + 1)
    assert versions == [0, 0, 0, 4 - ahead, 5 - ahead]
    assert [step for step, _ in again.asked] == [4, 5]


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_data_that_is_used_up_ends_the_rollouts(ahead: int) -> None:
    rollouts = rollouts_of(Task(steps=3), ahead, 100)
    rollouts.start(0, 0)
    step = 0
    while rollouts.more(step):
        taken(rollouts, step)
        step += 1
        rollouts.publish(step, step)
    assert step == 3


def test_an_error_of_the_collection_is_raised_where_the_run_waits() -> None:
    rollouts = RolloutsAhead(Task(broken=1), 1, 9)
    rollouts.start(0, 0)
    taken(rollouts, 0)
    for wait in (rollouts.settle, lambda: rollouts.more(1), lambda: rollouts.take(1)):
        with pytest.raises(Diverged, match="no rollout"):
            wait()


def test_weights_at_once() -> None:
    """They go to a rollout that is being generated, else to the next one; older ones never follow newer ones."""
    task = Task()
    rollouts = RolloutsAhead(task, 2, 9, at_once=True)
    rollouts.start(0, 0)
    shut(task)
    task.let.release(2)
    assert taken(rollouts, 0) == 0
    for _ in range(3):
        assert task.began.acquire(timeout=60)  # rollout 2 is being generated
    rollouts.publish(1, 1)
    assert task.version == 0
    task.takes = True
    rollouts.publish(2, 2)
    assert task.version == 2
    task.takes = False
    task.let.release(2)
    assert taken(rollouts, 1) == 0
    rollouts.settle()
    assert (task.version, task.held) == (2, [])
    assert taken(rollouts, 2) == 2
