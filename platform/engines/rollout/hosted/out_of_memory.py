"""A rollout engine that did not start for lack of GPU memory, as a problem of the config."""

from __future__ import annotations

from collections.abc import Sequence

from rl_platform.errors import Problem


def memory_problem(
    label: str, log: str, memory_share: float, no_room: Sequence[str], full: Sequence[str]
) -> Problem | None:
    """Returns the problem of a start that ran out of GPU memory; `no_room` and `full`: what an engine writes into its
    log."""
    if any(words in log for words in no_room):
        message = f"{label}: no room is left for keys and values beside the weights"
        hint = "a larger fraction, or fewer components on these GPUs; --plan shows the memory"
    elif any(words in log for words in full):
        message = f"{label}: the GPU's memory ran out while the engine started"
        hint = "a smaller share, fewer rollout.max_running_requests, or fewer components on these GPUs"
    else:
        return None
    return Problem("rollout.gpu_memory_utilization", message, value=f"{memory_share:g}", hint=hint)
