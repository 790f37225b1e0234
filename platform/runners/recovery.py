"""A run goes on after the death of a process that could be started again: weights and work are given to it anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from rl_platform.errors import WorkerDied, WorkerError
from rl_platform.records import Weights, WeightsReceived
from rl_platform.runtime import Runtime
from rl_platform.runtime.channel import Channel
from rl_platform.runtime.worker_group import Handle, WorkerGroup

T = TypeVar("T")


class Recovery:
    """Keeps which weights the rollout is to have, and brings ranks of it that were started again up to them."""

    def __init__(self, runtime: Runtime, rollout: WorkerGroup) -> None:
        self.runtime, self.rollout = runtime, rollout
        self.version = -1
        self._weights: Weights | None = None
        self._received: list[WeightsReceived] = []
        self._behind: set[int] = set()  # ranks without these weights
        self._calls: list[Handle] = []  # of an attempt that failed

    def sync(self, weights: Weights) -> list[WeightsReceived]:
        """All ranks of the rollout use these weights; what they say of it."""
        self._weights, self.version = weights, weights.version
        self._behind, self._received = set(range(self.rollout.world_size)), []
        self.run(lambda: None)
        if isinstance(weights, Weights):  # no name but the tensors: in this process, where nothing is started again
            self._weights = None
        return self._received

    def run(self, attempt: Callable[[], T], again: Callable[[], Any] | None = None) -> T:
        """What `attempt` returns; made again after a death, once the rollout has its weights and after `again()`.

        It makes its calls in `working`. Raises WorkerDied if a process is gone that is not started again.
        """
        failed = False
        while True:
            try:
                self._catch_up()
                if failed and again is not None:
                    again()
                return attempt()
            except WorkerDied as error:
                restarted, failed = self.runtime.restart(error, self._settle), True
            self._behind |= {rank for component, rank in restarted if component == self.rollout.name}

    @contextmanager
    def working(self, *channels: Channel[Any]) -> Iterator[list[Handle]]:
        """Calls added to the list end before the next attempt: after a death nobody goes on with these channels.

        What such a call was doing is lost; what it had put into a channel and somebody got is not.
        """
        calls: list[Handle] = []
        try:
            yield calls
        except WorkerDied as error:
            self._calls += calls
            for channel in channels:
                with suppress(WorkerDied):  # it lived in the process that died
                    channel.close(error)
            raise

    def metrics(self) -> dict[str, float]:
        return {"runtime/restarts": float(self.runtime.restarts)}

    def _settle(self) -> None:
        calls, self._calls = self._calls, []
        for call in calls:
            call.settle()

    def _catch_up(self) -> None:
        if not self._behind or self._weights is None:
            return
        ranks = sorted(self._behind)
        with self.working() as calls:
            calls.append(receiving := self.rollout.on(ranks).receive(self._weights))
            received: list[WeightsReceived] = receiving.wait()
        for rank, found in zip(ranks, received, strict=True):
            if found.version != self.version:
                raise WorkerError(f"rollout[{rank}] has weights version {found.version}; {self.version} were published")
        self._behind = set()
        self._received += received


class Simulation:
    """The environments, whose state is kept where one of their processes, or the rollout's, may be started again.

    env: a worker group with `state_dict` and `load_state_dict`. What is collected is then the same as if nobody died.
    The state is read while the models are trained, so an environment that dies just then ends the run.
    """

    def __init__(self, recovery: Recovery, env: Any) -> None:
        self.recovery, self.env = recovery, env
        self.keeps = any(recovery.runtime.restartable(component) for component in ("env", "rollout"))
        self._reading: Any = None  # the handle of the state in which the next rollout begins

    def collect(self, attempt: Callable[[], T]) -> T:
        """What `attempt` returns, which moves the environments; made again after a death from where it began."""
        found = self.evaluate(attempt)
        self._reading = self.env.state_dict() if self.keeps else None
        return found

    def evaluate(self, attempt: Callable[[], T]) -> T:
        """What `attempt` returns, which leaves the environments as they are; made again after a death."""
        if not self.keeps:
            return self.recovery.run(attempt)
        self._reading = self._reading or self.env.state_dict()
        state = self._reading.wait()[0]
        return self.recovery.run(attempt, lambda: self.env.load_state_dict(state).wait())
