"""What `rollout.backend: auto` stands for."""

from __future__ import annotations

import importlib.util


def chosen_backend(asked: str, on_gpu: bool) -> tuple[str, str]:
    """torch or sglang, and why."""
    if asked != "auto":
        return asked, "as the config says"
    if not on_gpu:
        return "torch", "on a CPU it is faster than sglang"
    if importlib.util.find_spec("sglang") is None:
        return "torch", "sglang is not installed"
    return "sglang", "there are GPUs and sglang is installed"
