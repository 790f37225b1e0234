"""A micro-batch as Megatron's layers read it: its sequences side by side in one row, without padding between them."""

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
    """What the layers of `megatron_layers` read of a micro-batch: N tokens, the last `padding` of no sequence.

    For Megatron itself it is one sequence. flat_index [B,T]: where position t of row b stands in the flat row.
    """

    tokens: Tensor | None = None
    positions: Tensor | None = None
    attention: PackedAttention | None = None
    flat_index: Tensor | None = None
    padding: int = 0


def packed_input(part: RolloutBatch, multiple: int) -> PackedInput:
    """The sequences of `part`, with as much padding at the end as makes the tokens a `multiple`."""
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
