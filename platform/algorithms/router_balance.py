"""The load-balancing loss of routers, sequence by sequence, so that no split of a mini-batch changes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


def sequence_balance(
    scores: Float[Tensor, "tokens experts"],
    selected: Bool[Tensor, "tokens experts"],
    membership: Float[Tensor, "batch tokens"],
    lengths: Float[Tensor, " batch"],
    active: int,
    total: Callable[[Tensor], Tensor],
) -> Float[Tensor, " batch"]:
    """E sum_i f_i P_i of each sequence: 1 if all experts have equal shares of tokens and scores.

    The sequence-wise balance loss of DeepSeek-V2 and -V3 (2024), without its factor. `scores` of the router are
    normalised per token; `membership`: 1 where a token belongs to a sequence; `lengths`: tokens of whole sequences;
    `active`: K experts per token.
    `total` sums counts over the ranks that have other tokens of the same sequences: then the results of these ranks
    add up to the loss. The gradient flows through P only.
    """
    # f_bi = sum_t [i selected for t] / (K L_b)
    fractions = total(membership @ selected.to(membership.dtype)) / (active * lengths[:, None])
    # P_bi = sum_t s_ti / sum_j s_tj / L_b
    shares = membership @ (scores / scores.sum(dim=1, keepdim=True)) / lengths[:, None]
    return scores.shape[1] * (fractions * shares).sum(dim=1)
