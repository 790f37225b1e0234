"""Seconds to schedule, and to show, placements on a simulated cluster of thousands of GPUs.

Every placement is checked for completeness: each component must own exactly the GPUs it was given. Not covered: reading
the config, estimating memory, and starting anything.

    python benchmarks/placement.py [--nodes 1250] [--gpus-per-node 8] [--repeats 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path

from rl_platform.config.schema import Cluster
from rl_platform.placement.inventory import inventory_for
from rl_platform.placement.plan import render
from rl_platform.placement.scheduler import schedule

TARGET_S = 1.0  # for one plan of 10,000 GPUs


def cases(gpus: int) -> dict[str, dict[str, str]]:
    """Placements from the cheapest to the dearest; the last has a process for every component on every GPU."""
    half = gpus // 2
    return {
        "one key on all GPUs": {"actor,critic,rollout,reward": "all"},
        "training and rollout apart": {"actor,critic": f"0-{half - 1}", "rollout,reward": f"{half}-{gpus - 1}"},
        "six keys on all GPUs": dict.fromkeys(("actor", "critic", "reference", "rollout", "reward", "env"), "all"),
    }


def measure(nodes: int, gpus_per_node: int, placement: dict[str, str]) -> tuple[float, float]:
    """Seconds of scheduling and of rendering."""
    cluster = Cluster(num_nodes=nodes, gpus_per_node=gpus_per_node, component_placement=placement)
    inventory = inventory_for(cluster)
    start = time.perf_counter()
    placed = schedule(cluster, inventory)
    scheduled = time.perf_counter()
    render(placed, inventory)
    rendered = time.perf_counter()
    if len(frozenset().union(*placed.accelerators.values())) != nodes * gpus_per_node:
        raise SystemExit("some GPUs were not placed: the timings mean nothing")
    return scheduled - start, rendered - scheduled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1250)
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    options = parser.parse_args()

    gpus = options.nodes * options.gpus_per_node
    print(f"Python {platform.python_version()}, {os.cpu_count()} CPUs, {options.nodes} nodes, {gpus} simulated GPUs")
    print(f"{'seconds, median (lowest - highest)':<29} {'schedule':<23} render")
    seconds: dict[str, list[tuple[float, float]]] = {}
    for name, placement in cases(gpus).items():
        runs = [measure(options.nodes, options.gpus_per_node, placement) for _ in range(options.repeats)]
        columns = [f"{statistics.median(c):.3f} ({min(c):.3f} - {max(c):.3f})" for c in zip(*runs, strict=True)]
        print(f"{name:<29} {columns[0]:<23} {columns[1]}")
        seconds[name] = runs
    slowest = max(statistics.median(scheduling for scheduling, _ in runs) for runs in seconds.values())
    print(f"target: a schedule in {TARGET_S:g} s: {'met' if slowest < TARGET_S else 'missed'}")
    if options.json:
        options.json.write_text(json.dumps({"options": vars(options) | {"json": None}, "seconds": seconds}, indent=1))


if __name__ == "__main__":
    main()
