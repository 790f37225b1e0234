"""Generation for trajectories that run on their own: one coroutine each, and one engine that samples for all of them.

The coroutines run in a thread of their own, the engine in the calling thread. A request enters the engine as soon as a
slot is free, so no trajectory waits for the tool or the environment of another one. Engines of the user without
`accepts_arrivals` generate all requests together that have arrived since their last call.

In lockstep, a round begins when every open trajectory has a request. Requests are then ordered by trajectory, so the
engine computes the same batches whatever the timing. `runner.deterministic` needs this where a kernel's result depends
on the size of the batch.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

from rl_platform.engines.rollout.base import Completion, Request, RolloutEngine
from rl_platform.records import SamplingParams


class Sampled(NamedTuple):
    """A request of a trajectory: its context, the seed of its random numbers, and its longest response in tokens."""

    token_ids: tuple[int, ...]
    seed: int
    limit: int


class Generations:
    """Runs trajectories on one engine. longest: tokens of context and response together. at_once: open trajectories."""

    def __init__(
        self, engine: RolloutEngine, sampling: SamplingParams, longest: int, at_once: int, lockstep: bool
    ) -> None:
        self.engine, self.sampling, self.longest = engine, sampling, longest
        self._at_once, self._lockstep = at_once, lockstep
        self._changed = threading.Condition()
        self._waiting: list[tuple[int, Request]] = []  # with the place of their trajectory
        self._answers: dict[int, asyncio.Future[Completion]] = {}
        self._requests = 0
        self._left = 0  # trajectories that have not ended
        self._over = False
        self.loop = asyncio.new_event_loop()

    def run(self, count: int, trajectory: Callable[[int], Awaitable[None]]) -> None:
        """Runs `trajectory(place)` for all places below `count`. Raises the first error, which cancels the others."""
        self._left = count
        task = self.loop.create_task(self._all(count, trajectory))
        with ThreadPoolExecutor(1, thread_name_prefix="trajectories") as executor:
            running = executor.submit(self._run_loop, task)
            try:
                self._generate()
            except BaseException:
                with suppress(RuntimeError):  # the loop has ended
                    self.loop.call_soon_threadsafe(task.cancel)
                raise
            running.result()

    async def sample(self, place: int, wanted: Sequence[Sampled]) -> list[Completion]:
        """Returns the completions of requests that trajectory `place` makes at once, in their order."""
        answers = []
        with self._changed:
            for each in wanted:
                request = Request(self._requests, each.token_ids, each.seed, each.limit)
                self._waiting.append((place, request))
                self._answers[request.index] = answer = self.loop.create_future()
                self._requests += 1
                answers.append(answer)
            self._changed.notify()
        try:
            return list(await asyncio.gather(*answers))
        except asyncio.CancelledError:
            with self._changed:  # the engine finishes the sequences that it has started; their results are dropped
                self._waiting = [
                    (owner, request) for owner, request in self._waiting if not self._answers[request.index].done()
                ]
            raise

    def take(self, idle: bool) -> list[Request]:
        """Returns requests to the engine, see `Arrivals`."""
        if self._lockstep and not idle:
            return []
        with self._changed:
            while idle and not self._over and not self._ready():
                self._changed.wait()
            taken, self._waiting = self._waiting, []
        if self._lockstep:
            taken.sort(key=lambda each: (each[0], each[1].token_ids, each[1].seed))
        return [] if self._over else [request for _, request in taken]

    def _ready(self) -> bool:
        if not self._lockstep:
            return bool(self._waiting)
        return bool(self._waiting) and len({place for place, _ in self._waiting}) == min(self._left, self._at_once)

    def _generate(self) -> None:
        if getattr(self.engine, "accepts_arrivals", False):
            self.engine.generate((), self.sampling, self._on_finished, self)  # type: ignore[call-arg]
            return
        while requests := self.take(idle=True):
            self.engine.generate(requests, self.sampling, self._on_finished)

    def _on_finished(self, completion: Completion) -> None:
        def resolve() -> None:
            if not (answer := self._answers.pop(completion.index)).done():
                answer.set_result(completion)

        with suppress(RuntimeError):  # the loop is closed: an error ended the trajectories, and is the one reported
            self.loop.call_soon_threadsafe(resolve)

    def _run_loop(self, task: asyncio.Task[None]) -> None:
        try:
            self.loop.run_until_complete(task)
        finally:
            with self._changed:
                self._over = True
                self._changed.notify()
            with suppress(Exception):  # tasks of calls that were cancelled
                left = asyncio.all_tasks(self.loop)
                self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self.loop.close()

    async def _all(self, count: int, trajectory: Callable[[int], Awaitable[None]]) -> None:
        free = asyncio.Semaphore(self._at_once)

        async def one(place: int) -> None:
            async with free:
                try:
                    await trajectory(place)
                finally:
                    with self._changed:
                        self._left -= 1
                        self._changed.notify()

        try:
            async with asyncio.TaskGroup() as group:
                for place in range(count):
                    group.create_task(one(place))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
