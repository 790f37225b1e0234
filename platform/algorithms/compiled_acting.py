"""Choosing actions with a small policy, as compiled loops for a CPU: a step of a few environments is some microseconds.

As tensor operations it is some dozen calls that cost more than they compute. Every row goes through the same
instructions in the same order, so what is chosen for an observation does not depend on which others it comes with. The
functions are those of models/policy.py, equal up to rounding; tests hold the two together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from rl_platform.algorithms.compiled_ppo import HALF_LOG_2_PI
from rl_platform.algorithms.compiling import IN_ORDER, compiled_loops

BLOCK = 4  # rows that share a pass over the weights
LOG2_E = np.float32(math.log2(math.e))
LN2_HIGH = np.float32(0.693359375)  # few bits: its product with a small integer is exact
LN2_LOW = np.float32(math.log(2.0) - 0.693359375)


@cache
def perceptron() -> Callable[..., None]:
    """(parameters, widths, inputs [N,widths[0]], outputs [N,widths[-1]], scratch [2,BLOCK,max(widths)]), all float32
    but `widths` int64: layers with tanh between them. `parameters`: of each layer its weights [in,out], then its bias.
    """
    return compiled_loops(_perceptron, IN_ORDER)


@cache
def gaussian_choice() -> Callable[..., None]:
    """(means [N,A], log_std [A], noise [N,A], out: actions [N,A], log_probs [N])."""
    return compiled_loops(_gaussian_choice, IN_ORDER)


@cache
def categorical_choice() -> Callable[..., None]:
    """(logits [N,A], races [N,A], out: choices [N] int64, log_probs [N]): winners of exponential races, the argmax of
    p / race, which is distributed as p; races of 1 give the most likely one."""
    return compiled_loops(_categorical_choice, IN_ORDER)


def _perceptron(parameters: Any, widths: Any, inputs: Any, outputs: Any, scratch: Any) -> None:
    rows, last = inputs.shape[0], len(widths) - 2
    half, one, two = np.float32(0.5), np.float32(1.0), np.float32(2.0)
    for first in range(0, rows, BLOCK):
        count = min(BLOCK, rows - first)
        before, after = scratch[0], scratch[1]
        for row in range(BLOCK):  # rows that are not there repeat the first: all go the same way
            before[row, : widths[0]] = inputs[first + (row if row < count else 0)]
        offset = 0
        for layer in range(last + 1):
            width = widths[layer + 1]
            bias = parameters[offset + widths[layer] * width :][:width]
            a, b, c, d = after[0], after[1], after[2], after[3]
            for j in range(width):
                a[j] = b[j] = c[j] = d[j] = bias[j]
            for i in range(widths[layer]):
                weights = parameters[offset + i * width :][:width]
                p, q, r, s = before[0, i], before[1, i], before[2, i], before[3, i]
                for j in range(width):
                    weight = weights[j]
                    a[j] += p * weight
                    b[j] += q * weight
                    c[j] += r * weight
                    d[j] += s * weight
            offset += (widths[layer] + 1) * width
            if layer < last:
                for row in range(BLOCK):
                    line = after[row]
                    for j in range(width):
                        # tanh(x) = 1 - 2 / (e^2x + 1); e^y = 2^k e^r with k whole and |r| <= ln(2) / 2
                        y = min(max(two * line[j], np.float32(-20.0)), np.float32(20.0))
                        y = line[j] if y != y else y
                        k = np.floor(y * LOG2_E + half)
                        z = (y - k * LN2_HIGH) - k * LN2_LOW
                        series = z * np.float32(1 / 5040) + np.float32(1 / 720)
                        series = series * z + np.float32(1 / 120)
                        series = series * z + np.float32(1 / 24)
                        series = series * z + np.float32(1 / 6)
                        series = (series * z + half) * z * z + z + one
                        power = np.int32((np.int32(k) + np.int32(127)) << np.int32(23)).view(np.float32)
                        line[j] = one - two / (series * power + one)
            before, after = after, before
        outputs[first : first + count] = before[:count, : widths[last + 1]]


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
