"""Loss, gradients and Adam of an optimizer step of a small policy as compiled loops for a CPU, without matrix products.

An embodied mini-batch has a few hundred rows. Two hundred tensor operations on them cost more than they compute. The
mathematics is that of losses.py, policy_losses.py and torch's AdamW, for every position active; a test compares them.
The policy is a diagonal Gaussian with free deviations, or categorical.
"""

from __future__ import annotations

import math

import numpy as np

from rl_platform.accel.compiling import IN_ORDER, Array, compiled_loops
from rl_platform.algorithms.policy_losses import LARGEST_RATIO, SMALLEST_RATIO
from rl_platform.config.schema.algorithm import Algorithm

LOG2_E = np.float32(math.log2(math.e))
LN2_HIGH = np.float32(0.693359375)  # few bits: its product with a small integer is exact
LN2_LOW = np.float32(math.log(2.0) - 0.693359375)
HALF_LOG_2_PI = 0.5 * math.log(2.0 * math.pi)
# Sums over positions, in the order of the loops' output; then the loss and the extrema of the ratio.
POLICY_SUMS = (
    "actor/ratio_mean",
    "actor/approx_kl",
    "actor/clip_frac",
    "actor/clip_frac_high",
    "actor/clip_frac_low",
    "actor/dual_clip_frac",
    "actor/approx_kl_k3",
)
POLICY_LOSS, RATIO_MIN, RATIO_MAX = 7, 8, 9
VALUE_SUMS = ("critic/predicted_values_mean", "critic/clip_frac", "critic/out_of_range_frac")
VALUE_LOSS = 3


def compiles(algorithm: Algorithm) -> bool:
    """Returns whether the loss of `algorithm` is one that is compiled: clipped surrogate, value loss and entropy
    bonus."""
    return (
        algorithm.policy_loss == "ppo_clip"
        and algorithm.loss_agg_func == "token-mean"
        and algorithm.old_log_probs != "current"
        and not algorithm.use_kl_loss
        and not algorithm.positive_nll_coef
    )


def policy_limits(algorithm: Algorithm) -> np.ndarray:
    """Returns the bounds of the ratio, for `clipped_surrogate`."""
    low, high = max(1.0 - algorithm.clip_ratio_low, SMALLEST_RATIO), min(1.0 + algorithm.clip_ratio_high, LARGEST_RATIO)
    return np.array([low, high, min(algorithm.clip_ratio_c or LARGEST_RATIO, LARGEST_RATIO)], dtype=np.float32)


def value_limits(algorithm: Algorithm) -> np.ndarray:
    """Clip, Huber's delta and the loss's scale, for `clipped_value`; infinite where there is no limit."""
    clip, delta = (math.inf if x is None else x for x in (algorithm.value_clip, algorithm.huber_delta))
    return np.array([clip, delta, algorithm.value_loss_scale], dtype=np.float32)


@compiled_loops()
def gaussian_log_probs(heads: Array, log_std: Array, actions: Array, noise: Array, log_probs: Array) -> None:
    """(heads [B,A+1], log_std [A], actions [B,A], out: noise [B,A+1], log-probs [B]). The first A of `heads` are means;
    the last column of `noise` is not touched."""
    rows, width = actions.shape
    precision = np.exp(-log_std)
    constant = np.float32(log_std.sum() + width * HALF_LOG_2_PI)
    for row in range(rows):
        square = np.float32(0.0)
        for column in range(width):
            drawn = (actions[row, column] - heads[row, column]) * precision[column]
            noise[row, column] = drawn
            square += drawn * drawn
        log_probs[row] = np.float32(-0.5) * square - constant


