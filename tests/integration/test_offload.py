"""`offload: true` in whole runs: components leave and come back in turns, and what is learned is equal to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

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
