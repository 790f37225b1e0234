"""Packs a micro-batch into one row of tokens for Megatron's layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from rl_platform.models.packed import PackedAttention, pack
from rl_platform.records import RolloutBatch


@dataclass
class PackedInput(PackedSeqParams):
    """A micro-batch of N tokens, of which the last `padding` belong to no sequence, as `local_layers` reads it.

    To Megatron it is a single sequence. flat_index [B,T]: the index of position t of row b in the flat row.
    """

    tokens: Tensor | None = None
    positions: Tensor | None = None
    attention: PackedAttention | None = None
    flat_index: Tensor | None = None
    padding: int = 0


def packed_input(part: RolloutBatch, multiple: int) -> PackedInput:
    """Packs the sequences of `part` and pads the end, so that the number of tokens is a multiple of `multiple`."""
    tokens, lengths = part.inputs["tokens"], part.inputs["lengths"].tolist()
    packed = pack([tokens[row, :length] for row, length in enumerate(lengths)])
    padding = -len(packed.tokens) % multiple
    size = len(packed.tokens) + padding
    ends = torch.tensor([0, size], dtype=torch.int32, device=tokens.device)
    return PackedInput(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=size,
        max_seqlen_kv=size,
        tokens=F.pad(packed.tokens, (0, padding)),
        positions=F.pad(packed.positions, (0, padding)),
        attention=packed.attention,
        flat_index=packed.flat_index,
        padding=padding,
    )
