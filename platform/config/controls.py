"""Rules and idle keys of the smaller controls: what a loss is divided by, credit, clipping, old log-probs."""

from __future__ import annotations

from collections.abc import Iterator

from rl_platform.config.estimators import ESTIMATORS, estimator_of
from rl_platform.config.rules import BrokenRule
from rl_platform.config.schema import Config

IdleControl = tuple[str, str, tuple[str, ...]]  # key, why it does nothing, the keys that decide it


def idle_controls(config: Config) -> Iterator[IdleControl]:
    """Those of the keys here that do nothing in this config."""
    yield from _idle_denominators(config)
    yield from _idle_estimates(config)
    yield from _idle_kl_clips(config)


def broken_controls(config: Config) -> Iterator[BrokenRule]:
    """The rules about them that the config breaks."""
    algorithm = config.algorithm
    if algorithm.grpo_leave_one_out and not algorithm.grpo_std_normalization and algorithm.adv_type == "grpo":
        other = "algorithm.grpo_std_normalization"
        message = f"score minus mean of the others, not divided ({other} is false), is the estimator rloo"
        yield BrokenRule("algorithm.grpo_leave_one_out", message, (other,), "algorithm.adv_type: rloo")
    if (clip := algorithm.advantage_clip) is not None and not (clip[0] <= 0 <= clip[1] and clip[0] < clip[1]):
        message = "an advantage of 0 must stay 0: give [lowest, highest] with lowest <= 0 <= highest, not both 0"
        yield BrokenRule("algorithm.advantage_clip", message)


def _idle_estimates(config: Config) -> Iterator[IdleControl]:
    algorithm, estimator = config.algorithm, estimator_of(config.algorithm.adv_type)
    name, switch = algorithm.adv_type, ("algorithm.adv_type",)
    key, drops = "algorithm.group_ignore_masked", "algorithm.overlong.filter"
    if name in ESTIMATORS and not estimator.groups:
        yield key, f"adv_type {name} compares no samples of a group", switch
    elif not algorithm.overlong.filter:
        yield key, f"{drops} is off: no response that has a score is masked out", (drops,)
    if name == "reinforce_plus_plus" and not algorithm.use_kl_in_reward:
        reward = "algorithm.use_kl_in_reward"
        yield "algorithm.reinforce_kl_credit", f"{reward} is off: there is no penalty to give credit for", (reward,)


def _idle_kl_clips(config: Config) -> Iterator[IdleControl]:
    algorithm, k3 = config.algorithm, ("k3", "low_var_kl")
    clips = (
        ("kl_output_clip", "use_kl_in_reward", "kl_penalty"),
        ("kl_loss_output_clip", "use_kl_loss", "kl_loss_type"),
    )
    for key, switch, kind in clips:
        if not getattr(algorithm, switch):
            yield f"algorithm.{key}", f"algorithm.{switch} is off", (f"algorithm.{switch}",)
        elif (chosen := getattr(algorithm, kind)).removesuffix("+") not in k3:
            reason = f"it bounds k3, whose exponential explodes, and algorithm.{kind} is {chosen}"
            yield f"algorithm.{key}", reason, (f"algorithm.{kind}",)


def _idle_denominators(config: Config) -> Iterator[IdleControl]:
    algorithm = config.algorithm
    aggregation, coefficient = "algorithm.loss_agg_func", "algorithm.positive_nll_coef"
    if algorithm.loss_agg_func in ("token-mean", "token-sum"):
        reason = f"{aggregation} {algorithm.loss_agg_func} does not divide by a number of sequences"
        yield "algorithm.loss_agg_denominator", reason, (aggregation,)
    if not algorithm.positive_nll_coef:
        yield "algorithm.positive_nll_norm", f"{coefficient} is 0: the term is off", (coefficient,)
