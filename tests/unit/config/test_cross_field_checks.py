"""Combinations that make no sense fail when the config is loaded, each with its reason, and all of them at once.

The table goes by what is wrong; test_checks.py goes by rule. A mismatch correction without log-probs of the rollout
has no row: every rollout engine reports them.
"""

from __future__ import annotations

from typing import Any

import pytest

from rl_platform.config.describe import choices, walk
from rl_platform.config.schema.algorithm import ESTIMATORS, POLICY_LOSSES, KLLossType, KLPenalty, LossAggregation

PLACED = "cluster.component_placement"
WITH_REFERENCE = f"{PLACED}={{'actor,critic,rollout,reward,reference': all}}"
NO_CRITIC = ["critic.use_critic_model=false", f"{PLACED}={{'actor,rollout,reward': all}}"]
ADAPTIVE = "algorithm.use_kl_in_reward=true", WITH_REFERENCE

WRONG = {
    # what: (overrides of the reasoning config, key, part of the reason)
    "dual clip of 1": (["algorithm.clip_ratio_c=1.0"], "algorithm.clip_ratio_c", "above 1"),
    "dual clip below 1": (["algorithm.clip_ratio_c=0.5"], "algorithm.clip_ratio_c", "above 1"),
    "lower clip above 1": (["algorithm.clip_ratio_low=1.1"], "algorithm.clip_ratio_low", "from 0 to 1"),
    "lower clip below 0": (["algorithm.clip_ratio_low=-0.1"], "algorithm.clip_ratio_low", "from 0 to 1"),
    "KL loss without a reference": (["algorithm.use_kl_loss=true"], PLACED, "the KL terms compare to it"),
    "KL in the reward without a reference": (["algorithm.use_kl_in_reward=true"], PLACED, "reference without a place"),
    "coefficient of a KL loss that is off": (
        ["algorithm.kl_loss_coef=0.1"],
        "algorithm.kl_loss_coef",
        "has no effect here",
    ),
    "both KL terms": (
        [WITH_REFERENCE, "algorithm={use_kl_loss: true, use_kl_in_reward: true}"],
        "algorithm.use_kl_loss",
        "would count twice",
    ),
    "sequence ratio with token-mean": (
        ["algorithm={policy_loss: gspo, loss_agg_func: token-mean}"],
        "algorithm.loss_agg_func",
        "one ratio per sequence",
    ),
    "sequence ratio with seq-mean-token-sum": (
        ["algorithm={policy_loss: gspo, loss_agg_func: seq-mean-token-sum}"],
        "algorithm.loss_agg_func",
        "one ratio per sequence",
    ),
    "cispo with dual clip": (
        ["algorithm={policy_loss: cispo, clip_ratio_c: 3.0}"],
        "algorithm.clip_ratio_c",
        "no bound that a dual clip could set",
    ),
    "bounded divergence with dual clip": (
        ["algorithm={policy_loss: dppo_kl, clip_ratio_c: 3.0}"],
        "algorithm.clip_ratio_c",
        "clips no ratio",
    ),
    "dynamic sampling of one sample": (["algorithm.dynamic_sampling={}"], "algorithm.dynamic_sampling", "one sample"),
    **{
        f"{name} of one sample": ([*NO_CRITIC, f"algorithm.adv_type={name}"], "algorithm.group_size", "at least 2")
        for name, estimator in ESTIMATORS.items()
        if estimator.groups
    },
    **{
        f"{name} with a critic": (
            [f"algorithm={{adv_type: {name}, group_size: 2}}"],
            "critic.use_critic_model",
            "never asked",
        )
        for name, estimator in ESTIMATORS.items()
        if not estimator.values
    },
    **{
        f"{key} without a critic": (
            [*NO_CRITIC, f"algorithm={{adv_type: rloo, group_size: 2, {key}: {value}}}"],
            f"algorithm.{key}",
            "has no effect here",
        )
        for key, value in {
            "gae_lambda": 0.9,
            "gae_lambda_policy": 0.9,
            "gae_lambda_value": 1.0,
            "length_adaptive_alpha": 0.05,
            "value_clip": 0.2,
            "huber_delta": 1.0,
            "value_loss_scale": 0.5,
            "critic_ppo_epochs": 2,
            "policy_training_start_step": 1,
        }.items()
    },
    **{
        f"PF-PPO with {name}": (
            [*NO_CRITIC, f"algorithm={{adv_type: {name}, group_size: 2, use_pf_ppo: true}}"],
            "algorithm.use_pf_ppo",
            "break up groups",
        )
        for name, estimator in ESTIMATORS.items()
        if estimator.groups
    },
    **{
        f"adaptive KL with {key} {value}": (
            [*ADAPTIVE, f"algorithm.kl_ctrl={{type: adaptive, {key}: {value}}}"],
            f"algorithm.kl_ctrl.{key}",
            "above 0",
        )
        for key in ("target_kl", "horizon")
        for value in (0, -1)
    },
    "adaptive KL from 0": (
        [*ADAPTIVE, "algorithm.kl_ctrl={type: adaptive, kl_coef: 0}"],
        "algorithm.kl_ctrl.kl_coef",
        "never moves",
    ),
    "a rollout that mini-batches do not divide": (
        ["data.train_batch_size=60"],
        "data.mini_batch_size",
        "do not divide the 60 sequences",
    ),
    "micro-batches with fewer tokens than a sequence": (
        ["actor.max_tokens_per_micro_batch=319"],
        "actor.max_tokens_per_micro_batch",
        "320 tokens",
    ),
    "a scale without width": (
        ["algorithm.reward_scaling={source_min: 1, source_max: 1}"],
        "algorithm.reward_scaling.source_max",
        "must be above",
    ),
    "truncation punished twice": (
        ["algorithm.overlong={buffer_length: 16, stop_properly_coef: 0.5}"],
        "algorithm.overlong.stop_properly_coef",
        "punished twice",
    ),
    "truncation rewarded": (
        ["algorithm={reward_scaling: {}, overlong: {stop_properly_coef: 0.5}}"],
        "algorithm.overlong.stop_properly_coef",
        "would reward truncation",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_combination_that_makes_no_sense_is_refused_with_its_reason(problems: Any, name: str) -> None:
    overrides, key, reason = WRONG[name]
    (problem,) = problems("reasoning", *overrides).values()
    assert problem.key == key
    assert reason in f"{problem.message} {problem.allowed}"
    assert problem.where == "command line" or key in (PLACED, "data.mini_batch_size", "critic.use_critic_model")


def test_a_correction_where_nothing_can_differ_is_refused(problems: Any) -> None:
    assert "no mismatch to correct" in problems("embodied", "algorithm.rollout_is={}")["algorithm.rollout_is"].message


def test_all_of_them_at_once(problems: Any) -> None:
    reported = problems(
        "reasoning",
        "algorithm={clip_ratio_low: 2, clip_ratio_c: 1, use_kl_loss: true, use_kl_in_reward: true, policy_loss: gspo}",
        "algorithm.dynamic_sampling={}",
        "data.train_batch_size=60",
    )
    assert set(reported) == {
        "algorithm.clip_ratio_low",
        "algorithm.clip_ratio_c",
        "algorithm.use_kl_loss",
        "algorithm.loss_agg_func",
        "algorithm.dynamic_sampling",
        "data.mini_batch_size",
        PLACED,
    }


@pytest.mark.parametrize(
    ("key", "known", "misspelt"),
    [
        ("adv_type", tuple(ESTIMATORS), "reinforce_plusplus"),
        ("policy_loss", POLICY_LOSSES, "ppo_clipp"),
        ("loss_agg_func", choices(LossAggregation), "token-means"),
        ("kl_penalty", choices(KLPenalty), "k33"),
        ("kl_loss_type", choices(KLLossType), "low_var_kl_"),
    ],
)
def test_an_unknown_name_is_answered_with_the_known_ones(
    problems: Any, key: str, known: tuple[str, ...], misspelt: str
) -> None:
    switches = [WITH_REFERENCE, "algorithm.use_kl_loss=true"] if key == "kl_loss_type" else []
    switches = [*ADAPTIVE] if key == "kl_penalty" else switches
    problem = problems("reasoning", *switches, f"algorithm.{key}={misspelt}")[f"algorithm.{key}"]
    assert known
    assert [name for name in known if name not in f"{problem.message} {problem.allowed}"] == []
    assert "did you mean" in problem.hint


def test_an_unknown_key_anywhere_is_refused_with_the_nearest(problems: Any) -> None:
    """One letter more at the end of the first key of each section, all at once."""
    keys = {path.rpartition(".")[0]: path for path, _ in reversed([*walk()]) if "." in path}
    refused = problems("reasoning", *(f"{key}z=1" for key in keys.values()))
    hints = {key: refused[f"{key}z"].hint for key in keys.values()}
    assert [key for key, hint in hints.items() if key.rpartition(".")[2] not in hint] == []
