"""The part of a flow-matching policy that is computed once per observation, before the denoising steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from transformers import DynamicCache


@dataclass(frozen=True)
class Prefix:
    """Images and instruction after the vision-language model: keys and values of its layers, mask [B,P] int64.

    state [B,S]: of the robot, padded. hidden [B,W] float32: mean of the last hidden states, for the critic.
    """

    cache: DynamicCache
    mask: Tensor
    state: Tensor
    hidden: Tensor


def masked_mean(hidden: Tensor, mask: Tensor) -> Tensor:
    """Hidden states [B,P,W], mask [B,P] -> float32 [B,W]. Autocast changes none of these operations on float32."""
    counted = mask[..., None].float()
    return (hidden.float() * counted).sum(1) / counted.sum(1)
