"""Rules of recurrent policies: what is refused and why, and the neighbours that pass."""

from __future__ import annotations

import pytest

TYPE = "actor.model.type=gru"  # on 8 environments and 128 steps, mini-batches of 64
GRU = "data.mini_batch_size=128", TYPE
LENGTH = "actor.model.sequence_length=32"

REFUSED = [
    ([*GRU, "actor.model.num_action_chunks=2"], "actor.model.num_action_chunks", "without those inside it"),
    ([*GRU, "algorithm.logprob_type=token_level"], "algorithm.logprob_type", "share one log-prob"),
    ([*GRU, "algorithm.entropy_type=token_level"], "algorithm.entropy_type", "share one log-prob"),
    ([*GRU, "algorithm.loss_agg_func=seq-mean-token-mean"], "algorithm.loss_agg_func", "every step weighs the same"),
    (
        [TYPE, "actor.model.sequence_length=48", "data.mini_batch_size=1024"],
        "actor.model.sequence_length",
        "sequences of 48 steps do not divide",
    ),
    ([TYPE, "data.mini_batch_size=64"], "data.mini_batch_size", "sequences of 128 transitions"),
    ([*GRU, LENGTH, "actor.micro_batch_size=16"], "actor.micro_batch_size", "sequences of 32 transitions"),
    ([*GRU, "actor.model.sequence_length=0"], "actor.model.sequence_length", "out of range"),
    ([*GRU, "actor.model.recurrent_size=0"], "actor.model.recurrent_size", "out of range"),
    (["actor.model.type=lstm"], "actor.model.type", "not one of the allowed"),
    ([LENGTH], "actor.model.sequence_length", "type mlp remembers nothing"),
    (["actor.model.recurrent_size=64"], "actor.model.recurrent_size", "type mlp remembers nothing"),
]

PASSES = [
    [*GRU],
    [TYPE, LENGTH, "data.mini_batch_size=64", "actor.micro_batch_size=32"],
    [*GRU, LENGTH, "actor.model.recurrent_size=16"],
    [*GRU, "algorithm.logprob_type=action_level"],
]


@pytest.mark.parametrize(("overrides", "key", "reason"), REFUSED)
def test_refused(overrides: list[str], key: str, reason: str, problems) -> None:
    (problem,) = problems("embodied", *overrides).values()
    assert problem.key == key
    assert reason in str(problem)


@pytest.mark.parametrize("overrides", PASSES)
def test_passes(overrides: list[str], problems) -> None:
    assert problems("embodied", *overrides) == {}


@pytest.mark.parametrize("key", ["type=gru", "recurrent_size=64", "sequence_length=8"])
def test_language_models_have_no_such_keys(key: str, problems) -> None:
    reported = problems("reasoning", f"actor.model.{key}")
    assert "only embodied" in str(reported[f"actor.model.{key.partition('=')[0]}"])


def test_sequences_are_rollouts_unless_they_are_cut(load) -> None:
    assert load("embodied").config.sequence_length == 1
    assert load("embodied", *GRU).config.sequence_length == 128
    assert load("embodied", *GRU, LENGTH).config.sequence_length == 32
