"""The queue of a scorer that scores several responses at once."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

from rl_platform.envs.reasoning.score import Score
from rl_platform.envs.reasoning.scoring_process import Job
from rl_platform.envs.reasoning.verifiers import ScoreItem
from rl_platform.errors import WorkerDied

_TOO_LATE = "the reward was closed before this response was scored"


class ScoreQueue:
    """Base class of scorers whose threads take responses from a thread-safe queue of at most `limit`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def submit(self, items: Sequence[ScoreItem]) -> list[Future[Score]]:
        """Queues responses, waiting for room; the futures complete in any order. Raises WorkerDied once closed."""
        jobs = [Job(item, Future()) for item in items]
        with self._changed:
            for job in jobs:
                self._changed.wait_for(lambda: self._closed or len(self._waiting) < self._limit)
                if self._closed:
                    raise WorkerDied(_TOO_LATE)
                self._waiting.append(job)
                self._changed.notify_all()
        return [job.future for job in jobs]

    def take(self, most: int) -> list[Job]:
        """Waits for a response and returns 1 to `most` of them; an empty list once the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting)
            jobs = [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]
            self._changed.notify_all()
        return jobs

    def finish(self, jobs: Sequence[Job], scores: Sequence[Score]) -> None:
        """Sets the scores of responses that were taken."""
        for job, score in zip(jobs, scores, strict=True):
            job.future.set_result(score)

    def fail(self, jobs: Sequence[Job], error: Exception) -> None:
        """Sets an error as the result of these responses."""
        for job in jobs:
            job.future.set_exception(error)

    def give_up_waiting(self, score: Score) -> None:
        """Sets this invalid score for all queued responses."""
        with self._changed:
            jobs, self._waiting = list(self._waiting), deque()
            self._changed.notify_all()
        self.finish(jobs, [score] * len(jobs))

    def close(self) -> None:
        """Fails queued responses. May be called twice."""
        with self._changed:
            self._closed = True
            jobs, self._waiting = list(self._waiting), deque()
            self._changed.notify_all()
        self.fail(jobs, WorkerDied(_TOO_LATE))
