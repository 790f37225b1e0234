"""Training on two tensor ranks with the layers of Megatron's specification for Transformer Engine. No test by itself.

`main(rank, folder)` is one of two gloo processes. It saves the states that it reaches.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

KINDS = {"critic": "critic", "qwen2": "actor", "qwen3": "actor", "experts": "actor"}
LAYOUT = "tp2 sp"


def sibling(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def preload() -> None:
    """What both ranks import, before they are forked; the stand-in first."""
    sibling("fused_stand_in").install()
    sibling("megatron_ranks").preload()


def main(rank: int, folder: Path) -> None:
    import torch

    runs: Any = sibling("megatron_ranks")
    results = {}
    for kind in KINDS:
        engine = runs.megatron(kind, LAYOUT, kernels="transformer_engine")
        results[kind] = runs.run(engine, kind, folder / f"fused-{kind}")
        results[kind]["names"] = [name for name, _ in engine.stages[0].named_parameters()]
    torch.save(results, folder / f"rank{rank}.pt")
