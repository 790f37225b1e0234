"""Builds engines in processes of their own: SGLang and vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rl_platform.config.schema import Config
from rl_platform.engines.rollout.hosted.hosted_engine import HostedEngine, visible_gpus
from rl_platform.errors import ConfigError, Problem

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LOGS = "logs"  # of the run's output folder
USUAL_SHARE = 0.6  # of a GPU, for an engine whose memory cannot be estimated


def hosted_engine(
    config: Config,
    label: str,
    model_config: PretrainedConfig,
    eos: tuple[int, ...],
    accelerators: tuple[int, ...],
    seed: int,
) -> HostedEngine:
    """Returns the engine of one rank, on its accelerators or on the CPU. Raises ConfigError, see `check_ranks`."""
    rollout = config.rollout
    ranks = rollout.tensor_parallel_size or max(1, len(accelerators))
    check_ranks(model_config, ranks)
    longest = config.data.longest_sequence
    description = model_config.to_dict()
    description |= {"architectures": description.get("architectures") or [_architecture(model_config)]}
    logs = Path(config.runner.output_dir).absolute() / LOGS
    if rollout.backend == "vllm":
        from rl_platform.engines.rollout.vllm.client import VLLMEngine, VLLMSetup

        vllm_setup = VLLMSetup(
            model_config=description,
            tensor_parallel=ranks,
            dtype=config.actor.model.dtype,
            max_running=rollout.running_limit,
            longest=longest,
            memory_share=rollout.gpu_memory_utilization or USUAL_SHARE,
            seed=seed,
            gpus=tuple(visible_gpus()[number] for number in accelerators),
            python=rollout.vllm.python,
            extra=rollout.engine_args,
        )
        return VLLMEngine(label, vllm_setup, eos, rollout.engine_env, logs / f"{label}-vllm.log")
    from rl_platform.engines.rollout.sglang.program import SGLangSetup
    from rl_platform.engines.rollout.sglang.sglang_client import SGLangEngine

    setup = SGLangSetup(
        model_config=description,
        device="cuda" if accelerators else "cpu",
        tensor_parallel=ranks,
        dtype=config.actor.model.dtype,
        max_running=rollout.running_limit,
        cache_tokens=None if accelerators else rollout.running_limit * (longest + 1),
        memory_share=rollout.gpu_memory_utilization or USUAL_SHARE,
        seed=seed,
        accelerators=accelerators,
        reports_routes=config.actor.router_replay,
        extra=rollout.engine_args,
    )
    return SGLangEngine(label, setup, eos, rollout.engine_env, logs / f"{label}-sglang.log")


def check_ranks(model_config: PretrainedConfig, ranks: int) -> None:
    """Raises ConfigError if SGLang or vLLM cannot split the model's heads over so many tensor-parallel ranks."""
    heads = model_config.num_attention_heads
    key_heads = getattr(model_config, "num_key_value_heads", None) or heads
    if heads % ranks == 0 and (key_heads % ranks == 0 or ranks % key_heads == 0):
        return
    message = f"{ranks} processes cannot share {heads} heads and {key_heads} key-value heads equally"
    hint = "a number that divides both; where it is null, as many GPUs per rank of rollout in the placement"
    raise ConfigError([Problem("rollout.tensor_parallel_size", message, value=str(ranks), hint=hint)])


def _architecture(model_config: PretrainedConfig) -> str:
    """Returns the name of the transformers class of a config without `architectures`."""
    from transformers import AutoModelForCausalLM

    name: str = AutoModelForCausalLM._model_mapping[type(model_config)].__name__
    return name
