"""Rules about action chunks, their levels and bootstrapping: what is refused and why, and the neighbours that pass."""

from __future__ import annotations

import pytest

CHUNKS = "actor.model.num_action_chunks=2"

REFUSED = [
    ("embodied", [CHUNKS, "algorithm.reward_type=action_level"], "algorithm.logprob_type", "cannot be weighed"),
    ("embodied", ["actor.model.num_action_chunks=3", "data.mini_batch_size=1"], "env.rollout_steps", "chunks of 3"),
    ("embodied", [CHUNKS, "data.mini_batch_size=1024"], "data.mini_batch_size", "512 transitions of env.num_envs"),
    ("embodied", ["actor.model.num_action_chunks=0"], "actor.model.num_action_chunks", "out of range"),
    ("embodied", [CHUNKS, "algorithm.reward_type=token_level"], "algorithm.reward_type", "not one of the allowed"),
    ("embodied", ["algorithm.logprob_type=chunk"], "algorithm.logprob_type", "not one of the allowed"),
    ("embodied", ["algorithm.entropy_type=1"], "algorithm.entropy_type", "not one of the allowed"),
    ("embodied", ["algorithm.bootstrap_type=never"], "algorithm.bootstrap_type", "not one of the allowed"),
    ("embodied", ["algorithm.reward_type=chunk_level"], "algorithm.reward_type", "both types are the same"),
    (
        "embodied",
        ["algorithm={loss_type: actor_critic, loss_agg_func: seq-mean-token-sum, entropy_type: token_level}"],
        "algorithm.entropy_type",
        "the same at every level",
    ),
    ("reasoning", [CHUNKS], "actor.model.num_action_chunks", "only embodied"),
    ("reasoning", ["algorithm.reward_type=chunk_level"], "algorithm.reward_type", "no action chunks"),
    ("reasoning", ["algorithm.logprob_type=token_level"], "algorithm.logprob_type", "no action chunks"),
    ("reasoning", ["algorithm.entropy_type=token_level"], "algorithm.entropy_type", "no action chunks"),
    ("reasoning", ["algorithm.bootstrap_type=always"], "algorithm.bootstrap_type", "one episode each"),
]

PASSES = [
    [CHUNKS],
    [CHUNKS, "data.mini_batch_size=512"],
    [CHUNKS, "algorithm.reward_type=chunk_level", "algorithm.logprob_type=token_level"],
    [CHUNKS, "algorithm.reward_type=action_level", "algorithm.logprob_type=action_level"],
    [CHUNKS, "algorithm.entropy_type=action_level", "algorithm.bootstrap_type=none"],
    ["algorithm.logprob_type=token_level", "algorithm.entropy_type=token_level"],
]


@pytest.mark.parametrize(("task", "overrides", "key", "reason"), REFUSED)
def test_refused(task: str, overrides: list[str], key: str, reason: str, problems) -> None:
    reported = problems(task, *overrides)
    assert list(reported) == [key]
    assert reason in str(reported[key])


@pytest.mark.parametrize("overrides", PASSES)
def test_passes(overrides: list[str], problems) -> None:
    assert problems("embodied", *overrides) == {}


def test_transitions_are_choices(load) -> None:
    assert load("embodied").config.transitions == 8 * 128
    assert load("embodied", "actor.model.num_action_chunks=4").config.transitions == 8 * 32
