"""Seconds of a PPO step under the Ray runtime beside the local one, everything on one device.

Both run the shipped config with the same seed, so they compute the same steps: in threads of one process, or in a Ray
actor that the runner calls. What differs is the way of calls, results and batches. Not covered: placements on several
devices, which the local runtime does not run.

    python benchmarks/runtime.py [--config configs/embodied/cartpole.yaml] [--rounds 10] [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import _common as common

ROOT = Path(__file__).parents[1]
TARGET = 0.909  # of the local runtime's speed: a tenth more per step


def run(turns: common.Turns, settings: argparse.Namespace) -> None:
    common.train_ours(turns, settings.config, [f"cluster.runtime={settings.runtime}"])


def main() -> None:
    parser = common.new_parser(__doc__, rounds=10)
    parser.add_argument("--config", default=str(ROOT / "configs" / "embodied" / "cartpole.yaml"))
    options = parser.parse_args()
    rounds = 2 if options.quick else options.rounds
    found = common.machine(["torch", "ray"])
    entries = {
        name: common.Entry(run, argparse.Namespace(config=options.config, runtime=name), options.threads)
        for name in ("local", "ray")
    }
    laps = common.race(entries, options.warm_up, rounds)
    for name, own in laps.items():
        print(f"{name}: {statistics.median(lap.seconds for lap in own) * 1000:,.0f} ms a step")
        common.print_phases(own)
    common.print_verdict("speed of ray beside local", common.ratios(laps["ray"], laps["local"]), TARGET)
    common.write_json(options.json, {"machine": found, "laps": laps})


if __name__ == "__main__":
    main()
