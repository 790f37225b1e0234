"""The running statistics of envs/embodied/normalize.py as compiled loops, with the same signatures.

Each is called after every step with few numbers, for which array operations take ten times as long.
"""

from __future__ import annotations

import numpy as np

from rl_platform.accel.compiling import IN_ORDER, Array, compiled_loops

_EPSILON = 1e-8


@compiled_loops(IN_ORDER)
def update_moments(batch: Array, mean: Array, variance: Array, count: int, clip: float, normalized: Array) -> None:
    """(batch [N,D], mean and variance [D] of `count` rows, count, clip, out: the first K rows normalised [K,D]):
    mean and variance are updated in place before that."""
    rows, width = batch.shape
    total = count + rows
    own_mean, squares = np.zeros(width), np.zeros(width)
    for row in range(rows):
        for column in range(width):
            own_mean[column] += batch[row, column]
    own_mean /= rows
    for row in range(rows):
        for column in range(width):
            distance = batch[row, column] - own_mean[column]
            squares[column] += distance * distance
    for column in range(width):
        delta = own_mean[column] - mean[column]
        # M2 = M2_a + M2_b + delta^2 n_a n_b / n;  variance = M2 / n
        between = delta * delta * (count * (rows / total))
        variance[column] = (variance[column] * count + squares[column] + between) / total
        mean[column] += delta * (rows / total)
    scale = 1.0 / np.sqrt(variance + _EPSILON)
    for row in range(len(normalized)):
        for column in range(width):
            normalized[row, column] = min(max((batch[row, column] - mean[column]) * scale[column], -clip), clip)


@compiled_loops(IN_ORDER)
def normalize_rows(rows: Array, mean: Array, variance: Array, clip: float, normalized: Array) -> None:
    """(rows [N,D], mean [D], variance [D], clip, out: [N,D] float32)."""
    scale = 1.0 / np.sqrt(variance + _EPSILON)
    for row in range(rows.shape[0]):
        for column in range(rows.shape[1]):
            normalized[row, column] = min(max((rows[row, column] - mean[column]) * scale[column], -clip), clip)


@compiled_loops(IN_ORDER)
def normalize_rewards(
    rewards: Array,
    ended: Array,
    gamma: float,
    clip: float,
    returns: Array,
    mean: Array,
    variance: Array,
    count: int,
    normalized: Array,
) -> None:
    """(rewards and ended [N], gamma, clip, discounted returns [N], mean and variance [] of `count` returns, count,
    out: [N] float32); returns, mean and variance are updated in place."""
    rows, own_mean, squares = len(rewards), 0.0, 0.0
    for row in range(rows):
        returns[row] = returns[row] * gamma + rewards[row]  # R_t = gamma R_{t-1} + r_t, from 0 in every episode
        own_mean += returns[row]
    own_mean /= rows
    for row in range(rows):
        squares += (returns[row] - own_mean) ** 2
    total, delta = count + rows, own_mean - mean[()]  # the moments merge as in `_update_moments`
    variance[()] = (variance[()] * count + squares + delta * delta * (count * (rows / total))) / total
    mean[()] += delta * (rows / total)
    scale = 1.0 / np.sqrt(variance[()] + _EPSILON)
    for row in range(rows):
        normalized[row] = min(max(rewards[row] * scale, -clip), clip)
        if ended[row]:
            returns[row] = 0.0
