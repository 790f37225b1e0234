"""What the engines launch, wait for and copy stays as little as `ratchets.yaml` allows, and the file stays exact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from device_rehearsal.costs import Costs, of_decoding, of_embodied, of_training
from device_rehearsal.pretended_device import Device

TABLE = Path(__file__).parent / "ratchets.yaml"
# The rows of an engine in the table, by its name.
MEASURED: dict[str, Callable[[Device], dict[str, Costs]]] = {
    "fsdp actor": lambda device: of_training(device, "fsdp", "actor", gradient_checkpointing=True),
    "fsdp critic": lambda device: of_training(device, "fsdp", "critic"),
    "embodied": of_embodied,
    "torch rollout": lambda device: {
        f"decoding at {tokens} tokens": of_decoding(device, tokens) for tokens in (20, 200)
    },
}


def flat(costs: dict[str, Any], before: str = "") -> dict[str, int]:
    """{"step": {"layer": {"launches": 3}}} -> {"step, layer, launches": 3}."""
    found: dict[str, int] = {}
    for name, value in costs.items():
        found |= flat(value, f"{before}{name}, ") if isinstance(value, dict) else {f"{before}{name}": value}
    return found


def changes(name: str, found: dict[str, Any], allowed: dict[str, Any]) -> list[str]:
    """Returns a line for every number that the table does not hold exactly."""
    lines = []
    now, table = flat(found), flat(allowed)
    for key in sorted(now.keys() | table.keys()):
        here, limit = now.get(key), table.get(key)
        if here is None or limit is None:
            lines.append(f"{name}, {key}: {here} measured, {limit} in {TABLE.name}; write the measured row there")
        elif here > limit:
            lines.append(f"{name}, {key}: {here}, at most {limit} allowed")
        elif here < limit:
            lines.append(f"{name}, {key}: {here} instead of {limit}; set {here} in {TABLE.name} so that it stays")
    return lines


def check(name: str, found: dict[str, Costs]) -> None:
    lines = changes(name, found, yaml.safe_load(TABLE.read_text())[name])
    assert not lines, "\n".join([*lines, "all numbers measured:", yaml.safe_dump({name: found})])


@pytest.mark.parametrize("name", MEASURED)
def test_costs(device: Device, name: str) -> None:
    check(name, MEASURED[name](device))


@pytest.mark.parametrize("name", ["megatron", "megatron recomputed"])
def test_costs_of_megatron(megatron: dict[str, Any], name: str) -> None:
    check(name, megatron["costs"][name])


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
