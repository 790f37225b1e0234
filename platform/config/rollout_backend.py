"""What `rollout.backend: auto` stands for."""

from __future__ import annotations

import importlib.util

from rl_platform.config.schema import Config


def chosen_backend(asked: str, on_gpu: bool) -> tuple[str, str]:
    """torch or sglang, and why."""
    if asked != "auto":
        return asked, "as the config says"
    if not on_gpu:
        return "torch", "on a CPU it is faster than sglang"
    if importlib.util.find_spec("sglang") is None:
        return "torch", "sglang is not installed"
    return "sglang", "there are GPUs and sglang is installed"


def may_go_by_group(config: Config, on_gpu: bool) -> bool:
    """Whether a learner offers its weights to a process group; the rollout decides whether one can reach it.

    On CPUs memory is the faster way (docs/architecture.md). `sync: delta` sends what differs, which only the receiver
    knows.
    """
    rollout, reasoning = config.rollout, config.runner.task_type == "reasoning"
    wanted = rollout.weight_transfer == "group" or (rollout.weight_transfer == "auto" and on_gpu)
    return reasoning and wanted and rollout.sync == "full"
