"""From per-token losses to one number, exactly the same for every split into micro-batches and ranks.

Denominators are counted on the whole mini-batch (all micro-batches, all ranks of one optimizer step) before it is
split; each part divides its sum by them and the mini-batch's loss is the sum over the parts. Backends that average
gradients over ranks undo that themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_platform.config.schema.algorithm import LossAggregation

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Shaped

    from rl_platform.algorithms.shapes import BoolB, BoolBT, FloatBT


@dataclass(frozen=True)
class Denominators:
    """The denominators of the losses of one mini-batch.

    tokens: active positions. sequences: rows with at least one, or all rows (`nominal`). horizon: the constant H of
    seq-mean-token-sum-norm, never the padded width. full: every position is active, so the losses skip all masking.
    correct_tokens: active positions of correct rows. values, entropy: denominators of value loss and entropy, where
    their level is not that of the log-probs (action_levels.py).
    """

    tokens: float
    sequences: float
    horizon: float
    full: bool = False
    correct_tokens: float = 0.0
    values: Denominators | None = None
    entropy: Denominators | None = None

    @classmethod
    def of(cls, mask: BoolBT, horizon: float, correct: BoolB | None = None, *, nominal: bool = False) -> Denominators:
        """Returns the denominators, counted on the mask [B,T] bool of a whole mini-batch, and on its `correct` [B] bool
        where rows are judged.

        `nominal`: rows without an active position count as sequences too.
        """
        tokens = int(mask.sum())
        full = tokens == mask.numel()
        sequences = len(mask) if full or nominal else int(mask.any(dim=1).sum())
        correct_tokens = 0 if correct is None else int((mask & correct[:, None]).sum())
        return cls(float(tokens), float(sequences), float(horizon), full, float(correct_tokens))


def aggregate(
    per_token_loss: FloatBT,
    mask: BoolBT | None,
    denominators: Denominators,
    mode: LossAggregation,
    row_denominators: Shaped[Tensor, " batch"] | None = None,
    zero_outside: bool = False,
) -> Float[Tensor, ""]:
    """Returns the share of these positions [B,T] in the mini-batch's loss, as a scalar with gradient.

    `mask` None: every position counts. `row_denominators` [B]: those of the row means; None: active positions of
    each row. `zero_outside`: the given losses and their gradients are already 0 outside the mask. Without an
    active position the result is 0 that still has a graph, so that every rank runs backward.
    """
    loss = per_token_loss if zero_outside else select(per_token_loss, mask)
    tokens, sequences = max(denominators.tokens, 1.0), max(denominators.sequences, 1.0)
    match mode:
        case "token-mean":  # sum_i sum_t L_it / sum_i |o_i|  (DAPO, Yu et al. 2025)
            return loss.sum() / tokens
        case "seq-mean-token-sum":  # 1/N sum_i sum_t L_it
            return loss.sum() / sequences
        case "seq-mean-token-mean":  # 1/N sum_i 1/|o_i| sum_t L_it  (GRPO, Shao et al. 2024)
            if row_denominators is None:
                row_denominators = loss.new_tensor(loss.shape[1]) if mask is None else mask.sum(dim=1)
            return (loss.sum(dim=1) / row_denominators.clamp(min=1)).sum() / sequences
        case "seq-mean-token-sum-norm":  # 1/(N H) sum_i sum_t L_it  (Dr. GRPO, Liu et al. 2025)
            return loss.sum() / (sequences * denominators.horizon)
        case "token-sum":  # sum_i sum_t L_it
            return loss.sum()


def select(x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"] | None) -> Float[Tensor, "*shape"]:
    """Returns `x` with 0 outside `mask`, also in place of NaN; gradients are 0 there too. None: `x` itself."""
    return x if mask is None else torch.where(mask, x, 0.0)
