"""Batch layout is not algorithm: micro-batches, ranks, observations, padding, order of rows, balancing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rl_platform.algorithms.losses import ModelOutputs
from rl_platform.algorithms.schedule import mini_batches
from rl_platform.config.schema import Config
from rl_platform.engines.training.base import MicroBatches
from rl_platform.engines.training.sharing import shares
from rl_platform.launch.check.property import SMALLEST_SCALE, Property, PropertyDifference, compare
from rl_platform.launch.check.samples import (
    CheckedConfig,
    LossFunction,
    estimated,
    wide,
    wide_outputs,
    widened,
)
from rl_platform.records import RolloutBatch

PADDING = 37
HIDDEN_SIZE = 64  # for the cost of a row, by which rows are balanced
LOSS_SCALE = 0.1  # the terms of a loss are around 1, and may cancel
_ESTIMATES = ("advantages", "returns", "loss_weights")


def micro_batches(case: CheckedConfig) -> Iterator[PropertyDifference]:
    """Compares gradients and metrics of micro-batches of 1 and 3 rows to those of the whole mini-batch."""
    rows = range(len(case.batch))
    for name, loss in case.losses.items():
        whole = _of_parts(case, loss, [rows])
        for size in (1, 3):
            parts = [rows[start : start + size] for start in range(0, len(rows), size)]
            yield from _all(f"{name}, parts of {size} beside the whole", _of_parts(case, loss, [*parts, []]), whole)


def ranks(case: CheckedConfig) -> Iterator[PropertyDifference]:
    """Compares gradients and metrics of 2 and 4 ranks to those of one."""
    for name, loss in case.losses.items():
        whole = _of_parts(case, loss, [range(len(case.batch))])
        for world_size in (2, 4):
            parts = [part for plan in _plans(case.batch, 2, world_size) for part in plan]
            yield from _all(f"{name}, {world_size} ranks beside one", _of_parts(case, loss, parts), whole)


def observation_tokens(case: CheckedConfig) -> Iterator[PropertyDifference]:
    """Compares a batch to the same batch with observation tokens between its actions."""
    width = case.rollout.action_mask.shape[1]
    columns = torch.randperm(width + PADDING, generator=case.numbers("gaps"))[:width].sort().values
    yield from _wider(case, "observations in between", columns, width + PADDING, torch.nan)


def padding(case: CheckedConfig) -> Iterator[PropertyDifference]:
    """Compares a batch to the same batch with more padding on the right and on the left."""
    width = case.rollout.action_mask.shape[1]
    for side, start in (("right", 0), ("left", PADDING)):
        what = f"{PADDING} more on the {side}"
        yield from _wider(case, what, torch.arange(width) + start, width + PADDING, 0.0)


def order(case: CheckedConfig) -> Iterator[PropertyDifference]:
    """Compares a batch to the same batch with its rows in another order."""
    rollout = case.rollout
    shuffle = torch.randperm(len(rollout), generator=case.numbers("order"))
    moved = estimated(rollout.select(shuffle), case.algorithm)
    back = shuffle.argsort()
    if case.embodied:  # a row of the rollout is as many choices
        steps = rollout.inputs["observations"].shape[1]
        back = (back[:, None] * steps + torch.arange(steps)).flatten()
    yield from _same_estimates("rows shuffled", moved.select(back), case.batch)
    turned = torch.arange(len(case.batch)).flip(0)
    outputs = _rows(case.outputs, turned)
    for name, loss in case.losses.items():
        plain = _of_parts(case, loss, [range(len(case.batch))])
        shuffled = case.loss_and_gradients(loss, outputs, case.batch.select(turned), [range(len(turned))])
        restored = {key: tensor[turned] if tensor.dim() else tensor for key, tensor in shuffled.items()}
        yield from _all(f"{name}, rows shuffled", restored, plain)


def balancing(case: CheckedConfig) -> Iterator[PropertyDifference]:
    """Checks that an epoch has every row once, and that the ranks share the rows of each mini-batch."""
    rows, size = len(case.batch), len(case.batch) // 2
    tagged = replace(case.batch, group_ids=torch.arange(rows))
    seen = mini_batches(tagged, size, case.numbers("balancing")) if size * 2 == rows else [tagged]
    everyone = torch.cat([mini_batch.group_ids for mini_batch in seen])
    yield compare("rows of an epoch", everyone.sort().values, torch.arange(rows), 0)
    for mini_batch in seen:
        whole = torch.arange(len(mini_batch))
        for world_size in (1, 2, 4):
            plans = _plans(mini_batch, 3, world_size)
            dealt = torch.tensor([row for plan in plans for part in plan for row in part])
            yield compare(f"rows of a mini-batch on {world_size} ranks", dealt.sort().values, whole, 0)
            counts = [sum(len(part) for part in plan) for plan in plans]
            yield compare(f"a row of one rank more, of {world_size}", float(max(counts) - min(counts) > 1), 0.0, 0)


def _plans(batch: RolloutBatch, rows: int, world_size: int) -> list[list[Sequence[int]]]:
    """Returns the micro-batches of every rank, as the training engine shares them."""
    return [shares(batch, MicroBatches(rows), rank, world_size, HIDDEN_SIZE) for rank in range(world_size)]


def _of_parts(case: CheckedConfig, loss: LossFunction, parts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    return case.loss_and_gradients(loss, case.outputs, case.batch, parts)


def _wider(case: CheckedConfig, what: str, columns: Tensor, width: int, fill: float) -> Iterator[PropertyDifference]:
    """Compares estimates and losses of the rollout with those of a wider one that holds it at `columns`."""
    wider = estimated(widened(case.rollout, columns, width, fill), case.algorithm)
    narrow = {name: _columns(getattr(wider, name), columns) for name in _ESTIMATES}
    narrowed = case.batch.with_fields(narrow)
    yield from _same_estimates(what, narrowed, case.batch)
    outputs, rows = wide_outputs(case.outputs, columns, width, fill), [range(len(case.batch))]
    batch = widened(case.batch, columns, width, fill)
    for name, loss in case.losses.items():
        widened_loss = case.loss_and_gradients(loss, outputs, batch, rows)
        plain = {key: wide(tensor, columns, width, 0.0) for key, tensor in _of_parts(case, loss, rows).items()}
        yield from _all(f"{name}, {what}", widened_loss, plain)


def _columns(tensor: Tensor | None, columns: Tensor) -> Tensor | None:
    return None if tensor is None else tensor[:, columns]


def _same_estimates(what: str, actual: RolloutBatch, expected: RolloutBatch) -> Iterator[PropertyDifference]:
    for name in _ESTIMATES:
        one, other = getattr(actual, name), getattr(expected, name)
        if other is not None:
            yield compare(f"{name}, {what}", one, other)


def _all(what: str, actual: dict[str, Tensor], expected: dict[str, Tensor]) -> Iterator[PropertyDifference]:
    for name in expected:
        scale = LOSS_SCALE if name == "loss" else SMALLEST_SCALE
        yield compare(f"{name} of {what}", actual.get(name, torch.tensor(torch.nan)), expected[name], scale=scale)


def _rows(outputs: ModelOutputs, rows: Tensor) -> ModelOutputs:
    return ModelOutputs(**{name: tensor[rows] for name, tensor in vars(outputs).items() if tensor is not None})


def _transitions(config: Config) -> str | None:
    if config.runner.task_type == "embodied":
        return "embodied rows are single transitions"
    return None


PROPERTIES = [
    Property("micro-batch size", "loss, gradients: 1 or 3 rows at a time = all at once", micro_batches),
    Property("number of ranks", "loss, gradients: on 2 or 4 ranks = on one", ranks),
    Property(
        "observation tokens", "advantages, losses: with NaN in between = without", observation_tokens, _transitions
    ),
    Property("padding", "advantages, losses: with 37 more columns = without", padding, _transitions),
    Property("order of rows", "advantages, losses: of shuffled rows = as they came", order),
    Property("balancing", "rows of a mini-batch: on 2 or 4 ranks = on one", balancing),
]
