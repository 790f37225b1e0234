"""Trains with Megatron on the pretended device, then on the CPU, and writes reports, costs and the numbers of the parts
of `benchmarks/gpu.py` with Megatron. No test by itself.

`python megatron_rehearsal.py FILE`. A process of its own: on a CPU Megatron's modules get a view of torch without CUDA,
which must not be there before, and its process groups stay.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from device_rehearsal.acceptance_parts import BENCHMARKS, figures_of
from device_rehearsal.costs import of_training
from device_rehearsal.pretended_device import CPU, CUDA, pretended_device
from device_rehearsal.runs import Report, language_engine, sequences, sharing_short_prefixes, trained

from rl_platform.acceleration import accelerating

CASES = {
    "actor": ("actor", {}),
    "critic": ("critic", {}),
    "recomputed": ("actor", {"gradient_checkpointing": True}),
    "bfloat16": ("actor", {"dtype": torch.bfloat16}),
}


def reports(device: torch.device) -> dict[str, Report]:
    return {
        name: trained(*language_engine(kind, device, backend="megatron", **options), sequences())
        for name, (kind, options) in CASES.items()
    }


def main(path: str) -> None:

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with accelerating("off"), pretended_device() as device:
        with sharing_short_prefixes():
            pretended = reports(CUDA)
        costs = {
            name: of_training(device, "megatron", "actor", gradient_checkpointing=recomputes)
            for name, recomputes in (("megatron", False), ("megatron recomputed", True))
        }
        sys.path.insert(0, BENCHMARKS)  # of the modules that a part imports
        parts = {}
        for name in ("training-megatron", "equality-megatron"):
            with TemporaryDirectory() as folder:
                parts[name] = figures_of(name, Path(folder))
    torch.save({"pretended": pretended, "cpu": reports(CPU), "costs": costs, "parts": parts}, path)


if __name__ == "__main__":
    main(sys.argv[1])
