"""Known reasons in SGLang's log why it did not start, as problems that name the config key to change."""

from __future__ import annotations

import re

from rl_platform.errors import Problem

_ARCHITECTURES = (
    re.compile(r"Model architectures \['(\w+)'.*are not supported"),
    re.compile(r"Cannot find model module\. '(\w+)' is not a registered model"),
    re.compile(r"(\w+) has no SGlang implementation and the Transformers implementation is not compatible"),
)
_NO_ROOM = ("Loaded weights leave no GPU memory", "Not enough memory. Please try to increase --mem-fraction-static")
_FULL = ("torch.OutOfMemoryError", "CUDA out of memory", "CUDA error: out of memory")
_SHARE = "rollout.gpu_memory_utilization"


def recognised(label: str, log: str, version: str, memory_share: float) -> Problem | None:
    """The problem that `log` shows, None if it is not a known one."""
    for pattern in _ARCHITECTURES:
        if (match := pattern.search(log)) is None:
            continue
        message = f"SGLang {version} has no model of architecture {match[1]} (actor.model)"
        hint = "rollout.backend: torch generates with the models that are trained here"
        return Problem("rollout.backend", message, value="sglang", hint=hint)
    if any(words in log for words in _NO_ROOM):
        message = f"{label}: no room is left for keys and values beside the weights"
        hint = "a larger share, or fewer components on these GPUs; --plan shows who needs what"
        return Problem(_SHARE, message, value=f"{memory_share:g}", hint=hint)
    if any(words in log for words in _FULL):
        message = f"{label}: the GPU's memory ran out while the engine started"
        hint = "a smaller share, fewer rollout.max_running_requests, or fewer components on these GPUs"
        return Problem(_SHARE, message, value=f"{memory_share:g}", hint=hint)
    return None
