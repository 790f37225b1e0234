"""Forward pass and sampling of a small policy as compiled loops for a CPU.

For a few environments this takes microseconds; a dozen tensor operations would cost more than they compute. Every row
goes through the same instructions in the same order, so an action does not depend on the other rows of the batch. The
functions equal those of models/policy.py up to rounding; a test compares them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from rl_platform.accel.compiled_ppo import HALF_LOG_2_PI
from rl_platform.accel.compiling import IN_ORDER, compiled_loops

BLOCK = 4  # rows that share a pass over the weights


@cache
def layer() -> Callable[..., None]:
    """(inputs [N,I], weights [I,O], bias [O], out: outputs [N,O], scratch [BLOCK,O]), all float32."""
    return compiled_loops(_layer, IN_ORDER)


@cache
def gaussian_choice() -> Callable[..., None]:
    """(means [N,A], log_std [A], noise [N,A], out: actions [N,A], log_probs [N])."""
    return compiled_loops(_gaussian_choice, IN_ORDER)


@cache
def categorical_choice() -> Callable[..., None]:
    """(logits [N,A], races [N,A], out: choices [N] int64, log_probs [N]): winners of exponential races, the argmax of
    p / race, which is distributed as p; races of 1 give the most likely one."""
    return compiled_loops(_categorical_choice, IN_ORDER)


def _layer(inputs: Any, weights: Any, bias: Any, outputs: Any, scratch: Any) -> None:
    rows, width = outputs.shape
    a, b, c, d = scratch[0], scratch[1], scratch[2], scratch[3]
    for first in range(0, rows, BLOCK):
        last = rows - 1  # replaces rows beyond the end, so that all rows use the same instructions
        p, q = inputs[first], inputs[min(first + 1, last)]
        r, s = inputs[min(first + 2, last)], inputs[min(first + 3, last)]
        for j in range(width):
            a[j] = b[j] = c[j] = d[j] = bias[j]
        for i in range(len(weights)):
            line = weights[i]
            for j in range(width):
                weight = line[j]
                a[j] += p[i] * weight
                b[j] += q[i] * weight
                c[j] += r[i] * weight
                d[j] += s[i] * weight
        count = min(BLOCK, rows - first)
        outputs[first : first + count] = scratch[:count]


def _gaussian_choice(means: Any, log_std: Any, noise: Any, actions: Any, log_probs: Any) -> None:
    rows, width = means.shape
    deviations = np.exp(log_std)
    # log N(a; mu, sigma) = -sum_i (noise_i^2 / 2 + log sigma_i + log sqrt(2 pi))
    constant = np.float32(log_std.sum() + width * HALF_LOG_2_PI)
    for row in range(rows):
        square = np.float32(0.0)
        for column in range(width):
            drawn = noise[row, column]
            actions[row, column] = means[row, column] + drawn * deviations[column]
            square += drawn * drawn
        log_probs[row] = np.float32(-0.5) * square - constant


def _categorical_choice(logits: Any, races: Any, choices: Any, log_probs: Any) -> None:
    rows, width = logits.shape
    for row in range(rows):
        largest = logits[row, 0]
        for column in range(1, width):
            largest = max(largest, logits[row, column])
        total, best, chosen = np.float32(0.0), -np.float32(np.inf), 0
        for column in range(width):
            total += np.exp(logits[row, column] - largest)
            score = logits[row, column] - np.log(races[row, column])
            if score > best:
                best, chosen = score, column
        choices[row] = chosen
        log_probs[row] = logits[row, chosen] - largest - np.log(total)
