"""The report of `--plan` as JSON. Its form is documented in docs/placement.md; `version` changes when a key does."""

from __future__ import annotations

import json
from dataclasses import asdict

from rl_platform.planner.report import DeviceUse, Report

VERSION = 1


def report_json(report: Report) -> str:
    """Returns one object with a line for each item of its entries, in bytes and seconds. Null: not known."""
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {_lines(value)}" for key, value in as_tree(report).items()) + "\n}\n"


def _lines(value: object) -> str:
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(f" {json.dumps(item)}" for item in value) + "\n]"
    if isinstance(value, dict) and value:
        return "{\n" + ",\n".join(f" {json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()) + "\n}"
    return json.dumps(value)


def as_tree(report: Report) -> dict[str, object]:
    """Returns the object as plain values."""
    inventory, device = report.inventory, report.device
    memory: dict[int, dict[str, object]] = {}  # by identity: equal GPUs share their estimate
    return {
        "version": VERSION,
        "cluster": {
            "nodes": [{"name": node.name, "gpus": node.num_accelerators} for node in inventory.nodes],
            "origin": inventory.origin,
            "device": {"kind": device.kind, "known": device.known, "memory_bytes": device.memory},
        },
        "components": {
            name: {
                "ranks": part.ranks,
                "process": part.key,
                "gpus_per_rank": part.per_rank,
                "parameters": report.shapes[name].parameters if name in report.shapes else None,
                "active_parameters": report.shapes[name].active_parameters if name in report.shapes else None,
                "takes_turns_with": sorted(report.placement.takes_turns_with(name)),
            }
            for name, part in report.layout.parts.items()
        },
        "devices": [_device(use, report, memory) for use in report.devices],
        "processes": [
            {
                "name": host.name,
                "node": inventory.nodes[host.node].name,
                "gpus": list(host.accelerators),
                "members": [list(member) for member in host.members],
                "env": dict(host.env),
            }
            for host in report.placement.hosts
        ],
        "step": {
            "seconds": report.seconds if report.spans else None,
            "phases": [
                {**asdict(span), "leaves": [*span.leaves], "comes": [*span.comes], "seconds": span.seconds}
                for span in report.spans
            ],
            "overlap": None if report.overlap is None else asdict(report.overlap),
            "other_work": [{**asdict(work), "per_step": work.per_step} for work in report.other_work],
            "mean_seconds": report.mean_seconds if report.spans else None,
            "lengths": {"prompt": report.lengths.prompt, "response": report.lengths.response},
            "rates": report.source or None,
        },
        "batches": [{**asdict(division), "even": division.even} for division in report.divisions],
        "unknown": dict(report.unknown),
        "warnings": list(report.warnings),
    }


def _device(use: DeviceUse, report: Report, known: dict[int, dict[str, object]]) -> dict[str, object]:
    usage = use.usage
    if id(usage) not in known:
        components = {name: asdict(memory) for name, memory in usage.components.items()}
        peaks = {"peak": usage.peak, "expected": use.expected.peak}
        known[id(usage)] = {"components": components, "processes": usage.processes, **peaks}
    return {
        "node": report.inventory.nodes[use.node].name,
        "gpu": use.local,
        "number": use.number,
        "ranks": {name: list(ranks) for name, ranks in use.ranks.items()},
        "memory_bytes": known[id(usage)],
        "capacity_bytes": report.capacity(use),
    }
