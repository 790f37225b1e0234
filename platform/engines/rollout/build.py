"""Builds the rollout engine of a rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_platform.config.rollout_backend import HOSTED, chosen_backend, gathers_as_engine
from rl_platform.config.schema import Config
from rl_platform.engines.rollout.base import EngineSetup, RolloutEngine
from rl_platform.engines.rollout.torch import TorchRolloutEngine
from rl_platform.extras import required
from rl_platform.user_code import is_named

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from rl_platform.engines.rollout.stopping.stop_texts import StopTexts


def rollout_engine(
    config: Config,
    label: str,
    model_config: PretrainedConfig,
    eos: tuple[int, ...],
    accelerators: tuple[int, ...],
    seed: int,
    stop_texts: StopTexts | None = None,
) -> RolloutEngine:
    """Returns the engine of one rank, on its accelerators or on the CPU. Raises ConfigError if it cannot use them."""
    rollout = config.rollout
    device = torch.device("cuda", accelerators[0]) if accelerators else torch.device("cpu")
    if is_named(rollout.backend):
        setup = EngineSetup(
            label=label,
            model_config=model_config,
            eos=eos,
            device=device,
            dtype=generation_dtype(config.actor.model.dtype, device),
            max_running=rollout.running_limit,
            longest=config.data.longest_sequence,
        )
        with required("rl_platform.engines.rollout.user_engines", "rollout.backend", hint="rollout.backend=torch"):
            from rl_platform.engines.rollout.user_engines.checked_engine import user_engine
        return user_engine(config, setup)
    if chosen_backend(rollout.backend, bool(accelerators))[0] == "torch":
        dtype = generation_dtype(config.actor.model.dtype, device)
        return TorchRolloutEngine(
            model_config,
            eos,
            rollout.running_limit,
            device,
            dtype,
            label,
            stop_texts,
            records_routes=config.actor.router_replay,
            continues=rollout.on_update == "continue",
            alone=config.runner.max_staleness == 0,
        )
    with required("rl_platform.engines.rollout.hosted", "rollout.backend", hint="rollout.backend=torch"):
        from rl_platform.engines.rollout.hosted.build import hosted_engine

    hosted = hosted_engine(config, label, model_config, eos, accelerators, seed)
    hosted.stop_texts = stop_texts
    return hosted


def generation_dtype(trained: str, device: torch.device) -> torch.dtype:
    """Returns bfloat16 if training computes in it and the device multiplies it faster than float32, else float32.

    The choice depends on hardware features and not on a measurement, so a resumed run generates the same tokens.
    """
    if trained != "bfloat16":
        return torch.float32
    if device.type == "cuda":
        faster = torch.cuda.is_bf16_supported(including_emulation=False)
    else:  # without these instructions oneDNN converts to float32, which is slower than float32
        faster = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if faster else torch.float32


def published_dtype(config: Config, device: torch.device) -> torch.dtype:
    """Returns the type in which a learner on `device` gathers weights for the rollout."""
    trained, on_gpu = config.actor.model.dtype, device.type == "cuda"
    if trained != "bfloat16" or not gathers_as_engine(config, on_gpu):
        return torch.float32
    hosted = chosen_backend(config.rollout.backend, on_gpu)[0] in HOSTED
    return torch.bfloat16 if hosted else generation_dtype(trained, device)
