"""Whole PPO steps of a small real model, as a run takes them: batch layout and the first step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rl_platform.config.schema import Config
from rl_platform.launch.check.learners import Small, rollout, small, small_learners
from rl_platform.launch.check.property import Property, PropertyDifference, compare
from rl_platform.launch.check.samples import CheckedConfig, widened
from rl_platform.records import RolloutBatch

UPDATED = 1e-4  # of the largest change of a parameter: float32 parameters carry seven digits, their change fewer
FIRST_RATIO = 1e-5
PADDING = 37


def parameters(case: CheckedConfig) -> Iterator[PropertyDifference]:
    """Compares the changes of the parameters in an update with micro-batches or padding to those without."""
    batch = rollout(case)
    whole, measured = _changes(case, None, batch)
    variants: list[tuple[str, int | None, RolloutBatch]]
    variants = [(f"micro-batches of {size}", size, batch) for size in (1, 3)]
    if not case.embodied:
        width = batch.action_mask.shape[1]
        padded = widened(batch, torch.arange(width), width + PADDING, 0.0)
        variants.append((f"{PADDING} columns of padding", None, padded))
    for what, size, other in variants:
        changes, metrics = _changes(case, size, other)
        for name, change in changes.items():
            yield compare(f"change of the {name}'s parameters, {what}", change, whole[name], UPDATED)
            norm = f"{name}/grad_norm"  # clipping would hide a gradient that is too long
            yield compare(f"gradient norm of the {name}, {what}", metrics[norm], measured[norm], UPDATED)


def first_step(case: CheckedConfig) -> Iterator[PropertyDifference]:
    """Compares the inputs of the loss in the first optimizer step with the log-probs before it."""
    keys = {"ppo_epochs": 1, "policy_training_start_step": 0, "target_kl": None}
    config = small(case, micro_batch_size=3, logprob_forward_micro_batch_size=case.rows, **keys)
    config = config.changed({"data.mini_batch_size": case.rows})
    with small_learners(case, config) as learners:
        metrics = learners.update(rollout(case))
    if "actor/ratio_min" not in metrics:  # a loss of the user's own with metrics of its own
        yield compare("log-probs in the update and before it", *_log_probs(case), allowed=FIRST_RATIO)
        return
    for name in ("actor/ratio_min", "actor/ratio_max", "actor/ratio_mean"):
        yield compare(f"{name} and 1", metrics[name], 1.0, FIRST_RATIO)
    for name in ("actor/clip_frac", "actor/approx_kl"):
        if name in metrics and not _exact_bound(config):
            yield compare(f"{name} and 0", metrics[name], 0.0, FIRST_RATIO, 1.0)


def _changes(
    case: CheckedConfig, micro_batch_size: int | None, batch: RolloutBatch
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Returns the change of each learner's parameters by a PPO step that trains all, and its metrics."""
    with small_learners(case, small(case, micro_batch_size, policy_training_start_step=0)) as learners:
        before = _parameters(learners)
        metrics = learners.update(batch)
        return {name: tensor - before[name] for name, tensor in _parameters(learners).items()}, metrics


def _parameters(learners: Small) -> dict[str, Tensor]:
    return {name: learners.parameters(name) for name in learners.trained}


def _log_probs(case: CheckedConfig) -> tuple[Tensor, Tensor]:
    """Returns log-probs in micro-batches, as in an update, and of all rows at once, as before it."""
    configs = (small(case, micro_batch_size=3), small(case))
    results = []
    for config in configs:
        with small_learners(case, config) as learners:
            results.append(learners.groups["actor"].evaluate(rollout(case)).wait()[0]["log_probs"])
    return results[0], results[1]


def _exact_bound(config: Config) -> bool:
    """Returns whether a ratio of 1 lies on a bound, so that rounding decides whether it is clipped."""
    return min(config.algorithm.clip_ratio_low, config.algorithm.clip_ratio_high) == 0


def _recomputed(config: Config) -> str | None:
    source = config.algorithm.old_log_probs
    reasons = {
        "rollout": "old_log_probs rollout compares to what the engine reported",
        "current": "old_log_probs current has no other ratio",
    }
    return reasons.get(source)


PROPERTIES = [
    Property("update of a model", "parameters: in micro-batches, padded = as a whole", parameters),
    Property("first step", "ratio to the old policy = 1; clipped share, KL = 0", first_step, _recomputed),
]
