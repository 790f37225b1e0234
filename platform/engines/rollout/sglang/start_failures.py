"""Known reasons in SGLang's log why it did not start, as problems that name the config key to change."""

from __future__ import annotations

import re

from rl_platform.engines.rollout.hosted.out_of_memory import memory_problem
from rl_platform.errors import Problem

_ARCHITECTURES = (
    re.compile(r"Model architectures \['(\w+)'.*are not supported"),
    re.compile(r"Cannot find model module\. '(\w+)' is not a registered model"),
    re.compile(r"(\w+) has no SGlang implementation and the Transformers implementation is not compatible"),
)
_NO_ROOM = ("Loaded weights leave no GPU memory", "Not enough memory. Please try to increase --mem-fraction-static")
_FULL = ("torch.OutOfMemoryError", "CUDA out of memory", "CUDA error: out of memory")


def recognised(label: str, log: str, version: str, memory_share: float) -> Problem | None:
    """Returns the problem that `log` shows, None if it is not a known one."""
    for pattern in _ARCHITECTURES:
        if (match := pattern.search(log)) is None:
            continue
        message = f"SGLang {version} has no model of architecture {match[1]} (actor.model)"
        hint = "rollout.backend: torch generates with the models that are trained here"
        return Problem("rollout.backend", message, value="sglang", hint=hint)
    return memory_problem(label, log, memory_share, _NO_ROOM, _FULL)