@compiled_loops()
def gaussian_gradient(log_std: Array, slopes: Array, gradient: Array, log_std_gradient: Array) -> None:
    """(log_std [A], slopes [B], in: noise, out: gradient of the means [B,A+1], out: gradient of log_std [A])."""
    precision = np.exp(-log_std)
    log_std_gradient[:] = 0.0
    for row in range(len(slopes)):
        slope = slopes[row]
        for column in range(len(log_std)):
            noise = gradient[row, column]
            log_std_gradient[column] += slope * (noise * noise - np.float32(1.0))
            gradient[row, column] = slope * noise * precision[column]


@compiled_loops(IN_ORDER)
def categorical_log_probs(heads: Array, choices: Array, every: Array, log_probs: Array, entropies: Array) -> None:
    """(heads [B,A+1], choices [B] int64, out: log-probs of every choice [B,A+1], of the one made [B], entropies [B]).
    The first A of `heads` are logits; the last column of `every` is not touched."""
    rows, width = heads.shape[0], heads.shape[1] - 1
    for row in range(rows):
        largest, total, entropy = heads[row, 0], np.float32(0.0), np.float32(0.0)
        for column in range(1, width):
            largest = max(largest, heads[row, column])
        for column in range(width):
            total += np.exp(heads[row, column] - largest)
        rest = np.log(total)
        for column in range(width):
            log_prob = (heads[row, column] - largest) - rest  # in this order: large logits would round it away
            every[row, column] = log_prob
            entropy -= np.exp(log_prob) * log_prob
        log_probs[row], entropies[row] = every[row, choices[row]], entropy


@compiled_loops()
def categorical_gradient(choices: Array, slopes: Array, entropies: Array, bonus: float, gradient: Array) -> None:
    """(choices, slopes and entropies [B], entropy bonus, in: log-probs of every choice, out: gradient of the logits
    [B,A+1])."""
    rows, width = gradient.shape[0], gradient.shape[1] - 1
    share, one = np.float32(bonus / rows), np.float32(1.0)
    for row in range(rows):
        for column in range(width):
            log_prob = gradient[row, column]
            probability = np.exp(log_prob)
            made = one if column == choices[row] else np.float32(0.0)
            # d log p_a / d x_j = [a = j] - p_j, and d H / d x_j = -p_j (log p_j + H)
            slope = share * probability * (log_prob + entropies[row])
            gradient[row, column] = slopes[row] * (made - probability) + slope


@compiled_loops()
def clipped_surrogate(
    log_probs: Array, old_log_probs: Array, advantages: Array, limits: Array, slopes: Array, sums: Array
) -> None:
    """Clipped surrogate of a mini-batch: (log-probs, old log-probs and advantages [B], limits, out: slopes [B],
    sums [10]). `slopes` is the gradient of log-probs, of the mean over positions."""
    rows = len(log_probs)
    low, high, dual = limits[0], limits[1], limits[2]
    smallest, largest, share = np.float32(SMALLEST_RATIO), np.float32(LARGEST_RATIO), np.float32(1.0 / rows)
    sums[:] = 0.0
    sums[8] = np.inf
    for row in range(rows):
        log_ratio = log_probs[row] - old_log_probs[row]
        ratio, cost = np.exp(log_ratio), -advantages[row]
        losing = cost > 0.0
        bounded = min(max(ratio, low), dual) if losing else min(max(ratio, smallest), high)
        loss = cost * bounded
        above, below = ratio > bounded, ratio < bounded
        slopes[row] = np.float32(0.0) if above or below else loss * share
        kept, drift = min(max(ratio, smallest), largest), min(log_ratio, np.float32(20.0))
        sums[0] += kept
        sums[1] -= log_ratio
        sums[3] += above and cost < 0.0
        sums[4] += below and losing
        sums[5] += above and losing
        sums[6] += math.expm1(drift) - drift
        sums[7] += loss
        sums[8] = min(sums[8], kept)
        sums[9] = max(sums[9], kept)
    sums[2] = sums[3] + sums[4]


