"""The process group that a test of ranks, or of Megatron in this process, leaves behind."""

from __future__ import annotations

import sys

import torch.distributed as dist


def end_process_groups() -> None:
    """Afterwards this process is in no group. Does nothing if it is in none."""
    if dist.is_initialized():
        if (state := sys.modules.get("megatron.core.parallel_state")) is not None:
            state.destroy_model_parallel()
        dist.destroy_process_group()
