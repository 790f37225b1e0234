"""Rollouts that are collected up to `runner.max_staleness` updates ahead of the training.

With `runner.max_staleness` k, a thread collects the rollouts of steps s + 1 to s + k while the models train on that of
step s. The rollout of step s is generated with the weights after max(s - k, 0) updates. Timing does not change that:
equal seeds give equal runs, and a resumed run equals an undisturbed one. At most k + 1 rollouts are issued and not
trained on.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from rl_platform.records import StateDict, Weights
from rl_platform.runners.rollouts import Collected, Rollouts
from rl_platform.runtime.weights_token import WeightsToken
from rl_platform.tracing import recorder

if TYPE_CHECKING:
    from rl_platform.runners.task_runner import TaskRunner


class RolloutsAhead(Rollouts):
    """ahead: `runner.max_staleness`, at least 1.

    at_once: the generation receives weights as soon as they are published, also while it generates
    (`rollout.on_update`); results then depend on timing.

    One thread calls all methods. A second thread collects; it ends when the next rollout must not be collected yet.
    """

    def __init__(self, runner: TaskRunner, ahead: int, steps: int, at_once: bool = False) -> None:
        super().__init__(runner, steps)
        self.ahead, self.at_once = ahead, at_once
        self._changed = threading.Condition()
        self._next = 0  # the step whose rollout is collected next
        self._admitted = -1  # the last step whose rollout may be collected
        self._collecting = False
        self._error: BaseException | None = None
        self._published: deque[tuple[int, Weights | WeightsToken]] = deque()  # (updates, weights), not received yet
        self._received: dict[str, float] = {}

    @property
    def ready(self) -> list[Collected]:
        with self._changed:
            return list(self._ready)

    def start(self, step: int, version: int) -> None:
        self._received = self.runner.receive(self.runner.publish(version))
        self._next = step + len(self._ready)

    def more(self, step: int) -> bool:
        """Returns whether `step` has a rollout; waits for a running collection that decides it."""
        if step >= self.steps:
            return False
        self._wait(lambda: bool(self._ready) or not self._collecting)
        return bool(self._ready) or not self.runner.exhausted()

    def take(self, step: int) -> Collected:
        """Returns the rollout of `step`, and admits the collection of steps up to `step + ahead`."""
        with self._changed:
            self._admitted = step + self.ahead
            if not self._collecting and self._may_collect():
                self._collecting = True
                threading.Thread(target=self._collect, name="runner (ahead)", daemon=True).start()
        waiting = len(self._ready)
        self._wait(lambda: bool(self._ready))
        with self._changed:
            rollout = self._ready.popleft()
        beside = self.ahead > 1 or self.at_once
        return with_metrics(rollout, {"perf/rollouts_ready": float(waiting)}) if beside else rollout

    def publish(self, step: int, version: int) -> dict[str, float]:
        """Publishes the weights after `step` updates, for rollouts from `step + ahead` on. Returns metrics.

        Does not wait if `ahead` is more than 1 or with `at_once`: the collecting thread receives the weights.
        """
        if self.ahead < 2 and not self.at_once:
            self.settle()
            return self.runner.receive(self.runner.publish(version))
        weights = self.runner.publish(version)
        sent = self.at_once and self.runner.update(weights)
        with self._changed:
            if sent:
                self._published.clear()  # they are older
            else:
                self._published.append((step, weights))
        return {}

    def settle(self) -> None:
        """Waits until all rollouts with older weights are collected, then sends the newest weights to the generation.

        Raises errors of the collection.
        """
        self._wait(lambda: not self._collecting)
        if self._published:
            self._receive(self._published[-1][0])

    def _wait(self, condition: Callable[[], bool]) -> None:
        """Waits for the condition. Raises the error of the collection unless the condition holds."""
        with self._changed:
            self._changed.wait_for(lambda: condition() or self._error is not None)
            if self._error is not None and not condition():
                raise self._error

    def _may_collect(self) -> bool:
        return self._next <= self._admitted and self._next < self.steps and not self.runner.exhausted()

    def _collect(self) -> None:
        recorder.settle("run", "runner (ahead)")
        try:
            while self._goes_on():
                self._receive(self.steps if self.at_once else self._next - self.ahead)
                rollout = self.runner.collect(self._next)
                if self.ahead > 1 or self.at_once:
                    rollout, self._received = with_metrics(rollout, self._received), dict.fromkeys(self._received, 0.0)
                with self._changed:
                    self._ready.append(rollout)
                    self._next += 1
                    self._changed.notify_all()
        except BaseException as error:  # raised in the main thread, where it ends the run
            with self._changed:
                self._error = error  # `_collecting` stays True, so that no other thread starts
                self._changed.notify_all()

    def _goes_on(self) -> bool:
        with self._changed:
            self._collecting = self._may_collect()
            self._changed.notify_all()
            return self._collecting

    def _receive(self, updates: int) -> None:
        """Sends the newest weights of at most this many updates to the generation, if they are newer than its own."""
        newest = None
        with self._changed:
            while self._published and self._published[0][0] <= updates:
                newest = self._published.popleft()[1]
        if newest is not None:
            self._received = self.runner.receive(newest)

    def state_dict(self) -> StateDict:
        assert not self._collecting
        return super().state_dict()


def with_metrics(rollout: Collected, metrics: dict[str, float]) -> Collected:
    """Returns the rollout with further metrics; they replace those of the same name."""
    return replace(rollout, metrics=rollout.metrics | metrics)
