"""Rules between the keys that choose which rows a step trains on: PF-PPO, dynamic sampling, partial rollouts."""

from __future__ import annotations

from collections.abc import Iterator

from rl_platform.config.estimators import estimator_of
from rl_platform.config.rules import BrokenRule
from rl_platform.config.schema import Config

_PF_PPO, _DYNAMIC = "algorithm.use_pf_ppo", "algorithm.dynamic_sampling"
_PARTIAL = "rollout.partial_rollout"


def broken_batch_rules(config: Config) -> Iterator[BrokenRule]:
    """The rules that `config` breaks."""
    algorithm, embodied = config.algorithm, config.runner.task_type == "embodied"
    if algorithm.use_pf_ppo and embodied:
        message = "PF-PPO weighs whole responses by their reward; a transition's reward does not say how good it was"
        yield BrokenRule(_PF_PPO, message, ("runner.task_type",))
    if algorithm.use_pf_ppo and estimator_of(algorithm.adv_type).groups:
        message = f"adv_type {algorithm.adv_type} compares the samples of a group, and rows drawn anew break up groups"
        yield BrokenRule(_PF_PPO, message, ("algorithm.adv_type",), "algorithm.adv_type: gae")
    if config.rollout.partial_rollout is not None and not embodied:
        yield from _partial_rollout(config)
    if algorithm.dynamic_sampling is None or embodied:
        return
    if algorithm.group_size < 2:
        message = "it keeps prompts whose samples differ, and one sample per prompt never does"
        yield BrokenRule(_DYNAMIC, message, ("algorithm.group_size",), "algorithm.group_size: 8")
    if config.rollout.sampling.temperature == 0:
        message = "greedy responses to a prompt are all the same: no prompt would ever be kept"
        yield BrokenRule(_DYNAMIC, message, ("rollout.sampling.temperature",), "rollout.sampling.temperature: 1")


def _partial_rollout(config: Config) -> Iterator[BrokenRule]:
    prompts, correction = config.data.train_batch_size, "algorithm.rollout_is"
    if config.prompts_in_flight <= prompts:
        key = f"{_PARTIAL}.prompts_in_flight"
        message = f"a step trains on {prompts} prompts (data.train_batch_size): without more in work none is ever cut"
        yield BrokenRule(key, message, ("data.train_batch_size",), f"more than {prompts}")
    if config.rollout.multi_turn is not None:
        message = "what a tool would have answered to a turn that is cut is not known: conversations are not cut"
        yield BrokenRule(_PARTIAL, message, ("rollout.multi_turn",), f"{_PARTIAL}: null")
    if config.algorithm.dynamic_sampling is not None:
        message = "dynamic sampling judges whole rounds of prompts, and of a round that is cut some are missing"
        yield BrokenRule(_PARTIAL, message, (_DYNAMIC,), f"{_PARTIAL}: null, or {_DYNAMIC}: null")
    if config.algorithm.rollout_is is None and config.algorithm.old_log_probs != "rollout":
        message = "responses hold tokens of older weights: without a correction they would count as new"
        yield BrokenRule(_PARTIAL, message, (correction, "algorithm.old_log_probs"), f"{correction}: {{}}")
