"""Positions whose covariance of log-prob and advantage is large: they drive the entropy down (Cui et al. 2025).

Chosen on a whole mini-batch before it is split, on every rank alike, so that the choice does not depend on
micro-batches or ranks. `losses.py` treats these positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_platform.config.schema.algorithm import Algorithm
from rl_platform.records import RolloutBatch

if TYPE_CHECKING:
    from rl_platform.algorithms.shapes import BoolBT


@torch.no_grad()
def covariant_positions(batch: RolloutBatch, algorithm: Algorithm, draw: torch.Generator) -> BoolBT:
    """Returns [B,T] bool of a mini-batch with advantages and log_probs (of the policy before the update).

    Of n active positions max(1, floor(fraction n)) are chosen. kl_cov chooses those of the largest covariances.
    clip_cov draws among those whose covariance is inside (low, high), and chooses all of them if there are fewer. "The
    Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", arXiv 2505.22617, eq. 10 to 13.
    """
    assert batch.advantages is not None
    assert batch.log_probs is not None
    options, mask = algorithm.covariance, batch.mask
    chosen = torch.zeros_like(mask)
    log_probs, advantages = batch.log_probs[mask].double(), batch.advantages[mask].double()
    if not len(log_probs):
        return chosen
    # Cov_t = (log pi_t - mean log pi) (A_t - mean A)
    covariances = (log_probs - log_probs.mean()) * (advantages - advantages.mean())
    count = max(1, int(options.fraction * len(covariances)))
    if algorithm.policy_loss == "kl_cov":
        places = covariances.argsort(descending=True, stable=True)[:count]
    else:
        inside = ((covariances > options.low) & (covariances < options.high)).nonzero()[:, 0]
        places = inside[torch.randperm(len(inside), generator=draw)[:count]]
    flags = torch.zeros_like(covariances, dtype=torch.bool)
    flags[places] = True
    chosen[mask] = flags
    return chosen
