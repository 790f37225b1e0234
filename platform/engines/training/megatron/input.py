"""Packs a micro-batch into one row of tokens for Megatron's layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from rl_platform.models.context.context_parallel import ContextParallel
from rl_platform.models.experts.balancing_loss import RouterBalance
from rl_platform.models.forward import packed_sequences
from rl_platform.models.packed import PackedAttention
from rl_platform.records import RolloutBatch


@dataclass
class PackedInput(PackedSeqParams):
    """This rank's N tokens of a micro-batch, as `local_layers` reads them.

    To Megatron they are a single sequence. The last `padding` tokens belong to no sequence, and `attention` does not
    process them. flat_index [B,T]: the index of position t of row b in the flat row. rows, columns [K]: the action
    positions that follow these tokens. balance: the load-balancing loss of this micro-batch. routes [n,L,K]: experts of
    the tokens of this rank's routers, -1 where these select themselves.
    """

    tokens: Tensor | None = None
    positions: Tensor | None = None
    attention: PackedAttention | None = None
    flat_index: Tensor | None = None
    rows: Tensor | None = None
    columns: Tensor | None = None
    padding: int = 0
    balance: RouterBalance | None = None
    routes: Tensor | None = None


def packed_input(part: RolloutBatch, multiple: int, context: ContextParallel | None) -> PackedInput:
    """Packs the sequences of `part`; with `context` returns this rank's slice.

    The number of tokens is padded to a multiple of `multiple`.
    """
    host, device = part.host or part, part.action_mask.device
    packed = packed_sequences(host, device)
    rows, columns = host.action_mask.nonzero(as_tuple=True)
    if context is not None:  # slices are padded already, and the attention of all ranks removes that padding
        packed = context.slice(packed, multiple)
        own = context.is_own(packed, rows, columns)
        rows, columns = rows[own], columns[own]
    padding = -len(packed.tokens) % multiple
    size = len(packed.tokens) + padding
    # The ends stay in main memory: only Megatron's rotary embedding reads them, three numbers per tensor and layer.
    ends = torch.tensor([0, size], dtype=torch.int32)
    packed, (rows, columns) = packed.to(device, rows, columns)
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
        rows=rows,
        columns=columns,
        padding=padding,
    )
