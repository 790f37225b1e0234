"""The training engine that a section asks for."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rl_platform.config.components import Trainable
from rl_platform.engines.training.base import TrainingEngine
from rl_platform.engines.training.fsdp import FSDPEngine


def training_engine(
    section: Trainable, model: nn.Module, *, dtype: torch.dtype, horizon: int, device: torch.device, nominal: bool
) -> TrainingEngine:
    """The engine of `section.training_backend`. Megatron is imported for those who train with it."""
    options: dict[str, Any] = {
        "dtype": dtype,
        "horizon": horizon,
        "device": device,
        "nominal": nominal,
        "balance": section.balance,
        "gradient_checkpointing": section.gradient_checkpointing,
    }
    if section.training_backend == "megatron":
        from rl_platform.engines.training.megatron import MegatronEngine

        return MegatronEngine(model, section.optim, parallel=section.parallel, kernels=section.kernels, **options)
    return FSDPEngine(
        model, section.optim, context=section.parallel.context, cpu_offload=section.cpu_offload, **options
    )
