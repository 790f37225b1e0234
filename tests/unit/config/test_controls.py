"""The smaller controls: each acts where it can, and is refused with the reason where it cannot."""

from __future__ import annotations

from typing import Any

import pytest

from rl_platform.config.foreign_names import translate

NLL = "algorithm.positive_nll_norm=all_tokens"
NOMINAL = "algorithm.loss_agg_denominator=nominal"

PLACED = "cluster.component_placement"
REFERENCE = f"{PLACED}={{'actor,critic,rollout,reward,reference': all}}"
NO_CRITIC = ["critic.use_critic_model=false", f"{PLACED}={{'actor,rollout,reward': all}}"]
GROUPS = [*NO_CRITIC, "algorithm.adv_type=grpo", "algorithm.group_size=8"]

BOOTSTRAP = "algorithm.bootstrap_truncated"
OLD = "algorithm.old_log_probs"
ONE_STEP = ["data.mini_batch_size=64", "data.train_batch_size=64"]

REFUSED = [
    # overrides, key, part of the reason
    ([NOMINAL], "algorithm.loss_agg_denominator", "token-mean does not divide by a number of sequences"),
    ([NOMINAL, "algorithm.loss_agg_func=token-sum"], "algorithm.loss_agg_denominator", "token-sum does not divide"),
    (
        [*GROUPS, "algorithm.grpo_leave_one_out=true", "algorithm.grpo_std_normalization=false"],
        "algorithm.grpo_leave_one_out",
        "is the estimator rloo",
    ),
    (["algorithm.grpo_leave_one_out=true"], "algorithm.grpo_leave_one_out", "gae does not read it"),
    (["algorithm.whiten_over=sequences"], "algorithm.whiten_over", "gae does not read it"),
    (["algorithm.reinforce_kl_credit=local"], "algorithm.reinforce_kl_credit", "gae does not read it"),
    (
        [*NO_CRITIC, "algorithm={adv_type: reinforce_plus_plus, reinforce_kl_credit: local}"],
        "algorithm.reinforce_kl_credit",
        "no penalty to give credit for",
    ),
    (["algorithm.group_ignore_masked=true"], "algorithm.group_ignore_masked", "compares no samples of a group"),
    ([*GROUPS, "algorithm.group_ignore_masked=true"], "algorithm.group_ignore_masked", "overlong.filter is off"),
    (["algorithm.advantage_clip=[1, 2]"], "algorithm.advantage_clip", "an advantage of 0 must stay 0"),
    (["algorithm.advantage_clip=[0, 0]"], "algorithm.advantage_clip", "not both 0"),
    (["algorithm.kl_output_clip=5"], "algorithm.kl_output_clip", "use_kl_in_reward is off"),
    (["algorithm.kl_loss_output_clip=5"], "algorithm.kl_loss_output_clip", "use_kl_loss is off"),
    (
        [REFERENCE, "algorithm.use_kl_in_reward=true", "algorithm.kl_output_clip=5"],
        "algorithm.kl_output_clip",
        "kl_penalty is k1",
    ),
    (
        [REFERENCE, "algorithm={use_kl_loss: true, kl_loss_type: full, kl_loss_output_clip: 10}"],
        "algorithm.kl_loss_output_clip",
        "kl_loss_type is full",
    ),
    (["algorithm.rollout_is.denominator=kept"], "algorithm.rollout_is.denominator", "no weight is 0"),
    (["algorithm.old_log_probs=rollout", "algorithm.rollout_is={}"], OLD, "would count twice"),
    ([*ONE_STEP, "algorithm.old_log_probs=current", "algorithm.rollout_is={}"], OLD, "not computed then"),
    (["algorithm.old_log_probs=current", "data.mini_batch_size=32"], OLD, "second of the 2 optimizer steps"),
    ([*ONE_STEP, "algorithm.old_log_probs=current", "algorithm.ppo_epochs=3"], OLD, "second of the 3 optimizer"),
    (
        [*ONE_STEP, REFERENCE, "algorithm.old_log_probs=current", "algorithm.use_kl_in_reward=true"],
        OLD,
        "before the update",
    ),
    (
        [REFERENCE, "algorithm={old_log_probs: rollout, use_kl_in_reward: true, kl_penalty: full}"],
        OLD,
        "pass over the rollout anyway",
    ),
    (
        [*ONE_STEP, "algorithm.old_log_probs=current", "algorithm.clip_ratio_c=3"],
        "algorithm.clip_ratio_c",
        "ratio is 1",
    ),
    ([*ONE_STEP, "algorithm.shuffle_mini_batches=false"], "algorithm.shuffle_mini_batches", "is one mini-batch"),
    (["algorithm={bootstrap_truncated: true, overlong: {filter: true}}"], BOOTSTRAP, "drops truncated responses"),
    ([*GROUPS, "algorithm.bootstrap_truncated=true"], BOOTSTRAP, "adv_type grpo does not read it"),
    ([*NO_CRITIC, "algorithm={adv_type: 'mine:f', bootstrap_truncated: true}"], BOOTSTRAP, "there is no critic"),
    ([NLL], "algorithm.positive_nll_norm", "the term is off"),
]
ACCEPTED = [
    ["algorithm.bootstrap_truncated=true"],
    ["algorithm.shuffle_mini_batches=false", "data.mini_batch_size=32", "actor.balance=false", "critic.balance=false"],
    ["algorithm.rollout_is={mode: icepop, denominator: kept}"],
    ["algorithm.rollout_is={mode: null, reject: {threshold: 1}, denominator: kept}"],
    ["algorithm={old_log_probs: rollout, ppo_epochs: 2}"],
    [REFERENCE, "algorithm={old_log_probs: rollout, use_kl_in_reward: true}"],
    [*ONE_STEP, REFERENCE, "algorithm={old_log_probs: current, use_kl_loss: true, kl_loss_grad: score}"],
    [*ONE_STEP, "algorithm={old_log_probs: current, policy_loss: 'mine:loss', clip_ratio_low: 0.1}"],
    [*GROUPS, "algorithm.grpo_leave_one_out=true"],
    [*GROUPS, "algorithm.group_ignore_masked=true", "algorithm.overlong.filter=true"],
    [*NO_CRITIC, "algorithm={adv_type: 'mine:estimate', group_ignore_masked: true, overlong: {filter: true}}"],
    [*NO_CRITIC, "algorithm={adv_type: reinforce_plus_plus_baseline, group_size: 2, whiten_over: sequences}"],
    ["algorithm.advantage_clip=[-5, 5.5]"],
    [REFERENCE, "algorithm={use_kl_in_reward: true, kl_penalty: low_var_kl, kl_output_clip: null}"],
    [REFERENCE, "algorithm={use_kl_loss: true, kl_loss_type: k3+, kl_loss_output_clip: 10}"],
    [NOMINAL, "algorithm.loss_agg_func=seq-mean-token-sum"],
    ["algorithm.loss_agg_func=token-sum"],
    [NLL, "algorithm.positive_nll_coef=0.1"],
]


