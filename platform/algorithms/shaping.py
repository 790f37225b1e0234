"""From verified scores to the outcome rewards of responses: scaling, length shaping, whitening, in this order.

Placement on tokens and the KL penalty come afterwards (`rewards.py`). Correctness is read from the score or the
trajectory's metric before shaping, never from a shaped reward. Embodied rewards are not shaped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rl_platform.algorithms.statistics import SMALLEST_VARIANCE, WHITEN_EPSILON, masked_mean, masked_var
from rl_platform.config.schema.algorithm import Algorithm, RewardScaling

if TYPE_CHECKING:
    from rl_platform.algorithms.shapes import BoolB, FloatB, IntB


@dataclass(frozen=True)
class ShapedRewards:
    """The outcome rewards of a batch of responses.

    rewards [B] float32: one per response. sample_mask [B] bool: responses that are trained on. compared [B] bool:
    responses that the others of their group are compared to. metrics: for the log.
    """

    rewards: FloatB
    sample_mask: BoolB
    compared: BoolB
    metrics: dict[str, float]


@torch.no_grad()
def shape_rewards(
    scores: FloatB,
    scored: BoolB,
    lengths: IntB,
    truncated: BoolB,
    algorithm: Algorithm,
    longest_response: int,
    kept: BoolB | None = None,
    continues: BoolB | None = None,
) -> ShapedRewards:
    """Applies all keys of `algorithm` that change outcome rewards, in their fixed order.

    scores [B]: of the verifier. scored [B] bool: False where it gave none. lengths [B] int64: action tokens of all
    turns. truncated [B] bool: cut at the length limit. longest_response: `data.max_response_length`. kept [B] bool:
    selected by `sample_filter`. continues [B] bool: further rows of a response; metrics count it once, and each row is
    whitened, as it counts in the mean of its group. A response that `sample_filter` or `overlong.filter` drops keeps
    its reward, which still serves as a baseline for others unless `group_ignore_masked`.
    """
    rewards, counted = torch.where(scored, scores, 0.0).float(), scored
    metrics: dict[str, float] = {}
    overlong = algorithm.overlong
    number = torch.arange(len(scores)) if continues is None else (~continues).cumsum(0)  # of each row's response
    if algorithm.reward_scaling is not None:
        rewards, outside = scale_rewards(rewards, algorithm.reward_scaling)
        metrics["reward/out_of_range"] = float(len(number[outside & scored].unique()))
    if overlong.stop_properly_coef is not None:
        rewards = torch.where(truncated, overlong.stop_properly_coef * rewards, rewards)
    if overlong.buffer_length is not None:
        limit = overlong.max_length if overlong.max_length is not None else longest_response
        rewards = rewards - overlong_penalty(lengths, limit, overlong.buffer_length, overlong.penalty)
    if overlong.filter:
        counted = counted & ~truncated
    if kept is not None:
        counted = counted & kept
    if overlong.filter or kept is not None:
        metrics["reward/filtered"] = float(len(number[scored & ~counted].unique()))
    if algorithm.reward_whitening:
        rewards = whiten_rewards(rewards, counted)
    compared = counted if algorithm.group_ignore_masked else scored
    return ShapedRewards(torch.where(scored, rewards, 0.0), counted, compared, metrics)


def scale_rewards(rewards: FloatB, scaling: RewardScaling) -> tuple[FloatB, BoolB]:
    """Maps [source_min, source_max] linearly onto [target_min, target_max]; returns also which [B] were outside."""
    # R' = t_min + (clip(R, s_min, s_max) - s_min) / (s_max - s_min) (t_max - t_min)
    inside = rewards.clamp(scaling.source_min, scaling.source_max)
    share = (inside - scaling.source_min) / (scaling.source_max - scaling.source_min)
    return scaling.target_min + share * (scaling.target_max - scaling.target_min), inside != rewards


def overlong_penalty(lengths: IntB, max_length: int, buffer_length: int, penalty: float) -> FloatB:
    """Returns the penalty [B] to subtract: 0 up to max_length - buffer_length, then linear up to `penalty`.

    The soft overlong punishment of DAPO (Yu et al. 2025, eq. 13). Beyond `max_length` it stays at `penalty`.
    """
    # penalty clip((l - (L_max - L_buffer)) / L_buffer, 0, 1)
    excess = (lengths.float() - (max_length - buffer_length)) / buffer_length
    return excess.clamp(0.0, 1.0) * penalty


def whiten_rewards(rewards: FloatB, counted: BoolB) -> FloatB:
    """Returns mean + (R - mean) / sqrt(var + 1e-8), with mean and unbiased variance of the `counted` [B] rewards.

    The mean stays, so that rewards keep their sign. Rewards that are not counted are mapped by the same numbers.
    Rewards that are all equal have no scale and stay unchanged.
    """
    variance = masked_var(rewards, counted)
    if float(variance) < SMALLEST_VARIANCE:
        return rewards
    mean = masked_mean(rewards, counted)
    # mean + (R - mean) / sqrt(var + eps)
    return mean + (rewards - mean) * torch.rsqrt(variance + WHITEN_EPSILON)
