"""Selects the rollout engine for `rollout.backend: auto`, and the route of weights to it."""

from __future__ import annotations

import importlib.util

from rl_platform.config.schema import Config
from rl_platform.extras import is_present

HOSTED = ("sglang", "vllm")  # in processes of their own, with weights of their own, over several GPUs


def chosen_backend(backend: str, on_gpu: bool) -> tuple[str, str]:
    """Returns torch, sglang or vllm, and the reason."""
    if backend != "auto":
        return backend, "as the config says"
    if not on_gpu:
        return "torch", "on a CPU it is faster than sglang"
    if importlib.util.find_spec("sglang") is None:
        return "torch", "sglang is not installed"
    if not is_present("rl_platform.engines.rollout.sglang"):
        return "torch", "platform/engines/rollout/sglang was removed"
    return "sglang", "there are GPUs and sglang is installed"


def gathers_as_engine(config: Config, on_gpu: bool) -> bool:
    """Returns whether learners gather weights in the type of the rollout engine, and not in float32.

    An engine on a CPU may run on a machine with other instructions, and a user's engine may need any type.
    """
    if config.runner.task_type != "reasoning" or "dtype" in config.rollout.engine_args:
        return False
    backend, _ = chosen_backend(config.rollout.backend, on_gpu)
    return backend in HOSTED or (backend == "torch" and on_gpu)


def may_go_by_group(config: Config, on_gpu: bool) -> bool:
    """Returns True if a learner offers its weights to a process group. The rollout decides whether a group can reach
    it.

    On CPUs main memory is faster (docs/architecture.md). `sync: delta` needs the receiver's weights for comparison,
    so it never uses a group; nor does vLLM, whose process may have another torch. A group holds no copy, so generation
    that is several updates ahead could not read older weights.
    """
    alternates = config.runner.max_staleness < 2 and not config.updates_at_once
    rollout, reasoning = config.rollout, config.runner.task_type == "reasoning" and alternates
    wanted = rollout.weight_transfer == "group" or (rollout.weight_transfer == "auto" and on_gpu)
    return reasoning and wanted and rollout.sync == "full" and rollout.backend in ("auto", "torch", "sglang")
