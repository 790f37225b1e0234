"""The weighted sum of several scores: `reward.functions`."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

from rl_platform.envs.reasoning.score import RAISED, Score, checked_reward, checked_steps, unscored
from rl_platform.envs.reasoning.verifiers import ScoreItem

if TYPE_CHECKING:
    from rl_platform.components.reward import Scorer


class WeightedScorer:
    """Scores by several scorers at the same time. The value is the sum of their values times their weights, and so are
    the rewards of steps. A response without one of the scores is invalid, for the reason of the first that is missing.

    scorers: by name.
    """

    def __init__(self, scorers: Mapping[str, Scorer], weights: Mapping[str, float]) -> None:
        self._scorers, self._weights = scorers, weights
        self._lock = threading.Lock()

    def submit(self, items: Sequence[ScoreItem]) -> list[Future[Score]]:
        """Returns a future per response, which is done when all scorers are."""
        columns = [scorer.submit(items) for scorer in self._scorers.values()]
        return [self._joined(item, row) for item, row in zip(items, zip(*columns, strict=True), strict=True)]

    def close(self) -> None:
        """Closes all scorers. May be called twice."""
        for scorer in self._scorers.values():
            scorer.close()

    def _joined(self, item: ScoreItem, parts: Sequence[Future[Score]]) -> Future[Score]:
        joined: Future[Score] = Future()
        missing = len(parts)

        def count(_: Future[Score]) -> None:
            nonlocal missing
            with self._lock:
                missing -= 1
                if missing:
                    return
            try:
                score = self._sum(item, dict(zip(self._scorers, (part.result() for part in parts), strict=True)))
            except Exception as error:  # of a scorer, as out of memory; raised where the scores are awaited
                joined.set_exception(error)
            else:
                joined.set_result(score)

        for part in parts:
            part.add_done_callback(count)
        return joined

    def _sum(self, item: ScoreItem, scores: Mapping[str, Score]) -> Score:
        given = tuple((name, score.value) for name, score in scores.items() if score.valid)
        for name, score in scores.items():
            if not score.valid:
                return replace(unscored(score.reason, f"{name}: {score.detail}"), parts=given)
        weighted = [(self._weights[name], score) for name, score in scores.items() if self._weights[name]]
        try:
            # sum_k w_k r_k
            value = checked_reward(sum(weight * score.value for weight, score in weighted))
            steps = [(end, weight * reward) for weight, score in weighted for end, reward in score.steps]
            program = next((score for score in scores.values() if score.reason), Score(0.0))
            checked = checked_steps(steps, item.response)
            return Score(value, steps=checked, parts=given, reason=program.reason, detail=program.detail)
        except ValueError as error:
            return replace(unscored(RAISED, f"the weighted sum: {error}"), parts=given)
