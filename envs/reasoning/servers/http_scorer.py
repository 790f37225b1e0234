"""Scores by a reward server or a judge: concurrent requests, with a limited number of retries.

Not covered: the protocols, see `reward_server.py` and `judge.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from rl_platform.envs.reasoning.score import RAISED, Score, unscored
from rl_platform.envs.reasoning.servers.reward_server import Server, Unanswered
from rl_platform.envs.reasoning.servers.score_queue import ScoreQueue
from rl_platform.envs.reasoning.verifiers import ScoreItem
from rl_platform.errors import ConfigError, Problem, Unreachable

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0  # between retries; each pause is twice the previous one
WAITING_REQUESTS = 8  # queued requests per concurrent request


class HttpScorer(ScoreQueue):
    """Sends requests of up to `batch_size` responses to a server, `num_workers` of them concurrently.

    A failed request is retried up to `retries` times; then its responses are invalid. If the server has not answered
    any request meanwhile, queued responses become invalid too, and requests are not retried until it answers again. A
    server that hangs therefore costs seconds and not the timeout of every response.
    Raises Unreachable at construction if the server does not answer, ConfigError if it answers with something else.
    """

    def __init__(self, server: Server, *, batch_size: int, num_workers: int, retries: int) -> None:
        super().__init__(WAITING_REQUESTS * num_workers * batch_size)
        self._server, self._batch_size, self._retries = server, batch_size, retries
        self._closing = threading.Event()
        self._silent = False  # the server has not answered since a request failed
        self._heard = time.monotonic()
        self._greet()
        names = [f"reward-request-{number}" for number in range(num_workers)]
        self._threads = [threading.Thread(target=self._serve, name=name, daemon=True) for name in names]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Ends running requests and fails queued ones. May be called twice."""
        self._closing.set()
        super().close()
        self._server.close()
        for thread in self._threads:
            thread.join()

    def _greet(self) -> None:
        """Sends an empty request to check address and server. Raises Unreachable or ConfigError."""
        try:
            self._ask([])
        except Unanswered as error:
            if error.reason == RAISED:
                raise ConfigError(
                    [Problem(self._server.key, error.detail, hint="docs/reasoning.md, Rewards")]
                ) from error
            hint = "start the server first, or try more often: reward.retries"
            raise Unreachable(f"the reward server does not answer: {error.detail}\n    hint: {hint}") from error

    def _serve(self) -> None:
        while jobs := self.take(self._batch_size):
            began = time.monotonic()
            try:
                scores = self._ask([job.item for job in jobs])
            except Unanswered as error:
                score = unscored(error.reason, error.detail)
                scores = [score] * len(jobs)
                if self._heard < began:
                    self._silent = True
                    self.give_up_waiting(score)
            except Exception as failure:  # unexpected: raised where the scores are awaited
                self.fail(jobs, failure)
                continue
            self.finish(jobs, scores)

    def _ask(self, items: Sequence[ScoreItem]) -> list[Score]:
        """Returns the scores of the first successful try. Raises the error of the last try."""
        pause = FIRST_PAUSE_S
        for left in reversed(range(1 if self._silent else 1 + self._retries)):
            try:
                scores = self._server.ask(items)
            except Unanswered as error:
                if error.reason == RAISED:
                    self._hear()
                if error.final or not left or self._closing.wait(pause):
                    raise
                pause = min(2 * pause, LONGEST_PAUSE_S)
            else:
                self._hear()
                return scores
        raise AssertionError("every try returns or raises")

    def _hear(self) -> None:
        self._heard, self._silent = time.monotonic(), False
