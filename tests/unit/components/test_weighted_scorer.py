"""Several reward functions: weighted sums, metrics of each, and responses that one of them cannot score."""

from __future__ import annotations

import re
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from reward_parts import SHORT_S, HungRewards

from rl_platform.components.weighted_rewards.weighted_scorer import WeightedScorer
from rl_platform.config.rules.reward import TAKEN
from rl_platform.envs.reasoning.score import RAISED, TIMEOUT, Score, unscored
from rl_platform.envs.reasoning.verifiers import ScoreItem
from rl_platform.errors import ConfigError
from rl_platform.records import Prompt, Trajectory
from rl_platform.runners.trajectories import function_metrics

ROOT = Path(__file__).parents[3]
FUNCTIONS = """
import os, time
from pathlib import Path

def length(response, answer, metadata):
    return len(response)

def lines(response, answer, metadata):
    return 0.0, [(place + 1, 1.0) for place, letter in enumerate(response) if letter == "\\n"]

def picky(response, answer, metadata):
    if response == "slow":
        Path(__file__).with_name(str(os.getpid())).touch()
        time.sleep(600)
    return 1.0 / len(response)
"""


class Given:
    """Answers with scores that the test gives, when it says so."""

    def __init__(self, *scores: Score) -> None:
        self.scores, self.futures, self.closed = scores, [Future[Score]() for _ in scores], 0

    def submit(self, items: Any) -> list[Future[Score]]:
        return self.futures

    def finish(self) -> None:
        for future, score in zip(self.futures, self.scores, strict=True):
            future.set_result(score)

    def close(self) -> None:
        self.closed += 1


def test_values_and_steps_are_weighted_sums() -> None:
    one, two = Given(Score(1.0, steps=((1, 0.5),))), Given(Score(4.0, steps=((2, 1.0),)))
    scorer = WeightedScorer({"one": one, "two": two}, {"one": 2.0, "two": -0.25})
    (future,) = scorer.submit([ScoreItem("abc", "?", "!")])
    two.finish()
    assert not future.done()
    one.finish()
    # 2 * 1 - 0.25 * 4, and of the steps 2 * 0.5 and -0.25 * 1
    assert future.result() == Score(1.0, steps=((1, 1.0), (2, -0.25)), parts=(("one", 1.0), ("two", 4.0)))
    scorer.close()
    assert one.closed == two.closed == 1


def test_a_missing_score_makes_the_response_invalid_whatever_its_weight() -> None:
    one, two = Given(Score(1.0)), Given(unscored(TIMEOUT, "too slow"))
    scorer = WeightedScorer({"one": one, "two": two}, {"one": 1.0, "two": 0.0})
    (future,) = scorer.submit([ScoreItem("abc", "?", "!")])
    one.finish(), two.finish()
    assert future.result() == Score(0.0, False, TIMEOUT, "two: too slow", parts=(("one", 1.0),))


def test_a_sum_out_of_range_and_an_error_of_a_scorer() -> None:
    given = Given(Score(9e5))
    (future,) = WeightedScorer({"one": given}, {"one": 2.0}).submit([ScoreItem("abc", "?", "!")])
    given.finish()
    assert (future.result().reason, future.result().parts) == (RAISED, (("one", 9e5),))
    given = Given(Score(1.0))
    (future,) = WeightedScorer({"one": given}, {"one": 1.0}).submit([ScoreItem("abc", "?", "!")])
    given.futures[0].set_exception(MemoryError("full"))
    with pytest.raises(MemoryError, match="full"):
        future.result()


@pytest.fixture
def reward(language_reward):
    return lambda *functions: language_reward(
        "several", FUNCTIONS, functions=[{"num_workers": 1, **function} for function in functions]
    )


def trajectory(text: str) -> Trajectory:
    ids = (*text.encode(), 256)
    return Trajectory(Prompt(0, "?", "ab", (63,)), 0, ids, (0.0,) * len(ids), "stop", 0, text=text)


def test_responses_with_several_scores(reward, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    HungRewards(lambda pid: (tmp_path / str(pid)).exists(), monkeypatch)
    component = reward(
        {"type": "several:length", "weight": 0.5},
        {"type": "exact_match", "name": "correct"},
        {"type": "several:picky", "weight": 2.0, "timeout_s": SHORT_S},
    )
    right, wrong, slow, empty = component.score([trajectory(text) for text in ("ab", "abcd", "slow", "")])
    # 0.5 * length + correct + 2 / length
    assert (right.reward, right.metric, right.valid) == (0.5 * 2 + 1 + 2 / 2, 1.0, True)
    assert (wrong.reward, wrong.metric, wrong.valid) == (0.5 * 4 + 0 + 2 / 4, 0.0, True)
    assert not slow.valid
    assert not empty.valid
    assert slow.reward_parts == (("length", 4.0), ("correct", 0.0))
    metrics = function_metrics([right, wrong, slow, empty], ["length", "correct", "picky"], "val/")
    assert metrics == {
        "val/reward/length": 2.5,
        "val/reward/length/unscored": 0.0,
        "val/reward/correct": 0.25,
        "val/reward/correct/unscored": 0.0,
        "val/reward/picky": 0.375,
        "val/reward/picky/unscored": 2.0,
    }


def test_without_a_verifier_the_metric_is_the_sum(reward) -> None:
    component = reward({"type": "several:length"}, {"type": "several:lines", "weight": 3.0})
    (scored,) = component.score([trajectory("a\nb")])
    assert (scored.reward, scored.metric, scored.step_rewards) == (3.0, 3.0, ((1, 3.0),))


def test_a_response_without_a_score_of_one_function_has_none(reward) -> None:
    component = reward({"type": "several:length"}, {"type": "several:picky"})
    (unscored,) = component.score([trajectory("")])
    assert (unscored.valid, unscored.outcome) == (False, "raised")
    assert unscored.verdict.startswith("picky: Traceback")


def test_a_function_that_cannot_be_imported_names_its_key(reward) -> None:
    with pytest.raises(ConfigError, match=r"reward\.functions\[1\]\.type: cannot be imported"):
        reward({"type": "exact_match"}, {"type": "several:lenght"})


def test_names_of_other_metrics_are_taken() -> None:
    files = [file for part in ("algorithms", "runners") for file in (ROOT / "platform" / part).glob("*.py")]
    assert set(re.findall(r'"reward/([a-z_]+)"', "".join(file.read_text() for file in files))) <= set(TAKEN)
