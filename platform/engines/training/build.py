"""The training engine that a section asks for."""

from __future__ import annotations

import torch
from torch import nn

from rl_platform.config.components import Trainable
from rl_platform.engines.training.base import TrainingEngine
from rl_platform.engines.training.fsdp import FSDPEngine


def training_engine(
    section: Trainable, model: nn.Module, *, dtype: torch.dtype, horizon: int, device: torch.device
) -> TrainingEngine:
    """The engine of `section.training_backend`. Megatron is imported for those who train with it."""
    if section.training_backend == "megatron":
        from rl_platform.engines.training.megatron import MegatronEngine

        return MegatronEngine(
            model,
            section.optim,
            dtype=dtype,
            horizon=horizon,
            device=device,
            parallel=section.parallel,
            gradient_checkpointing=section.gradient_checkpointing,
        )
    return FSDPEngine(
        model,
        section.optim,
        dtype=dtype,
        horizon=horizon,
        device=device,
        gradient_checkpointing=section.gradient_checkpointing,
    )
