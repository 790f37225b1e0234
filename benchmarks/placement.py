"""Seconds to plan placements on a simulated cluster of thousands of GPUs: schedule, estimate, draw, and search.

`plan` is what `platform-launch --plan` does after reading the config: schedule, estimate memory and time of every GPU,
and write the text. Every placement is checked for completeness: each component must own exactly the GPUs it was given.
In one case the second half of the nodes has another kind of GPU, and a search tries which models go where. Times
are CPU seconds, so that other work on the machine does not count. Not covered: reading the config, starting anything.

    python benchmarks/placement.py [--nodes 1250] [--gpus-per-node 8] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from pathlib import Path

from _common import machine, new_parser, write_json

from rl_platform.config import load_config
from rl_platform.placement.inventory import inventory_for
from rl_platform.placement.scheduler import schedule
from rl_platform.planner.report import plan_report
from rl_platform.planner.report_json import report_json
from rl_platform.planner.report_text import report_text
from rl_platform.planner.search import search
from rl_platform.planner.svg import report_svg

TARGETS_S = {"plan": 2.0, "search": 30.0}  # for 10,000 GPUs
CONFIG = Path(__file__).parents[1] / "configs" / "reasoning" / "ppo.yaml"
TWO_KINDS = "two kinds of GPU"
COLUMNS = ("schedule", "estimate", "text", "plan", "json", "svg", "search")


def cases(gpus: int) -> dict[str, dict[str, str]]:
    """Placements from the cheapest to the dearest; the last has a process for every component on every GPU."""
    half = gpus // 2
    return {
        "one key on all GPUs": {"actor,critic,reference,rollout,reward": "all"},
        "training and rollout apart": {
            "actor,critic,reference": f"0-{half - 1}",
            "rollout,reward": f"{half}-{gpus - 1}",
        },
        TWO_KINDS: {"actor,critic,reference,rollout,reward": "all"},
        "five keys on all GPUs": dict.fromkeys(("actor", "critic", "reference", "rollout", "reward"), "all"),
    }


def measure(nodes: int, gpus_per_node: int, placement: dict[str, str], *, two_kinds: bool) -> dict[str, float]:
    """Seconds by column."""
    inventory_keys = {"nodes": nodes, "gpus_per_node": gpus_per_node, "gpu": "h100"}
    cluster: dict[str, object] = {"inventory": inventory_keys, "component_placement": placement}
    if two_kinds:
        cluster["node_groups"] = [{"label": "second", "node_ranks": f"{nodes // 2}-{nodes - 1}", "gpu": "l40s"}]
    config = load_config(CONFIG, [f"cluster={json.dumps(cluster)}", "algorithm.use_kl_loss=true"]).config
    laps = [time.process_time()]
    inventory = inventory_for(config.cluster)
    placed = schedule(config.cluster, inventory)
    laps.append(time.process_time())
    report = plan_report(config, placed, inventory)
    laps.append(time.process_time())
    for draw in (report_text, report_json, report_svg):
        draw(report)
        laps.append(time.process_time())
    search(config, inventory)
    laps.append(time.process_time())
    if len(frozenset().union(*placed.accelerators.values())) != nodes * gpus_per_node:
        raise SystemExit("some GPUs were not placed: the timings mean nothing")
    scheduled, estimated, text, as_json, svg, found = (b - a for a, b in itertools.pairwise(laps))
    return dict(zip(COLUMNS, (scheduled, estimated, text, laps[3] - laps[0], as_json, svg, found), strict=True))


def main() -> None:
    parser = new_parser(__doc__, rounds=5)
    parser.add_argument("--nodes", type=int, default=1250)
    parser.add_argument("--gpus-per-node", type=int, default=8)
    options = parser.parse_args()
    found = machine(())
    gpus = options.nodes * options.gpus_per_node
    print(f"{options.nodes} nodes, {gpus} simulated GPUs")
    print(f"{'CPU seconds, median':<27}" + "".join(f"{name:>10}" for name in COLUMNS) + "   plan: lowest - highest")
    seconds: dict[str, list[dict[str, float]]] = {}
    for name, placement in cases(gpus).items():
        sizes, two_kinds = (options.nodes, options.gpus_per_node), name == TWO_KINDS
        runs = [measure(*sizes, placement, two_kinds=two_kinds) for _ in range(options.rounds)]
        medians = [statistics.median(run[column] for run in runs) for column in COLUMNS]
        plans = [run["plan"] for run in runs]
        cells = "".join(f"{median:>10.3f}" for median in medians)
        print(f"{name:<27}{cells}   {min(plans):.3f} - {max(plans):.3f}")
        seconds[name] = runs
    for column, target in TARGETS_S.items():
        slowest = max(statistics.median(run[column] for run in runs) for runs in seconds.values())
        print(f"target: a {column} in {target:g} s: {'met' if slowest < target else 'missed'} ({slowest:.1f} s)")
    write_json(options.json, {"options": vars(options), "machine": found, "seconds": seconds})


if __name__ == "__main__":
    main()
