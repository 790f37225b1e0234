"""The rollouts of a run, in order: collected on demand, or one ahead of the update.

One ahead: while the models are trained on a rollout, the next one is collected with the weights before the update. All
but the first are then off-policy by exactly one version.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from typing import Protocol

from rl_platform.metrics import Sample
from rl_platform.records import RolloutBatch, StateDict
from rl_platform.tracing import recorder


@dataclass(frozen=True)
class Collected:
    """One scored rollout, its metrics, and some of its texts."""

    batch: RolloutBatch
    metrics: dict[str, float] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)


class Collects(Protocol):
    def collect(self, step: int) -> Collected: ...


class Rollouts:
    """`ahead`: whether the next rollout is collected during an update (`runner.max_staleness`)."""

    def __init__(self, runner: Collects, ahead: bool) -> None:
        self.runner, self.ahead = runner, ahead
        self._next: Future[Collected] | None = None

    @property
    def pending(self) -> bool:
        """Whether there is a rollout, complete or not, that was not taken yet."""
        return self._next is not None

    def take(self, step: int) -> Collected:
        """The rollout of PPO step `step`; waits for it."""
        if self._next is None:
            return self.runner.collect(step)
        rollout, self._next = self._next.result(), None
        return rollout

    def begin(self, step: int) -> None:
        """Starts to collect the rollout of `step`, if rollouts are collected ahead."""
        if self.ahead:
            self._next = Future()
            threading.Thread(target=self._collect, args=(step, self._next), name="runner (ahead)", daemon=True).start()

    def settle(self) -> None:
        """Waits until nothing is being collected, so that weights may change. Raises errors of the collection."""
        if self._next is not None:
            self._next.result()

    def _collect(self, step: int, future: Future[Collected]) -> None:
        recorder.settle("run", "runner (ahead)")
        try:
            future.set_result(self.runner.collect(step))
        except BaseException as error:  # raised in the main thread, where it ends the run
            future.set_exception(error)

    def state_dict(self) -> StateDict:
        """The rollout that was not taken yet. Called after `settle`."""
        if self._next is None:
            return {}
        rollout = self._next.result()
        tensors = {field.name: getattr(rollout.batch, field.name) for field in fields(rollout.batch)}
        return {"batch": tensors, "metrics": rollout.metrics, "samples": [tuple(each) for each in rollout.samples]}

    def load_state_dict(self, state: StateDict) -> None:
        self._next = None
        if state:
            self._next = Future()
            samples = [Sample(*each) for each in state["samples"]]
            self._next.set_result(Collected(RolloutBatch(**state["batch"]), dict(state["metrics"]), samples))
