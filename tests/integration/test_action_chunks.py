"""Runs with action chunks: each key changes what is learned, and a run that was stopped goes on as if it were not."""

from __future__ import annotations

import pytest

CHUNKS = "actor.model.num_action_chunks=2"
CHEETAH = ("env.id=HalfCheetah-v5", "env.max_episode_steps=7", "actor.model.initial_log_std=-1")
FINE = tuple(f"algorithm.{key}_level" for key in ("reward_type=action", "logprob_type=token", "entropy_type=token"))


KEYS = [
    ((CHUNKS,), ()),
    ((CHUNKS, "algorithm.logprob_type=action_level"), (CHUNKS,)),
    (
        (CHUNKS, "algorithm.logprob_type=action_level", "algorithm.reward_type=action_level"),
        (CHUNKS, "algorithm.logprob_type=action_level"),
    ),
    (
        (CHUNKS, "algorithm.entropy_bonus=0.1", "algorithm.entropy_type=action_level"),
        (CHUNKS, "algorithm.entropy_bonus=0.1"),
    ),
    (("algorithm.bootstrap_type=always",), ()),
    (("env.max_episode_steps=5", "algorithm.bootstrap_type=none"), ("env.max_episode_steps=5",)),
    ((*CHEETAH, "algorithm.logprob_type=token_level"), CHEETAH),
    (
        (*CHEETAH, "algorithm.entropy_bonus=0.1", "algorithm.entropy_type=token_level"),
        (*CHEETAH, "algorithm.entropy_bonus=0.1"),
    ),
]


@pytest.mark.parametrize(("changed", "before"), KEYS, ids=lambda overrides: overrides[-1] if overrides else "plain")
def test_every_key_has_an_effect(changed: tuple[str, ...], before: tuple[str, ...], learned, differences) -> None:
    actors = [learned("embodied.yaml", *overrides)[0]["actor"]["model"] for overrides in (changed, before)]
    assert differences(*actors)


def test_a_run_that_was_stopped(assert_ends_the_same_if_stopped) -> None:
    assert_ends_the_same_if_stopped("embodied.yaml", CHUNKS, *CHEETAH, *FINE)


def test_micro_batches_and_workers_change_nothing(learned) -> None:
    fine = "embodied.yaml", CHUNKS, *CHEETAH, *FINE
    whole, _ = learned(*fine, "env.num_workers=2")
    parts, _ = learned(*fine, "actor.micro_batch_size=1", "algorithm.logprob_forward_micro_batch_size=3")
    for name, tensor in whole["actor"]["model"].items():
        assert (tensor - parts["actor"]["model"][name]).abs().max() < 1e-5, name


def test_a_checkpoint_of_other_chunks_is_refused(command) -> None:
    assert command("embodied.yaml", CHUNKS, "runner.max_steps=1").code == 0
    ended = command("embodied.yaml", CHUNKS, *FINE, "runner.max_steps=2")
    assert ended.code != 0
    assert "algorithm.reward_type" in ended.err
