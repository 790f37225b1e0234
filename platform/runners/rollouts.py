"""The rollouts of a run in their order: collected when they are asked for, or one ahead of the update.

One ahead: while the models are trained on a rollout, the next one is collected with the weights of before. So all
but the first are off-policy by one version, and never by more.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from rl_platform.metrics import Sample
from rl_platform.records import RolloutBatch
from rl_platform.tracing import recorder


@dataclass(frozen=True)
class Collected:
    """One scored rollout, what is known of it beside the batch, and some of its texts."""

    batch: RolloutBatch
    metrics: dict[str, float] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)


class Collects(Protocol):
    def collect(self, step: int) -> Collected: ...


class Rollouts:
    """`ahead`: whether the next rollout is collected during an update (`runner.max_staleness`)."""

    def __init__(self, task: Collects, ahead: bool) -> None:
        self.task, self.ahead = task, ahead
        self._next: Future[Collected] | None = None

    @property
    def pending(self) -> bool:
        """Whether a rollout is collected, or being collected, that was not taken yet."""
        return self._next is not None

    def take(self, step: int) -> Collected:
        """The rollout of PPO step `step`; waits for it."""
        if self._next is None:
            return self.task.collect(step)
        found, self._next = self._next.result(), None
        return found

    def begin(self, step: int) -> None:
        """Start to collect the rollout of `step`, if rollouts are collected ahead."""
        if self.ahead:
            self._next = Future()
            threading.Thread(target=self._collect, args=(step, self._next), name="runner (ahead)", daemon=True).start()

    def settle(self) -> None:
        """Wait until nothing is being collected: weights may change then. Raises what the collection raised."""
        if self._next is not None:
            self._next.result()

    def _collect(self, step: int, future: Future[Collected]) -> None:
        recorder.settle("run", "runner (ahead)")
        try:
            future.set_result(self.task.collect(step))
        except BaseException as error:  # raised in the main thread, where it ends the run
            future.set_exception(error)

    def state_dict(self) -> dict[str, Any]:
        """After `settle`: the rollout that was not taken yet."""
        if self._next is None:
            return {}
        found = self._next.result()
        tensors = {field.name: getattr(found.batch, field.name) for field in fields(found.batch)}
        return {"batch": tensors, "metrics": found.metrics, "samples": found.samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._next = None
        if state:
            self._next = Future()
            samples = [(prompt, response, reward) for prompt, response, reward in state["samples"]]
            self._next.set_result(Collected(RolloutBatch(**state["batch"]), dict(state["metrics"]), samples))
