"""The rollouts of a run, in order, each collected when it is taken.

Rollouts that are collected ahead of the training (`runner.max_staleness`) are in `collection/rollouts_ahead.py`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from rl_platform.records import RolloutBatch, StateDict
from rl_platform.reporter import Sample

if TYPE_CHECKING:
    from rl_platform.runners.task_runner import TaskRunner


@dataclass(frozen=True)
class Collected:
    """One scored rollout, its metrics, and some of its texts."""

    batch: RolloutBatch
    metrics: dict[str, float] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)


class Rollouts:
    """The rollouts of steps 0 to `steps` - 1."""

    def __init__(self, runner: TaskRunner, steps: int) -> None:
        self.runner, self.steps = runner, steps
        self._ready: deque[Collected] = deque()  # collected, and not taken yet: here those of a checkpoint

    @property
    def ready(self) -> list[Collected]:
        """The rollouts that were collected and not taken, the oldest first."""
        return list(self._ready)

    def start(self, step: int, version: int) -> None:
        """Sends the weights of the models before `step`, the first step, to the generation."""
        self.runner.receive(self.runner.publish(version))

    def more(self, step: int) -> bool:
        """Returns whether `step` has a rollout."""
        return step < self.steps and (bool(self._ready) or not self.runner.exhausted())

    def take(self, step: int) -> Collected:
        """Returns the rollout of `step`."""
        return self._ready.popleft() if self._ready else self.runner.collect(step)

    def publish(self, step: int, version: int) -> dict[str, float]:
        """Sends the weights after `step` updates to the generation. Returns metrics."""
        return self.runner.receive(self.runner.publish(version))

    def settle(self) -> None:
        """Returns when nothing is collected and the generation has the newest weights. Raises errors of the
        collection."""

    def state_dict(self) -> StateDict:
        """Returns the rollouts that were not taken yet. Call `settle` first."""
        return {"ready": [_state(rollout) for rollout in self._ready]} if self._ready else {}

    def load_state_dict(self, state: StateDict) -> None:
        """Loads the rollouts of `state`, which may come from a run with another `runner.max_staleness`."""
        self._ready = deque(_from_state(rollout) for rollout in state.get("ready", []))


def _state(rollout: Collected) -> StateDict:
    tensors = {field.name: getattr(rollout.batch, field.name) for field in fields(rollout.batch)}
    return {"batch": tensors, "metrics": rollout.metrics, "samples": [tuple(each) for each in rollout.samples]}


def _from_state(state: StateDict) -> Collected:
    samples = [Sample(*each) for each in state["samples"]]
    return Collected(RolloutBatch(**state["batch"]), dict(state["metrics"]), samples)
