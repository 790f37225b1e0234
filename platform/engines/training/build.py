"""The training engine that a section asks for."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rl_platform.config.components import Trainable
from rl_platform.engines.training.base import TrainingEngine
from rl_platform.engines.training.fsdp import FSDPEngine
from rl_platform.engines.training.offload import OffloadingEngine


def training_engine(
    section: Trainable, model: nn.Module, *, dtype: torch.dtype, horizon: int, device: torch.device, nominal: bool
) -> TrainingEngine:
    """The engine of `section.training_backend`, in host memory between uses if `section.offload` is true. Megatron is
    imported for those who train with it."""
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

        engine: TrainingEngine = MegatronEngine(
            model, section.optim, parallel=section.parallel, kernels=section.kernels, **options
        )
    else:
        context, cpu_offload = section.parallel.context, section.cpu_offload
        engine = FSDPEngine(model, section.optim, context=context, cpu_offload=cpu_offload, **options)
    return OffloadingEngine(engine, device) if section.offload is True else engine
