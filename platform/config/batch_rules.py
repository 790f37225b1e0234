"""Rules between the keys that choose which rows a step trains on: PF-PPO, dynamic sampling, early stop."""

from __future__ import annotations

from collections.abc import Iterator

from rl_platform.config.estimators import estimator_of
from rl_platform.config.rules import BrokenRule
from rl_platform.config.schema import Config

_PF_PPO, _DYNAMIC = "algorithm.use_pf_ppo", "algorithm.dynamic_sampling"


def broken_batch_rules(config: Config) -> Iterator[BrokenRule]:
    """The rules that `config` breaks."""
    algorithm, embodied = config.algorithm, config.runner.task_type == "embodied"
    if algorithm.use_pf_ppo and embodied:
        message = "PF-PPO weighs whole responses by their reward; a transition's reward does not say how good it was"
        yield BrokenRule(_PF_PPO, message, ("runner.task_type",))
    if algorithm.use_pf_ppo and estimator_of(algorithm.adv_type).groups:
        message = f"adv_type {algorithm.adv_type} compares the samples of a group, and rows drawn anew break up groups"
        yield BrokenRule(_PF_PPO, message, ("algorithm.adv_type",), "algorithm.adv_type: gae")
    if algorithm.dynamic_sampling is None or embodied:
        return
    if algorithm.group_size < 2:
        message = "it keeps prompts whose samples differ, and one sample per prompt never does"
        yield BrokenRule(_DYNAMIC, message, ("algorithm.group_size",), "algorithm.group_size: 8")
    if config.rollout.sampling.temperature == 0:
        message = "greedy responses to a prompt are all the same: no prompt would ever be kept"
        yield BrokenRule(_DYNAMIC, message, ("rollout.sampling.temperature",), "rollout.sampling.temperature: 1")
