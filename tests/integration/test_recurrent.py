"""Runs of recurrent policies: each key acts, a stopped run goes on, and ranks, processes and layouts change nothing."""

from __future__ import annotations

import pytest

from rl_platform.metrics import read_metrics

GRU = "embodied.yaml", "actor.model.type=gru", "actor.model.recurrent_size=8", "env.max_episode_steps=9"
SHORT = "actor.model.sequence_length=8"


def test_every_key_has_an_effect(learned, differences) -> None:
    base, _ = learned(*GRU)
    assert "hidden_states" in base["env"]
    assert base["env"]["hidden_states"].any()
    for changed in ((*GRU, SHORT), (*GRU, "actor.model.recurrent_size=4"), ("embodied.yaml", GRU[3])):
        assert differences(base["actor"]["model"], learned(*changed)[0]["actor"]["model"]), changed


def test_a_run_that_was_stopped(assert_ends_the_same_if_stopped) -> None:
    assert_ends_the_same_if_stopped(*GRU, SHORT)


@pytest.mark.parametrize(
    "overrides",
    [
        ("cluster.component_placement={'actor_critic,rollout': all, env: 'all:0-1'}",),
        ("env.num_workers=2",),
        ("cluster.component_placement={env: all, actor_critic: all, rollout: all}",),
    ],
    ids=["two env ranks", "worker processes", "separate processes"],
)
def test_who_simulates_changes_no_bit(learned, differences, overrides: tuple[str, ...]) -> None:
    assert differences(learned(*GRU, SHORT), learned(*GRU, SHORT, *overrides)) == []


def test_layouts_change_the_rounding_alone(learned) -> None:
    whole = learned(*GRU, SHORT)[0]["actor"]["model"]
    ranks = "cluster.component_placement={'actor_critic,env': all, rollout: 'all:0-2'}"
    micro = "actor.micro_batch_size=8", "algorithm.logprob_forward_micro_batch_size=3"
    parts = learned(*GRU, SHORT, *micro, "algorithm.rollout_micro_batch_size=3", ranks)[0]["actor"]["model"]
    for name, tensor in whole.items():
        assert (tensor - parts[name]).abs().max() < 1e-5, name


def test_the_ratio_of_the_first_optimizer_step_is_one(command) -> None:
    one_step = "algorithm.ppo_epochs=1", "data.mini_batch_size=64"
    assert command(*GRU, SHORT, *one_step).code == 0
    for row in read_metrics("out")[1:]:
        assert row["mismatch/prob_error"] < 1 + 1e-5
        assert abs(row["actor/approx_kl_first"]) < 1e-5


def test_a_checkpoint_of_another_policy_is_refused(command) -> None:
    assert command(*GRU, "runner.max_steps=1").code == 0
    ended = command(*GRU[:2], "actor.model.recurrent_size=4", GRU[3], "runner.max_steps=2")
    assert ended.code == 65
    assert "actor.model.recurrent_size" in ended.err
    ended = command("embodied.yaml", GRU[3], "runner.max_steps=2")
    assert ended.code == 65
    assert "actor.model.type" in ended.err
