"""Models whose states are in main memory learn what the others learn, and go on from each other's checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

OFFLOAD = ("actor.cpu_offload=true", "critic.cpu_offload=true")


def test_the_same_run(command, final_state, folder: Path, scored: str) -> None:
    def run(name: str, *overrides: str) -> None:
        kept = ("runner.max_steps=3", "runner.save_interval=1", "runner.keep_checkpoints=3")
        ended = command("reasoning.yaml", scored, *kept, f"runner.output_dir={name}", *overrides)
        assert ended.code == 0, ended.err

    run("plain")
    run("offloaded", *OFFLOAD)
    shutil.copytree("offloaded", "moved")
    shutil.rmtree("moved/checkpoints/step-00000003")
    run("moved")  # the last step without offload, from where the offloaded run was after two
    states = [final_state(name, 3) for name in ("plain", "offloaded", "moved")]
    for role in ("actor", "critic"):
        for name, expected in states[0][role]["model"].items():
            for other in states[1:]:
                torch.testing.assert_close(other[role]["model"][name], expected, rtol=1e-6, atol=1e-6)
