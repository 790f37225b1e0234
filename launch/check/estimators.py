"""The advantage estimator beside formulas written down a second time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rl_platform.algorithms.action_levels import to_log_prob_level
from rl_platform.algorithms.advantages import advantages
from rl_platform.config.estimators import ESTIMATORS, estimator_of
from rl_platform.config.schema import Config
from rl_platform.launch.check.property import Difference, Property, compare
from rl_platform.launch.check.samples import Case
from rl_platform.records import RolloutBatch

CONSTANT = 5.0  # added to the rewards of a group


def recursion(case: Case) -> Iterator[Difference]:
    algorithm, batch = case.algorithm, case.rollout
    lengths = batch.value_positions.sum(dim=1).clamp(min=1)
    lam_policy = _lambda(algorithm.gae_lambda_policy, algorithm.gae_lambda, len(batch))
    if algorithm.length_adaptive_alpha > 0:
        lam_policy = (1 - 1 / (algorithm.length_adaptive_alpha * lengths)).clamp(0, 1)
    lam_value = _lambda(algorithm.gae_lambda_value, algorithm.gae_lambda, len(batch))
    found, returns = _estimate(case)
    plain_loop = textbook_gae(batch, algorithm.gamma, lam_policy)
    yield compare("advantages", found, to_log_prob_level(plain_loop, batch))
    values = torch.where(batch.value_positions, _values(batch), 0.0)
    expected = textbook_gae(batch, algorithm.gamma, lam_value) + values
    yield compare("returns", returns, expected)
    plain = {"gae_lambda_policy": None, "gae_lambda_value": None, "length_adaptive_alpha": 0.0}
    for lam, what in ((1.0, "lambda 1: what is to come minus V"), (0.0, "lambda 0: the one-step TD error")):
        found, _ = _estimate(case, gae_lambda=lam, **plain)
        rows = torch.full((len(batch),), lam)
        direct = _rest(batch, algorithm.gamma) if lam else textbook_gae(batch, algorithm.gamma, rows)
        yield compare(what, found, to_log_prob_level(direct, batch))


def decoupled(case: Case) -> Iterator[Difference]:
    lam = case.algorithm.gae_lambda
    same = _estimate(case, gae_lambda_policy=lam, gae_lambda_value=lam, length_adaptive_alpha=0.0)
    plain = _estimate(case, gae_lambda_policy=None, gae_lambda_value=None, length_adaptive_alpha=0.0)
    for name, one, other in zip(("advantages", "returns"), same, plain, strict=True):
        yield compare(name, one, other)


def group_baselines(case: Case) -> Iterator[Difference]:
    batch, algorithm = case.rollout, case.algorithm.model_copy(update={"advantage_clip": None})
    found = advantages(batch, algorithm)[0]
    groups = batch.group_ids.unique()
    own_scale = (
        algorithm.adv_type == "grpo" and algorithm.grpo_leave_one_out
    )  # each row is divided by another deviation
    if not estimator_of(algorithm.adv_type).whitens and not own_scale:
        scores = _per_row(found, batch)
        sums = torch.stack([scores[batch.group_ids == group].sum() for group in groups])
        yield compare("sum of the advantages of a group", sums, torch.zeros(len(groups)), scale=1.0)
    last = batch.mask & (batch.mask.flip(1).cumsum(dim=1).flip(1) == 1)
    raised = (batch.group_ids == groups[0])[:, None] & last
    moved = replace(batch, rewards=batch.rewards + CONSTANT * raised)
    yield compare(f"advantages with {CONSTANT:g} more reward for a whole group", advantages(moved, algorithm)[0], found)


def leave_one_out(case: Case) -> Iterator[Difference]:
    batch = case.rollout
    rloo, _ = _estimate(case, adv_type="rloo")
    grpo, _ = _estimate(case, adv_type="grpo", grpo_std_normalization=False, grpo_leave_one_out=False)
    counted = batch.mask.any(dim=1)
    sizes = torch.stack([(counted & (batch.group_ids == group)).sum() for group in batch.group_ids])
    factors = torch.where(sizes > 1, sizes / (sizes - 1).clamp(min=1), 0.0)
    yield compare("rloo beside n / (n - 1) grpo", rloo, factors[:, None] * grpo)


def textbook_gae(batch: RolloutBatch, gamma: float, lam: Tensor) -> Tensor:
    """[B,T] float64: g_t = r_t + gamma V_next - V_t + gamma lam g_next over the active positions of each row alone."""
    rewards, values, active = batch.rewards.double(), _values(batch).double(), batch.value_positions
    result = torch.zeros_like(values)
    for row in range(len(batch)):
        following, g = 0.0, 0.0
        for t in reversed(range(values.shape[1])):
            if batch.ends is not None and batch.end_values is not None and bool(batch.ends[row, t]):
                following, g = float(batch.end_values[row, t]), 0.0
            if bool(active[row, t]):
                value = float(values[row, t])
                g = float(rewards[row, t]) + gamma * following - value + gamma * float(lam[row]) * g
                result[row, t], following = g, value
    return result


def _rest(batch: RolloutBatch, gamma: float) -> Tensor:
    """[B,T] float64: the discounted rewards from each active position on, up to the end of its episode, minus V."""
    values, active = _values(batch).double(), batch.value_positions
    result = torch.zeros_like(values)
    for row in range(len(batch)):
        coming = 0.0
        for t in reversed(range(values.shape[1])):
            if batch.ends is not None and batch.end_values is not None and bool(batch.ends[row, t]):
                coming = float(batch.end_values[row, t])
            if bool(active[row, t]):
                coming = float(batch.rewards[row, t]) + gamma * coming
                result[row, t] = coming - values[row, t]
    return result


def _estimate(case: Case, **changes: Any) -> tuple[Tensor, Tensor]:
    """Advantages, not whitened, and returns (zeros without a critic) of the case's rollout under other keys."""
    algorithm = case.algorithm.model_copy(update={"normalize_advantages": False, "advantage_clip": None, **changes})
    found, returns = advantages(case.rollout, algorithm)
    return found, torch.zeros_like(found) if returns is None else returns


def _values(batch: RolloutBatch) -> Tensor:
    assert batch.values is not None
    return batch.values


def _lambda(own: float | None, default: float, rows: int) -> Tensor:
    return torch.full((rows,), default if own is None else own, dtype=torch.float64)


def _per_row(found: Tensor, batch: RolloutBatch) -> Tensor:
    """[B] the one advantage of each row, 0 for rows that do not count."""
    return found.sum(dim=1) / batch.mask.sum(dim=1).clamp(min=1)


def _only(*names: str, why: str) -> Any:
    def not_asked(config: Config) -> str | None:
        name = config.algorithm.adv_type
        if name in names:
            return None
        return f"adv_type {name} {why}" if name in ESTIMATORS else "adv_type is a function of your own"

    return not_asked


PROPERTIES = [
    Property(
        "GAE recursion",
        "advantages, returns = plain loop over the actions",
        recursion,
        _only("gae", why="is no recursion over values"),
    ),
    Property(
        "decoupled GAE", "equal lambdas for policy and values = one lambda", decoupled, _only("gae", why="has none")
    ),
    Property(
        "group baseline",
        "sum over a group = 0; all its rewards raised = not",
        group_baselines,
        _only("grpo", "rloo", "reinforce_plus_plus_baseline", why="compares no groups"),
    ),
    Property(
        "RLOO and GRPO",
        "rloo = n / (n - 1) times grpo without deviation",
        leave_one_out,
        _only("grpo", "rloo", why="is neither"),
    ),
]
