"""Scores that a server gives: several requests at once, asked again when they fail, given up when they keep failing.

The protocol is in `reward_server.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from rl_platform.envs.reasoning.reward_server import RewardServer, Unanswered
from rl_platform.envs.reasoning.score import RAISED, Score, unscored
from rl_platform.envs.reasoning.score_queue import QueuedScorer
from rl_platform.envs.reasoning.verifiers import ScoreItem
from rl_platform.errors import ConfigError, Problem, Unreachable

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0  # between tries, each twice as long as the one before
WAITING_REQUESTS = 8  # per request at the same time


class HttpScorer(QueuedScorer):
    """Asks a reward server in requests of up to `batch_size` responses, `num_workers` of them at the same time.

    A request that fails is made again, up to `retries` times; then its responses are invalid. If the server said
    nothing at all meanwhile, those that wait are given up too, and until it answers again each request is made once: a
    server that hangs costs seconds, not the timeout of every response.
    Raises Unreachable at construction when the server does not answer, ConfigError when it answers something else.
    """

    def __init__(self, url: str, *, batch_size: int, num_workers: int, timeout_s: float, retries: int) -> None:
        super().__init__(WAITING_REQUESTS * num_workers * batch_size)
        self._server = RewardServer(url, timeout_s)
        self._batch_size, self._retries = batch_size, retries
        self._closing = threading.Event()
        self._silent = False  # nothing was heard of the server since a request was given up
        self._heard = time.monotonic()
        self._greet()
        names = [f"reward-request-{number}" for number in range(num_workers)]
        self._threads = [threading.Thread(target=self._serve, name=name, daemon=True) for name in names]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Ends requests under way and fails what is queued. Closing again is fine."""
        self._closing.set()
        self._queue.close()
        self._server.close()
        for thread in self._threads:
            thread.join()

    def _greet(self) -> None:
        """No response to score, no score: shows that the address is right and the server there."""
        try:
            self._ask([])
        except Unanswered as error:
            if error.reason == RAISED:
                raise ConfigError([Problem("reward.url", error.detail, hint="docs/reasoning.md, Rewards")]) from error
            hint = "start the server first, or try more often: reward.retries"
            raise Unreachable(f"the reward server does not answer: {error.detail}\n    hint: {hint}") from error

    def _serve(self) -> None:
        while jobs := self._queue.take(self._batch_size):
            began = time.monotonic()
            try:
                scores = self._ask([job.item for job in jobs])
            except Unanswered as error:
                score = unscored(error.reason, error.detail)
                scores = [score] * len(jobs)
                if self._heard < began:
                    self._silent = True
                    self._queue.give_up_waiting(score)
            except Exception as failure:  # not foreseen: told by whoever waits for these scores
                self._queue.fail(jobs, failure)
                continue
            self._queue.finish(jobs, scores)

    def _ask(self, items: Sequence[ScoreItem]) -> list[Score]:
        """Scores of the first try that got them. Raises what the last try raised."""
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
