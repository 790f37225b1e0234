"""What decides how much a row or a term counts: mismatch weights, adaptive KL, PF-PPO, dynamic sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from rl_platform.algorithms.dynamic_sampling import DynamicSampler, Group
from rl_platform.algorithms.kl import AdaptiveKLController, kl_controller
from rl_platform.algorithms.mismatch import mismatch_weights
from rl_platform.algorithms.pf_ppo import apply_pf_ppo, row_scores
from rl_platform.config.schema import Config
from rl_platform.config.schema.algorithm import DynamicSampling, RolloutIS
from rl_platform.errors import DataError
from rl_platform.launch.check.property import Difference, Property, compare
from rl_platform.launch.check.samples import LARGEST_GROUP, Case
from rl_platform.records import Prompt, Trajectory

TRAJECTORIES = 64  # of a rollout, for the controller
STEPS, GROUPS = 3, 4  # of the sampler


def mismatch(case: Case) -> Iterator[Difference]:
    batch, correction = case.rollout, case.algorithm.rollout_is
    assert batch.log_probs is not None
    assert correction is not None
    weights, _ = mismatch_weights(batch.log_probs, batch.log_probs, batch.mask, correction)
    yield compare("weights where both engines agree, and 1", weights, batch.mask.float())
    log_ratio = torch.where(batch.mask, batch.log_probs - batch.rollout_log_probs, 0.0)
    for level, exponent in (("token", log_ratio), ("sequence", log_ratio.sum(dim=1, keepdim=True))):
        unbounded = RolloutIS(mode="truncate", level=level, low=0.0, high=None)
        weights, _ = mismatch_weights(batch.log_probs, batch.rollout_log_probs, batch.mask, unbounded)
        yield compare(f"weights per {level} without bounds, and the ratio", weights, exponent.exp() * batch.mask)


def adaptive_kl(case: Case) -> Iterator[Difference]:
    control = case.algorithm.kl_ctrl
    bound = 0.2 * TRAJECTORIES / control.horizon
    for factor, change in (
        (10.0, bound),
        (1.1, bound / 2),
        (1.0, 0.0),
        (0.0, -bound),
    ):
        controller = kl_controller(control)
        controller.update(factor * control.target_kl, TRAJECTORIES)
        expected = control.kl_coef * (1 + change)
        yield compare(f"coefficient after {factor:g} times the target", controller.coefficient, expected, 1e-9, 1e-12)
    first, resumed = kl_controller(control), kl_controller(control)
    assert isinstance(first, AdaptiveKLController)
    assert isinstance(resumed, AdaptiveKLController)
    first.update(10 * control.target_kl, TRAJECTORIES)
    resumed.load_state_dict(first.state_dict())
    yield compare("coefficient after save and load", resumed.coefficient, first.coefficient, 0, 1e-12)


def pf_ppo(case: Case) -> Iterator[Difference]:
    """Every row is told from the others by the numbers it holds: they must stay together."""
    batch, options = case.batch, case.algorithm.pf_ppo
    scores = row_scores(case.rollout.rewards, case.rollout.mask)
    tags = torch.arange(len(batch)).float()[:, None].expand(batch.action_mask.shape)
    names = [name for name in ("advantages", "returns", "log_probs", "values") if getattr(batch, name) is not None]
    inputs = batch.inputs | {"tokens": tags.long()}
    tagged = replace(batch, inputs=inputs, group_ids=torch.arange(len(batch)), **dict.fromkeys(names, tags))
    found, _ = apply_pf_ppo(tagged, scores, options, case.numbers("pf_ppo"))
    rows = found.group_ids
    for name in names:
        yield compare(f"row of {name}, and of its ids", getattr(found, name)[:, 0], rows.float(), 0)
    yield compare("row of tokens, and of its ids", found.inputs["tokens"][:, 0], rows, 0)
    yield compare("rows, and as many as before", float(len(found)), float(len(batch)), 0)
    if options.mode == "weight":
        counted = batch.mask.any(dim=1)
        before = torch.ones_like(scores) if batch.loss_weights is None else batch.loss_weights[:, 0]
        assert found.loss_weights is not None
        whole = replace(found, loss_weights=None)
        factors, _ = apply_pf_ppo(whole, scores, options, case.numbers("pf_ppo"))
        assert factors.loss_weights is not None
        yield compare("mean weight of the rows that count, and 1", factors.loss_weights[counted][:, 0].mean(), 1.0)
        expected = factors.loss_weights[:, 0] * before
        yield compare("weights, and those of before times these", found.loss_weights[:, 0], expected)
        yield compare("rows that are weighted, and all", rows, torch.arange(len(batch)), 0)


def dynamic_sampling(case: Case) -> Iterator[Difference]:
    first, again = _filled(case, 0.5), _filled(case, 0.5)
    yield compare("trajectories of two samplers with one seed", *_numbers(first, again), allowed=0)
    for groups, rounds in first:
        whole = [len({t.sample for t in group}) == len(group) == _size(case) for group in groups]
        alike = [len({t.prompt.index for t in group}) == 1 for group in groups]
        yield compare("groups that are whole, and all", float(sum(whole)), float(len(groups)), 0)
        yield compare("groups of one prompt, and all", float(sum(alike)), float(len(groups)), 0)
        yield compare("rounds beyond max_rounds", float(rounds > _options(case).max_rounds), 0.0, 0)
    for _, rounds in _filled(case, 0.0):  # no group ever differs
        yield compare(
            "rounds beyond max_rounds, where no group differs", float(rounds > _options(case).max_rounds), 0.0, 0
        )


def _filled(case: Case, share: float) -> list[tuple[list[Group], int]]:
    """Some steps of a sampler: the groups of each, and its rounds. `share` of the samples is right, at random."""
    size, numbers = _size(case), case.numbers("dynamic sampling")
    sampler = DynamicSampler(_options(case), GROUPS, size, size)
    found: list[tuple[list[Group], int]] = []
    for step in range(STEPS):
        rounds = 0

        def generate(number: int, step: int = step) -> Group:
            nonlocal rounds
            rounds += 1
            first = (step * _options(case).max_rounds + number) * GROUPS
            right = (torch.rand(GROUPS, size, generator=numbers) < share).float().tolist()
            return [_trajectory(first + g, s, right[g][s]) for g in range(GROUPS) for s in range(size)]

        try:
            rows, _ = sampler.fill(step, generate)
        except DataError:  # on_exhausted: error
            rows = []
        found.append(([rows[start : start + size] for start in range(0, len(rows), size)], rounds))
    return found


def _trajectory(index: int, sample: int, metric: float) -> Trajectory:
    return Trajectory(Prompt(index, "", "", (0,)), sample, (0,), (0.0,), "stop", 0, metric=metric)


def _numbers(*runs: list[tuple[list[Group], int]]) -> list[torch.Tensor]:
    """Each run as numbers: its rounds, prompts and samples."""
    found = []
    for run in runs:
        numbers = [float(rounds) for _, rounds in run]
        numbers += [
            float(x) for groups, _ in run for group in groups for t in group for x in (t.prompt.index, t.sample)
        ]
        found.append(torch.tensor(numbers))
    return found


def _size(case: Case) -> int:
    return min(case.algorithm.group_size, LARGEST_GROUP)


def _options(case: Case) -> DynamicSampling:
    assert case.algorithm.dynamic_sampling is not None
    return case.algorithm.dynamic_sampling


def _off(key: str, is_on: Callable[[Config], bool]) -> Callable[[Config], str | None]:
    return lambda config: None if is_on(config) else f"{key} is off"


def _adaptive(config: Config) -> str | None:
    if not config.algorithm.use_kl_in_reward:
        return "use_kl_in_reward is off"
    return None if config.algorithm.kl_ctrl.type == "adaptive" else "the coefficient is fixed"


PROPERTIES = [
    Property(
        "rollout mismatch",
        "weights: engines agree = 1; without bounds = ratios",
        mismatch,
        _off("rollout_is", lambda config: config.algorithm.rollout_is is not None),
    ),
    Property(
        "adaptive KL",
        "coefficient = its formula; saved and loaded = not",
        adaptive_kl,
        _adaptive,
    ),
    Property(
        "PF-PPO",
        "fields of a row: drawn or weighted = of that row",
        pf_ppo,
        _off("use_pf_ppo", lambda config: config.algorithm.use_pf_ppo),
    ),
    Property(
        "dynamic sampling",
        "groups = whole; rounds = max_rounds at most",
        dynamic_sampling,
        _off("dynamic_sampling", lambda config: config.algorithm.dynamic_sampling is not None),
    ),
]
