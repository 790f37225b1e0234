"""A run goes on after the death of a process that could be started again: weights and work are given to it anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from rl_platform.errors import WorkerDied, WorkerError
from rl_platform.records import Weights
from rl_platform.runtime import Runtime
from rl_platform.runtime.channel import Channel
from rl_platform.runtime.group import Handle, WorkerGroup

T = TypeVar("T")


class Recovery:
    """Keeps which weights the rollout is to have, and brings ranks of it that were started again up to them."""

    def __init__(self, runtime: Runtime, rollout: WorkerGroup) -> None:
        self.runtime, self.rollout = runtime, rollout
        self.version = -1
        self._weights: Weights | None = None
        self._behind: set[int] = set()  # ranks without these weights

    def sync(self, weights: Weights) -> None:
        """All ranks of the rollout use these weights."""
        self._weights, self.version = weights, weights.version
        self._behind = set(range(self.rollout.world_size))
        self.run(lambda: None)
        if isinstance(weights, Weights):  # no name but the tensors: in this process, where nothing is started again
            self._weights = None

    def run(self, attempt: Callable[[], T]) -> T:
        """What `attempt` returns; made again after a death, once the rollout is whole and has its weights.

        A failed attempt must have ended all it began. Raises WorkerDied if a process is gone that is not started again.
        """
        while True:
            try:
                self._catch_up()
                return attempt()
            except WorkerDied as error:
                restarted = self.runtime.restart(error)
            self._behind |= {rank for component, rank in restarted if component == self.rollout.name}

    def metrics(self) -> dict[str, float]:
        return {"runtime/restarts": float(self.runtime.restarts)}

    def _catch_up(self) -> None:
        if not self._behind or self._weights is None:
            return
        ranks = sorted(self._behind)
        receiving = self.rollout.on(ranks).receive(self._weights)
        receiving.settle()
        for rank, version in zip(ranks, receiving.wait(), strict=True):
            if version != self.version:
                raise WorkerError(f"rollout[{rank}] has weights version {version}; {self.version} were published")
        self._behind = set()


@contextmanager
def closing_after_death(*channels: Channel[Any]) -> Iterator[list[Handle]]:
    """When WorkerDied leaves the block, calls added to the list have ended and nobody waits on these channels.

    What such a call was doing is lost; what it had already put into a channel and somebody got is not.
    """
    calls: list[Handle] = []
    try:
        yield calls
    except WorkerDied as error:
        for channel in channels:
            with suppress(WorkerDied):  # it lived in the process that died
                channel.close(error)
        for call in calls:
            call.settle()
        raise
