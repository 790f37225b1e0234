"""From scored trajectories to the rollout batch: what reaches the learners, and what stays as the verifier gave it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rl_platform.algorithms.rollout_metrics import rollout_metrics
from rl_platform.components.agents.conversation_metrics import conversation_metrics
from rl_platform.config.schema.algorithm import Algorithm
from rl_platform.records import Conversation, Prompt, RolloutBatch, Trajectory
from rl_platform.runners.collection.greedy_baselines import with_baselines
from rl_platform.runners.trajectories import (
    cut_ends,
    function_metrics,
    process_rewards,
    rollout_batch,
    shaped_rewards,
    source_metrics,
    training_rows,
    trajectory_metrics,
    unscored_notes,
    validation_metrics,
)

PROMPT = Prompt(index=7, text="?", answer="!", token_ids=(1, 2))


def trajectory(length: int, reward: float, finish_reason: str = "stop", valid: bool = True) -> Trajectory:
    return Trajectory(
        PROMPT, 0, (3,) * length, (-1.0,) * length, finish_reason, 0, reward=reward, metric=reward, valid=valid
    )


TRAJECTORIES = [trajectory(2, 1.0), trajectory(4, 1.0, "length"), trajectory(1, 0.0, valid=False), trajectory(3, 0.0)]


def batch(algorithm: Algorithm) -> RolloutBatch:
    return rollout_batch(TRAJECTORIES, shaped_rewards(TRAJECTORIES, algorithm, 4), pad_token_id=0)


def test_rewards_stand_on_the_last_sampled_token() -> None:
    found = batch(Algorithm())
    assert found.rewards.tolist() == [[0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 1], [0] * 6, [0] * 6]
    assert found.sample_mask.tolist() == [True, True, False, True]
    assert found.action_mask.sum(dim=1).tolist() == [2, 4, 1, 3]


@pytest.mark.parametrize(
    ("keys", "rewards", "counted"),
    [
        ({"reward_scaling": {}}, [1, 1, 0, -1], [0, 1, 3]),
        ({"overlong": {"buffer_length": 2}}, [1, 0, 0, -0.5], [0, 1, 3]),
        ({"overlong": {"buffer_length": 1, "max_length": 3, "penalty": 0.5}}, [1, 0.5, 0, -0.5], [0, 1, 3]),
        ({"overlong": {"stop_properly_coef": 0.5}}, [1, 0.5, 0, 0], [0, 1, 3]),
        ({"overlong": {"filter": True}}, [1, 1, 0, 0], [0, 3]),
        ({"reward_whitening": True}, [1.244017, 1.244017, 0, -0.488034], [0, 1, 3]),
    ],
    ids=["scaling", "soft", "max_length", "stop_properly", "filter", "whitening"],
)
def test_every_key_reaches_the_batch(keys: dict[str, object], rewards: list[float], counted: list[int]) -> None:
    found = batch(Algorithm(**keys))
    assert found.rewards.sum(dim=1).tolist() == pytest.approx(rewards, abs=1e-6)
    assert found.sample_mask.nonzero().flatten().tolist() == counted


def test_length_penalties_count_what_the_policy_wrote() -> None:
    observed = Conversation(("a", "b"), (False, True, True, False), 1)
    turns = [replace(trajectory(4, 1.0), conversation=observed), trajectory(4, 1.0)]
    shaped = shaped_rewards(turns, Algorithm(overlong={"buffer_length": 2}), 4)
    assert shaped.rewards.tolist() == [1.0, 0.0]


def test_correctness_and_raw_rewards_are_not_shaped() -> None:
    shaped_rewards(TRAJECTORIES, Algorithm(reward_scaling={"target_min": -5.0}), 4)
    assert [trajectory.metric for trajectory in TRAJECTORIES] == [1.0, 1.0, 0.0, 0.0]
    metrics = trajectory_metrics(TRAJECTORIES)
    assert metrics["reward/raw_mean"] == pytest.approx(2 / 3)
    assert metrics["len/response_clip_frac"] == 0.25


def test_throughput_counts_all_rows_of_an_agent() -> None:
    agents = replace(trajectory(2, 1.0), rows=(trajectory(4, 1.0), trajectory(1, 1.0)))
    metrics = trajectory_metrics([agents, trajectory(3, 0.0)])
    assert metrics["perf/tokens"] == 4 * len(PROMPT.token_ids) + 2 + 4 + 1 + 3
    assert metrics["perf/samples"] == 2


def test_a_response_of_several_rows_counts_once() -> None:
    turn = Conversation(("a", "b"), (False, True, True, False), 1)
    rewritten = replace(trajectory(3, 0.0), conversation=Conversation(("c",), (False,) * 3, 0))
    agent = replace(trajectory(4, 1.0), conversation=turn, rows=(rewritten,), step_rewards=((3, 0.5),))
    short = replace(trajectory(1, 0.0), conversation=Conversation(("d",), (False,), 0))
    both = [agent, short]
    rows = training_rows(both, 4)
    found = rollout_batch(rows, shaped_rewards(rows, Algorithm(), 4), pad_token_id=0)
    metrics = rollout_metrics(found)
    assert (metrics["reward/mean"], metrics["reward/max"]) == (0.5, 1.0)
    lengths = [metrics[f"len/response_{which}"] for which in ("mean", "min", "max")]
    assert lengths == [3.0, 1.0, 5.0]
    assert process_rewards(rows, found.action_mask)[1]["reward/process_mean"] == 0.25
    shaping = Algorithm(reward_scaling={"source_max": 0.5})
    shaped = shaped_rewards(rows, shaping, 4, torch.tensor([row.prompt.index < 0 for row in rows]))
    assert shaped.metrics == {"reward/out_of_range": 1.0, "reward/filtered": 2.0}
    assert validation_metrics(both, "val/score")["val/len"] == 3.0
    metrics = conversation_metrics(both)
    assert (metrics["turns/mean"], metrics["turns/max"], metrics["turns/rows"]) == (2.0, 3.0, 1.5)
    assert (metrics["tool/calls"], metrics["len/observation_mean"]) == (0.5, 1.0)


def test_responses_without_a_score_have_no_mean_of_scores() -> None:
    """A source whose questions all time out would otherwise have an accuracy of 0."""
    unscored = replace(trajectory(2, 0.0, valid=False), prompt=replace(PROMPT, source="sums"))
    assert validation_metrics([unscored], "val/accuracy", "sums/") == {"val/sums/len": 2.0, "val/sums/unscored": 1.0}
    assert source_metrics([unscored]) == {"source/sums/len": 2.0, "source/sums/responses": 1.0}
    scored = replace(trajectory(1, 1.0), reward_parts=(("right", 0.5),))
    found = function_metrics([unscored, scored], ["right", "style"])
    assert found == {"reward/right": 0.5, "reward/right/unscored": 1.0, "reward/style/unscored": 2.0}


def test_a_response_none_of_whose_rows_counts_is_no_response() -> None:
    agent = replace(trajectory(2, 1.0, valid=False), rows=(trajectory(3, 0.0),))
    rows = training_rows([agent, trajectory(4, 2.0)], 4)
    metrics = rollout_metrics(rollout_batch(rows, shaped_rewards(rows, Algorithm(), 4), pad_token_id=0))
    assert (metrics["reward/mean"], metrics["len/response_min"], metrics["len/response_max"]) == (2.0, 4.0, 4.0)


def test_the_first_error_of_a_cause_is_reported_with_its_place() -> None:
    traceback = 'Traceback:\n  File "a.py", line 3, in score_one\n    x\n  File "/my/own.py", line 7, in own\n    y\n'
    first = replace(trajectory(1, 0.0, valid=False), outcome="raised", verdict=f"{traceback}KeyError: 'mine'")
    slow = replace(first, outcome="timeout", verdict="no answer within 5 s")
    notes = unscored_notes([trajectory(1, 1.0), first, slow, replace(first, verdict="other")])
    ends = {"raised": "The first: KeyError: 'mine' (/my/own.py:7)", "timeout": "The first: no answer within 5 s"}
    counts = {
        "raised": "2 of 4 responses have no score (raised)",
        "timeout": "1 of 4 responses have no score (timeout)",
    }
    assert notes == {
        cause: f"{counts[cause]} and do not count, see metric reward/unscored. {ends[cause]}" for cause in ends
    }


@pytest.mark.parametrize(("ignore", "compared"), [(False, [0, 1, 3]), (True, [0, 3])])
def test_who_is_compared_to_reaches_the_batch(ignore: bool, compared: list[int]) -> None:
    found = batch(Algorithm(overlong={"filter": True}, group_ignore_masked=ignore))
    assert found.compared is not None
    assert found.compared.nonzero().flatten().tolist() == compared


def test_baselines_are_shaped_rewards_of_the_greedy_response_to_the_same_prompt() -> None:
    """A greedy response that was truncated is filtered as a row and still a baseline; one without a score is none."""
    prompts = [replace(PROMPT, index=index) for index in (7, 8, 9)]
    rows = [replace(trajectory(2, 1.0), prompt=prompts[index]) for index in (0, 0, 1, 2)]
    greedy = [
        replace(trajectory(4, 1.0, "length"), prompt=prompts[0], step_rewards=((1, 0.25),)),
        replace(trajectory(1, 0.0, valid=False), prompt=prompts[1]),
        replace(trajectory(1, 0.0), prompt=prompts[2]),
    ]
    algorithm = Algorithm(reward_scaling={}, overlong={"filter": True})
    batch = rollout_batch(rows, shaped_rewards(rows, algorithm, 4), pad_token_id=0)
    found, metrics = with_baselines(batch, greedy, shaped_rewards(greedy, algorithm, 4))
    assert found.baselines is not None
    assert found.baselines.tolist() == [1.25, 1.25, 0.0, -1.0]
    assert found.sample_mask.tolist() == [True, True, False, True]
    assert metrics == {"baseline/mean": 0.125, "baseline/unscored": 1.0}


def test_only_responses_that_were_cut_go_on_after_their_last_token() -> None:
    found = cut_ends(TRAJECTORIES, batch(Algorithm()).action_mask)
    assert found.nonzero().tolist() == [[1, 5]]
