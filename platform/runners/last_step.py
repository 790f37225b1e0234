"""The state of the last finished step, which a stop can save while a long rollout runs.

Only the update of a step changes the learners, so they are not copied. Not covered: rollouts ahead of the training
(`runner.max_staleness`), whose state is complete only while nothing is collected, and a step whose update has begun.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from rl_platform.errors import PlatformError, WorkerDied
from rl_platform.interrupts import Stop
from rl_platform.runners.state import RunState, SmallState

if TYPE_CHECKING:
    from rl_platform.runners.ppo import PPO
    from rl_platform.runners.rollouts import Rollouts
    from rl_platform.runners.task_runner import TaskRunner


class LastStep:
    """A copy of the small state, made after a step if the next one may exceed the grace period of a stop.

    grace_s: the grace period, in seconds. A step over half of it counts as long: the next one may take twice the time.
    """

    def __init__(self, grace_s: float, runner: TaskRunner, ppo: PPO, rollouts: Rollouts, state: RunState) -> None:
        self._runner, self._ppo, self._rollouts, self._state = runner, ppo, rollouts, state
        self._long_s = grace_s / 2 or math.inf
        self._step = 0
        self._small: SmallState | None = None
        self._began = self._collected = self._rest_s = 0.0

    @contextmanager
    def saved_by(self, stop: Stop) -> Iterator[None]:
        """Wraps the collection of a step's rollout. Raises StepDropped if the step does not end within the grace period
        and there is a copy: then call `save`."""
        self._began = time.monotonic()
        with stop.droppable(None if self._small is None else self._rest_s):
            yield
        self._collected = time.monotonic()

    def keep(self, step: int) -> None:
        """Copies the state after `step`, whose rollout was collected in `saved_by`, if the step was long."""
        now, self._small = time.monotonic(), None
        if now - self._began > self._long_s:
            self._step, self._rest_s = step, now - self._collected
            with suppress(WorkerDied):  # the next rollout raises it again, and may restart the process
                self._small = copy.deepcopy(self._state.read(self._runner, self._ppo, self._rollouts))

    def forget(self) -> None:
        """Drops the copy: a checkpoint of the step was written."""
        self._small = None

    def save(self) -> None:
        """Writes the copy and the learners as a checkpoint. A failure is only reported: the run ends anyway."""
        assert self._small is not None
        reporter = self._state.reporter
        reporter.note(
            f"step {self._step + 1} is dropped, because it does not end within runner.stop_grace_s: "
            f"saving step {self._step}"
        )
        try:
            with reporter.phase("checkpoint"):
                self._state.save(self._step, self._runner, self._small)
        except PlatformError as error:
            reporter.note(f"step {self._step} was not saved: {error}")
