"""Credit: the reward of an action and the value of its state count for that action, and not for later ones.

An estimator that shifts its results by a position breaks this. A changed reward may give a factor and a constant to the
whole row: sums over responses, baselines of groups and whitening change all positions alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from rl_platform.algorithms.advantages import estimator
from rl_platform.config.schema import Config
from rl_platform.config.schema.algorithm import Algorithm
from rl_platform.launch.check.property import PropertyDifference, compare
from rl_platform.launch.check.samples import CheckedConfig
from rl_platform.records import RolloutBatch

CHANGE = 3.0  # of a reward or a value; both have deviations around 1
NONE = 1e-4  # of the largest change in a row: less counts as no change
COMPARED = 3  # positions, at least, on which a factor and a constant are fitted


def not_asked(config: Config) -> str | None:
    """Returns why the property is not checked; None: it is."""
    return {
        "distillation": "adv_type distillation reads no rewards",
        "optimal_token_baseline": "the last tokens of the longest response have no others to be compared with",
    }.get(config.algorithm.adv_type)


def credit(case: CheckedConfig) -> Iterator[PropertyDifference]:
    """Changes single rewards and values, and compares the changes of the estimates to the assignment of credit."""
    batch = case.rollout
    known = _estimates(batch, case.algorithm)
    for field in ("rewards", "values"):
        numbers = getattr(batch, field)
        if numbers is None:
            continue
        for row, columns in enumerate(mask.nonzero().flatten() for mask in batch.value_positions):
            for index in sorted({0, 1, len(columns) // 2, len(columns) - 1} & set(range(len(columns)))):
                changed = numbers.clone()
                changed[row, columns[index]] += CHANGE
                after = _estimates(replace(batch, **{field: changed}), case.algorithm)
                first = _first_of_episode(batch, row, columns[: index + 1])
                for name, before in known.items():
                    change = (after[name] - before)[row, columns].double()
                    if not change.any():  # such as returns, which need not depend on a value
                        continue
                    what = f"{name}, {field} changed at {[row, int(columns[index])]}"
                    if index > first and not (field == "values" and name == "returns"):
                        yield _own(what, change, index)
                    for others in (range(index + 1, len(columns)), range(first)):
                        if len(others) >= COMPARED:
                            yield _elsewhere(what, change, before[row, columns].double(), others)


def _estimates(batch: RolloutBatch, algorithm: Algorithm) -> dict[str, Tensor]:
    advantages, returns = estimator(algorithm.adv_type)(batch, algorithm)
    estimates = {"advantages": advantages, "returns": returns}
    return {name: tensor.expand(batch.mask.shape) for name, tensor in estimates.items() if tensor is not None}


def _first_of_episode(batch: RolloutBatch, row: int, columns: Tensor) -> int:
    """Returns the index among `columns` of the first action in the episode of the last one."""
    if batch.ends is None:
        return 0
    ended = batch.ends[row, columns[:-1]].nonzero().flatten()
    return int(ended[-1]) + 1 if len(ended) else 0


def _own(what: str, change: Tensor, index: int) -> PropertyDifference:
    """Compares whether the action before the changed one is affected, and whether the changed one is."""
    small = NONE * float(change.abs().max())
    affected = [float(change[at].abs() > small) for at in (index - 1, index)]
    return compare(f"{what}: the action before is affected (1) and its own is not (0)", max(affected), affected[1], 0)


def _elsewhere(what: str, change: Tensor, before: Tensor, others: range) -> PropertyDifference:
    """Compares the change at `others` with the nearest factor and constant for all of them."""
    at = torch.tensor(others)
    inputs = torch.stack([before[at], torch.ones(len(at), dtype=before.dtype)], dim=1)
    fitted = inputs @ torch.linalg.lstsq(inputs, change[at, None], driver="gelsd").solution
    place = "later actions" if others.start else "an earlier episode"
    return compare(f"{what}: change at {place}", change[at], fitted[:, 0], NONE, scale=float(change.abs().max()))
