"""Rules and idle keys of the smaller controls: what a loss is divided by, credit, clipping, old log-probs."""

from __future__ import annotations

from collections.abc import Iterator

from rl_platform.config.estimators import ESTIMATORS, estimator_of
from rl_platform.config.rules import BrokenRule
from rl_platform.config.schema import Config
from rl_platform.config.schema.algorithm import POLICY_LOSSES

_BOOTSTRAP = "algorithm.bootstrap_truncated"
_OLD = "algorithm.old_log_probs"
IdleControl = tuple[str, str, tuple[str, ...]]  # key, why it does nothing, the keys that decide it


def idle_controls(config: Config) -> Iterator[IdleControl]:
    """Those of the keys here that do nothing in this config."""
    yield from _idle_denominators(config)
    yield from _idle_estimates(config)
    yield from _idle_kl_clips(config)
    yield from _idle_policy_loss(config)


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
    if algorithm.old_log_probs != "recompute":
        yield from _broken_old_log_probs(config)


def _broken_old_log_probs(config: Config) -> Iterator[BrokenRule]:
    algorithm, source, kind = config.algorithm, config.algorithm.old_log_probs, "algorithm.kl_penalty"
    reward, correction, size = "algorithm.use_kl_in_reward", "algorithm.rollout_is", "data.mini_batch_size"
    if config.runner.task_type == "embodied":
        message = "the forward pass that it would save gives an embodied run its values, and log-probs with them"
        yield BrokenRule(_OLD, message, ("runner.task_type",), f"{_OLD}: recompute")
        return
    if algorithm.rollout_is is not None:
        why = {
            "rollout": "the ratio to the rollout's log-probs contains the correction already: it would count twice",
            "current": "its weights are made before the update, of log-probs that are not computed then",
        }[source]
        yield BrokenRule(_OLD, f"{correction} is on: {why}", (correction,), f"{correction}: null")
    if algorithm.full_kl_in_reward:
        message = f"{kind} full needs the training engine's pass over the rollout anyway"
        yield BrokenRule(_OLD, message, (reward, kind), f"{_OLD}: recompute")
    elif source == "current" and algorithm.use_kl_in_reward:
        message = "the KL in the reward needs log-probs before the update"
        yield BrokenRule(_OLD, message, (reward,), f"{_OLD}: recompute")
    rows = config.data.train_batch_size * algorithm.group_size
    steps = algorithm.ppo_epochs * -(-rows // config.data.mini_batch_size)
    if source == "current" and steps > 1:
        message = (
            f"from the second of the {steps} optimizer steps of a rollout on, the current policy is not the old one"
        )
        involved = ("algorithm.ppo_epochs", size, "data.train_batch_size", "algorithm.group_size")
        yield BrokenRule(_OLD, message, involved, f"{size}: {rows}, and algorithm.ppo_epochs: 1")


def _idle_estimates(config: Config) -> Iterator[IdleControl]:
    algorithm, estimator = config.algorithm, estimator_of(config.algorithm.adv_type)
    name, switch = algorithm.adv_type, ("algorithm.adv_type",)
    key, drops = "algorithm.group_ignore_masked", "algorithm.overlong.filter"
    if config.runner.task_type == "embodied":
        reason = "episodes that are cut always go on with the value of the state that follows"
        yield _BOOTSTRAP, reason, ("runner.task_type",)
    elif algorithm.overlong.filter:
        yield _BOOTSTRAP, f"{drops} drops truncated responses", (drops,)
    elif not config.critic.use_critic_model:
        yield _BOOTSTRAP, "there is no critic whose value it could be", ("critic.use_critic_model",)
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


def _idle_policy_loss(config: Config) -> Iterator[IdleControl]:
    algorithm, correction = config.algorithm, config.algorithm.rollout_is
    if correction is not None and correction.mode in (None, "truncate") and correction.reject is None:
        reason = "no weight is 0: mode truncate cuts the ratios, and nothing is rejected"
        yield "algorithm.rollout_is.denominator", reason, ("algorithm.rollout_is.mode", "algorithm.rollout_is.reject")
    if algorithm.old_log_probs == "current" and algorithm.policy_loss in POLICY_LOSSES:
        for key in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c"):
            yield f"algorithm.{key}", f"{_OLD} is current: the ratio is 1 and never clipped", (_OLD,)


def _idle_denominators(config: Config) -> Iterator[IdleControl]:
    algorithm = config.algorithm
    aggregation, coefficient = "algorithm.loss_agg_func", "algorithm.positive_nll_coef"
    if algorithm.loss_agg_func in ("token-mean", "token-sum"):
        reason = f"{aggregation} {algorithm.loss_agg_func} does not divide by a number of sequences"
        yield "algorithm.loss_agg_denominator", reason, (aggregation,)
    if not algorithm.positive_nll_coef:
        yield "algorithm.positive_nll_norm", f"{coefficient} is 0: the term is off", (coefficient,)
