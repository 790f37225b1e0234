"""What the engines launch, wait for and copy stays as little as `ratchets.yaml` allows, and the file stays exact."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from device_rehearsal.costs import Costs, changes, check, of_decoding, of_embodied, of_training
from device_rehearsal.pretended_device import Device

# The rows of an engine in the table, by its name.
MEASURED: dict[str, Callable[[Device], dict[str, Costs]]] = {
    "fsdp actor": lambda device: of_training(device, "fsdp", "actor", gradient_checkpointing=True),
    "fsdp critic": lambda device: of_training(device, "fsdp", "critic"),
    "embodied": of_embodied,
    "torch rollout": lambda device: {
        f"decoding at {tokens} tokens": of_decoding(device, tokens) for tokens in (20, 200)
    },
}


@pytest.mark.parametrize("name", MEASURED)
def test_costs(device: Device, name: str) -> None:
    check(name, MEASURED[name](device))


def test_a_change_in_either_direction_is_a_line() -> None:
    table = {"step": {"layer": {"launches": 3, "copies": 1}}}
    assert changes("engine", table, table) == []
    grown = {"step": {"layer": {"launches": 4, "copies": 0}}}
    assert changes("engine", grown, table) == [
        "engine, step, layer, copies: 0 instead of 1; set 0 in ratchets.yaml so that it stays",
        "engine, step, layer, launches: 4, at most 3 allowed",
    ]
    missing = {"act": {"call": {"launches": 1}}}
    assert "1 measured, None in ratchets.yaml" in "\n".join(changes("engine", missing, table))
