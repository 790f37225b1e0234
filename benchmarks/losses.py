"""Time of the actor's and the critic's loss with backward, next to the bare minimum of their formulas in torch.

The same tensors on both sides, responses of random length in [rows, positions]; results are compared before they are
timed. Ours also counts the metrics of the log (ratios, clip fractions, losses) and guards masked positions against NaN;
the bare formula does neither. The sides take turns, and ratios are taken turn by turn. Not covered: the model.

    python benchmarks/losses.py [--rows 64] [--positions 1024] [--rounds 200] [--threads N] [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from _common import machine, new_parser, write_json
from torch import Tensor

from rl_platform.algorithms.aggregation import Denominators
from rl_platform.algorithms.losses import ModelOutputs, actor_loss, critic_loss
from rl_platform.config.schema.algorithm import Algorithm
from rl_platform.records import RolloutBatch
from rl_platform.runtime.cpu import keep_freed_memory

TARGET = 1.2  # times the bare formula
ALGORITHM = Algorithm(clip_ratio_high=0.28, value_clip=0.2)
Side = Callable[[Tensor], Tensor]


def main() -> None:
    parser = new_parser(__doc__, rounds=200)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--positions", type=int, default=1024)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.quick:
        options.rounds = 5
    keep_freed_memory()
    content = {"machine": machine(["torch"]), "options": vars(options), "seconds": measure_losses(options)}
    write_json(options.json, content)


def measure_losses(options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Seconds of every turn, by loss and side; printed with their ratio."""
    batch, outputs = random_case(options.rows, options.positions)
    found = {}
    for name, (bare, ours, start) in sides(batch, outputs).items():
        torch.testing.assert_close(gradient(bare, start), gradient(ours, start))
        seconds: dict[str, list[float]] = {"bare": [], "ours": []}
        for turn in range(options.warm_up + options.rounds):
            for side, function in (("bare", bare), ("ours", ours)):
                began = time.perf_counter()
                gradient(function, start)
                if turn >= options.warm_up:
                    seconds[side].append(time.perf_counter() - began)
        ratio = statistics.median(b / a for a, b in zip(seconds["bare"], seconds["ours"], strict=True))
        bare_us, ours_us = (statistics.median(seconds[side]) * 1e6 for side in ("bare", "ours"))
        verdict = "met" if ratio <= TARGET else "missed"
        print(f"{name:<30} ours {ours_us:,.0f} us, bare {bare_us:,.0f} us: {ratio:.2f}; target {TARGET:g}: {verdict}")
        found[name] = seconds
    return found


def random_case(rows: int, positions: int) -> tuple[RolloutBatch, ModelOutputs]:
    numbers = torch.Generator().manual_seed(0)

    def noise(scale: float = 1.0) -> Tensor:
        return scale * torch.randn(rows, positions, generator=numbers)

    lengths = torch.randint(1, positions + 1, (rows, 1), generator=numbers)
    mask = torch.arange(positions) < lengths
    old, values = -noise().abs(), noise()
    batch = RolloutBatch(
        inputs={},
        action_mask=mask,
        sample_mask=torch.ones(rows, dtype=torch.bool),
        group_ids=torch.arange(rows),
        rewards=torch.zeros(rows, positions),
        rollout_log_probs=old,
        log_probs=old,
        values=values,
        advantages=noise(),
        returns=values + noise(),
    )
    return batch, ModelOutputs(log_probs=old + noise(0.1), values=values + noise(0.1))


def sides(batch: RolloutBatch, outputs: ModelOutputs) -> dict[str, tuple[Side, Side, Tensor]]:
    """Loss -> (bare formula, ours, what it is a function of)."""
    assert outputs.log_probs is not None
    assert outputs.values is not None
    assert batch.log_probs is not None
    assert batch.advantages is not None
    assert batch.values is not None
    assert batch.returns is not None
    mask, denominators = batch.mask, Denominators.of(batch.mask, 1)
    old, advantages, old_values, returns = batch.log_probs, batch.advantages, batch.values, batch.returns

    def bare_actor(log_probs: Tensor) -> Tensor:
        ratio = (log_probs - old).exp()
        loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.28))
        return (loss * mask).sum() / mask.sum()

    def bare_critic(values: Tensor) -> Tensor:
        clipped = old_values + (values - old_values).clamp(-0.2, 0.2)
        loss = 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square())
        return (loss * mask).sum() / mask.sum()

    def our_actor(log_probs: Tensor) -> Tensor:
        return actor_loss(ModelOutputs(log_probs=log_probs), batch, denominators, ALGORITHM)[0]

    def our_critic(values: Tensor) -> Tensor:
        return critic_loss(ModelOutputs(values=values), batch, denominators, ALGORITHM)[0]

    return {
        "actor_loss and backward": (bare_actor, our_actor, outputs.log_probs),
        "critic_loss and backward": (bare_critic, our_critic, outputs.values),
    }


def gradient(loss: Side, start: Tensor) -> Tensor:
    variable = start.detach().requires_grad_()
    loss(variable).backward()
    assert variable.grad is not None
    return variable.grad


if __name__ == "__main__":
    main()