@pytest.mark.parametrize(("overrides", "key", "reason"), REFUSED, ids=str)
def test_refused(problems: Any, overrides: list[str], key: str, reason: str) -> None:
    (problem,) = problems("reasoning", *overrides).values()
    assert problem.key == key
    assert reason in problem.message


@pytest.mark.parametrize("overrides", ACCEPTED, ids=str)
def test_accepted(problems: Any, overrides: list[str]) -> None:
    assert problems("reasoning", *overrides) == {}


@pytest.mark.parametrize("key", ["actor.balance", "critic.balance"])
def test_embodied_ranks_need_no_balance(problems: Any, key: str) -> None:
    assert list(problems("embodied", f"{key}=false")) == [key]


@pytest.mark.parametrize("source", ["rollout", "current"])
def test_embodied_runs_recompute(problems: Any, source: str) -> None:
    (problem,) = problems("embodied", f"algorithm.old_log_probs={source}").values()
    assert problem.key == OLD
    assert "gives an embodied run its values" in problem.message


def test_embodied_episodes_are_bootstrapped_anyway(problems: Any) -> None:
    (problem,) = problems("embodied", "algorithm.bootstrap_truncated=true").values()
    assert "always go on with the value" in problem.message


@pytest.mark.parametrize(
    ("foreign", "here"),
    [
        ("loss_fn.force_on_policy_ratio", OLD),
        ("rollout_correction.bypass_mode", OLD),
        ("use_rollout_logprobs", OLD),
        ("grpo.adv_estimator.use_leave_one_out_baseline", "algorithm.grpo_leave_one_out"),
        ("grpo.advantage_clip_low", "algorithm.advantage_clip"),
        ("actor_rollout_ref.actor.shuffle", "algorithm.shuffle_mini_batches"),
        ("trainer.balance_batch", "actor.balance"),
        ("balance_data", "actor.balance"),
        ("gen_batch_size", "algorithm.dynamic_sampling.prompts_per_round"),
    ],
)
def test_names_of_other_systems(foreign: str, here: str) -> None:
    name = translate(foreign)
    assert name is not None
    assert name.here[0] == here
