"""The rollouts of a run, in order, each collected when it is taken.

Rollouts that are collected ahead of the training (`runner.max_staleness`) are in `collection/rollouts_ahead.py`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from rl_platform.config.schema.algorithm import estimator_needs
from rl_platform.errors import CheckpointError
from rl_platform.records import RolloutBatch, StateDict
from rl_platform.reporter import Sample

if TYPE_CHECKING:
    from rl_platform.config.schema import Config
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


def check_trainable(batch: RolloutBatch, config: Config) -> None:
    """Raises CheckpointError unless `config` can train on a rollout of a checkpoint, which another config may have
    collected."""
    rows = len(batch if batch.ends is None else batch.flatten()) * config.sequence_length
    roles = ("actor", "critic") if config.critic.use_critic_model else ("actor",)
    sizes = {config.mini_batch_size(role) for role in roles}
    if any(rows % size for size in sizes):
        problem = f"of {rows} rows, which mini-batches of {' and '.join(map(str, sorted(sizes)))} do not divide"
        remedy = "the mini-batch sizes"
    elif estimator_needs(config.algorithm.adv_type).greedy and batch.baselines is None:
        problem = f"without the greedy responses that algorithm.adv_type {config.algorithm.adv_type} needs"
        remedy = "the algorithm.adv_type"
    else:
        return
    raise CheckpointError(
        f"the checkpoint holds a rollout that was collected ahead (runner.max_staleness), {problem}: resume with "
        f"{remedy} that it was made with"
    )


def _state(rollout: Collected) -> StateDict:
    tensors = {field.name: getattr(rollout.batch, field.name) for field in fields(rollout.batch)}
    return {"batch": tensors, "metrics": rollout.metrics, "samples": [tuple(each) for each in rollout.samples]}


def _from_state(state: StateDict) -> Collected:
    samples = [Sample(*each) for each in state["samples"]]
    return Collected(RolloutBatch(**state["batch"]), dict(state["metrics"]), samples)
