"""Scores of a reward model. Responses are scored as they arrive; those that wait form a batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from rl_platform.components.reward_models.classifier import SequenceClassifier
from rl_platform.config.schema.data import Data
from rl_platform.config.schema.reward import Scoring
from rl_platform.envs.reasoning.prompts import PLACEHOLDER
from rl_platform.envs.reasoning.score import RAISED, Score, checked_reward, json_number, unscored
from rl_platform.envs.reasoning.scoring_process import Job
from rl_platform.envs.reasoning.servers.score_queue import ScoreQueue
from rl_platform.envs.reasoning.verifiers import ScoreItem
from rl_platform.records import Message
from rl_platform.runtime.cpu import release_team

WAITING_BATCHES = 64


class ModelScorer(ScoreQueue):
    """Scores with the classifier of `scoring.model` on `device`, in one thread and batches of `max_batch_size`.

    The classifier reads what the policy read: system turn, prompt and response. A conversation that is longer than its
    context is invalid, and so is a score that is not finite or out of range. Raises ConfigError at construction if the
    model cannot be loaded.
    """

    def __init__(self, data: Data, scoring: Scoring, device: torch.device) -> None:
        assert scoring.model is not None
        super().__init__(WAITING_BATCHES * scoring.max_batch_size)
        self._classifier = SequenceClassifier(scoring.model, device)
        self._data, self._batch_size = data, scoring.max_batch_size
        self._thread = threading.Thread(target=self._serve, name="reward-model", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Waits for the batch in work and fails what is queued. Idempotent."""
        super().close()
        self._thread.join()

    def _serve(self) -> None:
        while jobs := self.take(self._batch_size):
            self._score(jobs)
            release_team()

    def _score(self, jobs: Sequence[Job]) -> None:
        try:
            rows = [self._classifier.encode(conversation(self._data, job.item)) for job in jobs]
            scores = scores_of(rows, self._classifier.longest, self._classifier.scores)
        except Exception as error:  # such as out of memory; raised where the scores are awaited
            self.fail(jobs, error)
        else:
            self.finish(jobs, scores)


def conversation(data: Data, item: ScoreItem) -> list[Message]:
    """Returns system turn, prompt and response."""
    answer = {"role": "assistant", "content": item.response}
    if item.messages:
        return [*item.messages, answer]
    system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    prompt = data.prompt_template.replace(PLACEHOLDER, item.question)
    return [*system, {"role": "user", "content": prompt}, answer]


def scores_of(
    rows: Sequence[Sequence[int]], longest: int, forward: Callable[[Sequence[Sequence[int]]], Sequence[object]]
) -> list[Score]:
    """Returns a score per row of token ids: by `forward`, or invalid if the row is empty or longer than `longest`."""
    fitting = [row for row in rows if 0 < len(row) <= longest]
    values = iter(forward(fitting) if fitting else [])
    return [_score(next(values)) if 0 < len(row) <= longest else _unread(len(row), longest) for row in rows]


def _score(value: object) -> Score:
    try:
        return Score(checked_reward(json_number(value)))
    except ValueError as error:
        return unscored(RAISED, f"the reward model gave {value}: {error}")


def _unread(length: int, longest: int) -> Score:
    detail = f"prompt and response have {length} tokens, the reward model reads 1 to {longest}"
    return unscored(RAISED, detail)
