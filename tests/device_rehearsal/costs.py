"""Launches, synchronisations and copies of the engines: of each layer, micro-batch, step and decoded token."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from device_rehearsal.pretended_device import CUDA, Device
from device_rehearsal.runs import (
    OBSERVATIONS,
    embodied_engine,
    gaussian_policy,
    language_engine,
    language_model,
    rollout_engine,
    sequences,
    transitions,
)

from rl_platform.components.policy_rollout import PolicyInference
from rl_platform.engines.rollout.base import Request
from rl_platform.engines.training.base import MicroBatches
from rl_platform.records import SamplingParams

Cost = dict[str, int]
Costs = dict[str, Cost]
"""By what the cost is paid for."""
LENGTH, ROWS = 16, 2  # of a micro-batch
TABLE = Path(__file__).with_name("ratchets.yaml")


def combined(*terms: tuple[int, Cost]) -> Cost:
    """Returns the sum of factor * cost."""
    return {name: sum(factor * cost[name] for factor, cost in terms) for name in terms[0][1]}


def by_size(count: Callable[[int, int], Cost], unit: str) -> Costs:
    """Separates the costs of layers, units and the rest. count(units, layers): the cost of a call."""
    one, wide, deep, both = count(1, 1), count(2, 1), count(1, 2), count(2, 2)
    per_both = combined((1, both), (-1, wide), (-1, deep), (1, one))
    per_unit = combined((1, wide), (-1, one), (-1, per_both))
    per_layer = combined((1, deep), (-1, one), (-1, per_both))
    rest = combined((1, one), (-1, per_both), (-1, per_unit), (-1, per_layer))
    return {f"layer and {unit}": per_both, unit: per_unit, "layer": per_layer, "call": rest}


def of_training(device: Device, backend: str, kind: str, **options: Any) -> dict[str, Costs]:
    """Returns the costs of an evaluation and of an optimizer step."""

    @cache
    def count(micro_batches: int, layers: int) -> dict[str, Cost]:
        engine, loss = language_engine(kind, CUDA, backend=backend, layers=layers, **options)
        batch, parts = sequences([LENGTH] * (ROWS * micro_batches)), MicroBatches(rows=ROWS)
        engine.step(batch, loss, parts)  # creates the state of the optimizer
        device.counts.clear()
        engine.step(batch, loss, parts)
        step = dict(device.counts.totals())
        device.counts.clear()
        engine.evaluate(batch, parts)
        return {"step": step, "evaluation": dict(device.counts.totals())}

    return {
        call: by_size(lambda units, layers, call=call: count(units, layers)[call], "micro-batch")
        for call in ("step", "evaluation")
    }


def of_embodied(device: Device) -> dict[str, Costs]:
    """Returns the costs of an optimizer step and of choosing actions, with a small policy."""
    engine, loss = embodied_engine(CUDA)
    engine.step(transitions(), loss, MicroBatches())
    device.counts.clear()
    engine.step(transitions(), loss, MicroBatches())
    step = dict(device.counts.totals())
    inference = PolicyInference(gaussian_policy(), CUDA, seed=1, rows=None)
    device.counts.clear()
    inference.act(OBSERVATIONS)
    return {"step": {"call": step}, "act": {"call": dict(device.counts.totals())}}


def of_decoding(device: Device, tokens: int) -> Costs:
    """Returns the costs of one decoding step of two sequences of this length, one with other tokens than the other."""

    def count(layers: int) -> Cost:
        engine = rollout_engine(language_model(layers), CUDA)
        requests = [Request(index, tuple(range(index, index + tokens)), index) for index in range(2)]
        with torch.inference_mode():
            batch = engine._new_batch(requests, SamplingParams(8, temperature=0.8))
            for _ in range(2):  # the prompts, then the readers of their pages
                batch.step()
            device.counts.clear()
            batch.step()
        return dict(device.counts.totals())

    one, two = count(1), count(2)
    layer = combined((1, two), (-1, one))
    return {"layer": layer, "call": combined((1, one), (-1, layer))}


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
