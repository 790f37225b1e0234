"""`offload: true` (components leave the device in turns) and `cpu_offload` (states in main memory) in whole runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

PLACED = "cluster.component_placement={'actor,critic,reference,rollout,reward': all}"
KL = "algorithm={ppo_epochs: 2, use_kl_loss: true}"


@pytest.fixture
def learned_in_parts(command, final_state, logged):
    """learned_in_parts(folder, *overrides): models, optimizers and log of three steps, ended after two and resumed."""

    def run(folder: str, *overrides: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        for steps in (2, 3):
            options = (f"runner.max_steps={steps}", f"runner.output_dir={folder}", "runner.val_check_interval=1")
            ended = command("reasoning.yaml", PLACED, KL, *overrides, *options)
            assert ended.code == 0, ended.err
        return final_state(folder, 3), logged(folder)

    return run


def calls(folder: str, component: str) -> list[str]:
    """What the timeline of the last run shows of a component, in order."""
    events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    lanes = {event["tid"] for event in events if event["ph"] == "M" and event["args"]["name"] == f"{component}[0]"}
    return [
        event["name"] for event in events if event["ph"] == "X" and event["tid"] in lanes and event["cat"] == "call"
    ]


def test_turns_change_no_bit(learned_in_parts, differences) -> None:
    """Neither if all models leave the device in turns nor if one of them does."""
    stay = learned_in_parts("stay")
    assert "onload" not in calls("stay", "critic")
    names = ("actor", "critic", "reference")
    for leaving in (names, ("critic",)):
        leave = learned_in_parts("-".join(leaving), *(f"{name}.offload=true" for name in leaving))
        for name in names:
            swaps = {"offload", "onload"}.intersection(calls("-".join(leaving), name))
            assert swaps == ({"offload", "onload"} if name in leaving else set()), name
        assert differences(leave, stay) == []


OFFLOAD = ("actor.cpu_offload=true", "critic.cpu_offload=true")


def test_states_in_main_memory_learn_the_same_and_checkpoints_fit_both(command, final_state, scored: str) -> None:
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