@compiled_loops()
def clipped_value(heads: Array, old_values: Array, returns: Array, limits: Array, gradient: Array, sums: Array) -> None:
    """Value loss of a mini-batch: (heads [B,A+1], old values and returns [B], limits, out: gradient [B,A+1], sums [4]).
    The last of `heads` is the value."""
    rows, last = heads.shape[0], heads.shape[1] - 1
    clip, delta, scale = limits[0], limits[1], limits[2] / np.float32(rows)
    half = np.float32(0.5)
    sums[:] = 0.0
    for row in range(rows):
        value = heads[row, last]
        limited = min(max(value, old_values[row] - clip), old_values[row] + clip)
        error, limited_error = value - returns[row], limited - returns[row]
        clipped = abs(limited_error) > abs(error)
        error = limited_error if clipped else error
        size = abs(error)
        slope = error if size <= delta else math.copysign(delta, error)
        gradient[row, last] = np.float32(0.0) if clipped else slope * scale
        sums[0] += value
        sums[1] += clipped
        sums[2] += limited != value
        sums[3] += half * error * error if size <= delta else delta * (size - half * delta)


@compiled_loops(IN_ORDER)
def tanh(numbers: Array) -> None:
    """(numbers [B,H] float32): their tanh, in place, equal to 2e-7; a fifth of the time of a call for each."""
    half, one, two = np.float32(0.5), np.float32(1.0), np.float32(2.0)
    flat = numbers.reshape(-1)
    for i in range(flat.size):
        # tanh(x) = 1 - 2 / (e^2x + 1); e^y = 2^k e^z with k whole and |z| <= ln(2) / 2, and of e^z the series
        y = min(max(two * flat[i], np.float32(-20.0)), np.float32(20.0))
        y = flat[i] if flat[i] != flat[i] else y
        k = np.floor(y * LOG2_E + half)
        z = (y - k * LN2_HIGH) - k * LN2_LOW
        series = z * np.float32(1 / 5040) + np.float32(1 / 720)
        series = series * z + np.float32(1 / 120)
        series = series * z + np.float32(1 / 24)
        series = series * z + np.float32(1 / 6)
        series = (series * z + half) * z * z + z + one
        power = np.int32((np.int32(k) + np.int32(127)) << np.int32(23)).view(np.float32)
        flat[i] = one - two / (series * power + one)


@compiled_loops()
def tanh_gradient(gradient: Array, outputs: Array) -> None:
    """(gradient, outputs) both [B,H]: the gradient times 1 - outputs^2, in place."""
    one = np.float32(1.0)
    for row in range(gradient.shape[0]):
        for column in range(gradient.shape[1]):
            gradient[row, column] *= one - outputs[row, column] * outputs[row, column]


@compiled_loops()
def adam(
    parameters: Array,
    gradients: Array,
    first: Array,
    second: Array,
    step: float,
    rate: float,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    largest_norm: float,
) -> float:
    """(parameters, gradients, first and second moments [P], step from 1, learning rate, betas, eps, weight decay, the
    largest norm or infinity) -> the gradients' norm. The arrays are updated in place, unless the norm is not finite.

    AdamW (Loshchilov and Hutter 2019) as torch computes it, gradients clipped by their norm before.
    """
    square = 0.0
    for gradient in gradients:
        square += gradient * gradient
    norm = np.sqrt(square)
    if not np.isfinite(norm):
        return norm
    clip = np.float32(min(1.0, largest_norm / (norm + 1e-6)))
    kept, size = np.float32(1.0 - rate * decay), np.float32(rate / (1.0 - beta1**step))
    root = np.float32(1.0 / np.sqrt(1.0 - beta2**step))
    new1, new2, old2, small = np.float32(1.0 - beta1), np.float32(1.0 - beta2), np.float32(beta2), np.float32(eps)
    for index in range(parameters.size):
        gradient = gradients[index] * clip
        first[index] += (gradient - first[index]) * new1
        second[index] = second[index] * old2 + gradient * gradient * new2
        parameters[index] = parameters[index] * kept - size * first[index] / (np.sqrt(second[index]) * root + small)
    return norm
