"""Seconds of the tensor functions of PPO on long rollouts, next to the plainest form of the same thing in torch.

Advantages: GAE of rows in which random positions are masked, next to a backward loop over positions with one set of
operations per step. Both get the same tensors, and every result is compared before it counts. They take turns in one
process, with the allocator that a run has (freed memory is kept). Memory is what the call adds to the process at its
peak, its results included, as a share of its inputs. Not covered: whitening, accelerators.

    python benchmarks/algorithms.py [--rows 4096] [--length 8192] [--density 0.5] [--rounds 3] [--quick] [--json FILE]
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable

import torch
from _common import machine, new_parser, print_verdict, write_json
from torch import Tensor

from rl_platform.algorithms.gae import gae
from rl_platform.runtime.cpu import keep_freed_memory

TARGET = 20.0  # times faster than the loop
TARGET_MEMORY = 3.0  # times the inputs
GAMMA, LAMBDA = 1.0, 0.95
Estimate = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def estimator(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return gae(rewards, values, mask, GAMMA, LAMBDA)


@torch.no_grad()
def loop(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The definition, from the last position to the first."""
    estimated = torch.zeros_like(rewards)
    following, carried = torch.zeros(len(rewards)), torch.zeros(len(rewards))
    zero = torch.zeros(())
    for t in reversed(range(rewards.shape[1])):
        active, value = mask[:, t], values[:, t]
        candidate = rewards[:, t] + GAMMA * following - value + GAMMA * LAMBDA * carried
        carried = torch.where(active, candidate, carried)
        following = torch.where(active, value, following)
        estimated[:, t] = torch.where(active, candidate, zero)
    return estimated, (estimated + values) * mask


def timed(estimate: Estimate, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[float, tuple[Tensor, Tensor]]:
    began = time.perf_counter()
    found = estimate(*inputs)
    return time.perf_counter() - began, found


def check(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> None:
    """In place, as there are gigabytes of it."""
    for mine, plain in zip(ours, theirs, strict=True):
        largest = float(plain.abs().amax())
        if not float(plain.sub_(mine).abs_().amax()) <= 1e-5 * largest:
            raise SystemExit("the results differ: the timings mean nothing")


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure_advantages(rows: int, length: int, density: float, rounds: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(rows, length, generator=generator) for _ in range(2))
    mask = torch.empty(rows, length, dtype=torch.bool).bernoulli_(density, generator=generator)
    inputs = (rewards, values, mask)
    before = peak_bytes()
    estimator(*inputs)  # also the warm-up, of the allocator too
    memory = (peak_bytes() - before) / sum(tensor.nbytes for tensor in inputs)
    seconds: dict[str, list[float]] = {"estimator": [], "loop": []}
    for _ in range(rounds):
        ours, found = timed(estimator, inputs)
        plain, expected = timed(loop, inputs)
        check(found, expected)
        del found, expected
        seconds["estimator"].append(ours)
        seconds["loop"].append(plain)
        print(f"  estimator {ours:.3f} s, loop {plain:.2f} s")
    ratios = [plain / ours for ours, plain in zip(seconds["estimator"], seconds["loop"], strict=True)]
    print_verdict("GAE, times as fast as the loop", ratios, TARGET)
    print(f"memory, times the inputs: {memory:.2f}; target below {TARGET_MEMORY:g}")
    return {"seconds": seconds, "ratios": ratios, "memory": memory}


def main() -> None:
    parser = new_parser(__doc__, rounds=3)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--density", type=float, default=0.5, help="share of active positions")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.length, options.rounds = 64, 1024, 1
    if options.threads:
        torch.set_num_threads(options.threads)
    keep_freed_memory()
    found = {"machine": machine(["torch"])}
    print(f"advantages of {options.rows} sequences x {options.length} tokens, {options.density:.0%} active")
    found["advantages"] = measure_advantages(options.rows, options.length, options.density, options.rounds)
    write_json(options.json, found)


if __name__ == "__main__":
    main()
