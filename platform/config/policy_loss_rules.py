"""Rules between the keys of the policy loss: its kind, its aggregation, positive examples, the mismatch correction."""

from __future__ import annotations

from collections.abc import Iterator

from rl_platform.config.rules import FUNCTION, BrokenRule
from rl_platform.config.schema import Config
from rl_platform.config.schema.algorithm import POLICY_LOSSES
from rl_platform.config.suggest import nearest

_KIND, _TASK = "algorithm.policy_loss", "runner.task_type"
_CORRECTION, _STALENESS = "algorithm.rollout_is", "runner.max_staleness"


def broken_policy_loss_rules(config: Config) -> Iterator[BrokenRule]:
    """All rules about the policy loss that the config breaks."""
    yield from _kind(config)
    yield from _correction(config)
    if config.algorithm.positive_nll_coef and config.runner.task_type == "embodied":
        message = "no row of an embodied rollout is a correct answer: it holds transitions"
        yield BrokenRule("algorithm.positive_nll_coef", message, (_TASK,))


def _kind(config: Config) -> Iterator[BrokenRule]:
    algorithm = config.algorithm
    kind = algorithm.policy_loss
    if kind not in POLICY_LOSSES and not FUNCTION.fullmatch(kind):
        close = nearest(kind, POLICY_LOSSES)
        message = f"neither one of {', '.join(POLICY_LOSSES)} nor a function written as module:function"
        yield BrokenRule(_KIND, message, hint=f"did you mean {close}?" if close else "")
    elif kind == "gspo" and config.runner.task_type == "embodied":
        message = "an embodied row is one transition, and its one ratio is that of ppo_clip (algorithm.logprob_type)"
        yield BrokenRule(_KIND, message, (_TASK,), hint=f"{_KIND}: ppo_clip")
    elif kind == "gspo" and algorithm.loss_agg_func != "seq-mean-token-mean":
        key = "algorithm.loss_agg_func"
        message = "policy_loss gspo has one ratio per sequence: each sequence must weigh the same, whatever its length"
        yield BrokenRule(key, message, (_KIND,), hint=f"{key}: seq-mean-token-mean")


def _correction(config: Config) -> Iterator[BrokenRule]:
    correction = config.algorithm.rollout_is
    stale, embodied = config.runner.max_staleness > 0, config.runner.task_type == "embodied"
    if correction is None:
        if stale and config.algorithm.old_log_probs != "rollout":
            message = "rollouts come from weights one update old: without a correction they would count as new"
            yield BrokenRule(_STALENESS, message, (_CORRECTION,), hint=f"{_CORRECTION}: {{}}")
        return
    if embodied and not stale:
        message = "an embodied policy acts and is trained by the same code, so there is no mismatch to correct"
        yield BrokenRule(_CORRECTION, message, (_TASK, _STALENESS))
    elif embodied and (correction.level == "sequence" or correction.mode == "sequence_mask"):
        message = "an embodied row is all that one environment did, whole episodes and parts of others"
        yield BrokenRule(_CORRECTION, message, (_TASK,), hint=f"{_CORRECTION}: {{level: token, mode: truncate}}")
    elif correction.mode is None and correction.reject is None:
        message = "it would do nothing: mode and reject are both null"
        yield BrokenRule(_CORRECTION, message, (f"{_CORRECTION}.mode",), hint=f"{_CORRECTION}: null")
    elif correction.mode is not None and correction.low == correction.high:
        message = "nothing lies between the bounds, low and high are equal"
        yield BrokenRule(f"{_CORRECTION}.low", message, (f"{_CORRECTION}.high", f"{_CORRECTION}.mode"))
