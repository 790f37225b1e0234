"""Builds the training engine of a config section."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import nn

from rl_platform import acceleration
from rl_platform.config.schema.models import Trainable
from rl_platform.engines.training.base import EngineOptions, TrainingEngine
from rl_platform.engines.training.fsdp import FSDPEngine
from rl_platform.extras import required

if TYPE_CHECKING:
    from rl_platform.models.forward import TokenModel


def training_engine(
    section: Trainable, model: nn.Module, *, dtype: torch.dtype, horizon: int, device: torch.device, nominal: bool
) -> TrainingEngine:
    """Returns the engine of `section.training_backend`; with `section.offload: true` it offloads between uses.

    A model without trainable parameters can be evaluated but not stepped. `horizon`, `nominal`: see `Denominators.of`.
    """
    constant = not any(parameter.requires_grad for parameter in model.parameters())
    options: EngineOptions = {
        "dtype": dtype,
        "horizon": horizon,
        "device": device,
        "nominal": nominal,
        "balance": section.balance,
        "gradient_checkpointing": section.gradient_checkpointing is True,
    }
    if section.training_backend == "megatron":
        from rl_platform.engines.training.megatron.engine import MegatronEngine

        engine: TrainingEngine = MegatronEngine(
            cast("TokenModel", model),
            section.optim,
            parallel=section.parallel,
            kernels=section.kernels,
            router_aux_loss_coef=section.router_aux_loss_coef,
            **options,
        )
    elif _plain(section) and (compiled := acceleration.find("training_engine_class", model, device, dtype)) is not None:
        engine = compiled(model, section.optim, **options)
    else:
        if _plain(section):  # these functions change the layers of a model that they cover, in place
            acceleration.find("recompute_tensors", model, device, dtype)
        acceleration.find("fuse_layers", model, device, dtype)
        engine = FSDPEngine(
            model,
            section.optim,
            context=section.parallel.context,
            cpu_offload=section.cpu_offload,
            router_aux_loss_coef=section.router_aux_loss_coef,
            **options,
        )
    if section.offload is not True:
        return engine
    with required("rl_platform.engines.offloading", "offload"):
        from rl_platform.engines.offloading.offload import OffloadingEngine
    return OffloadingEngine(engine, device, constant=constant)


def _plain(section: Trainable) -> bool:
    """Returns whether a single rank trains without offloading or recomputation."""
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    return alone and not (section.cpu_offload or section.offload is True or section.gradient_checkpointing is True)
