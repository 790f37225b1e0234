"""What another busy process costs, and what a quiet machine pays for the remedy.

Beside other busy processes the OpenMP threads of a run wait passively (platform/accel/crowded_cores.py). Three jobs
are measured, each with and without this remedy, on the quiet machine and beside processes that only spin:

* reasoning: a PPO step of configs/reasoning/ppo.yaml, of 16 sequences instead of 64.
* embodied: a PPO step of configs/embodied/ppo.yaml.
* rollout: the built-in engine generates 16 responses of 64 tokens.

The remedy takes effect after one to two seconds, so short laps are measured three seconds after the neighbour's start.
A fair scheduler leaves C threads C / (C + N) of C cores beside N neighbours: on two cores one neighbour costs at least
1.5 times. Not covered: Ray, GPUs, SGLang, neighbours that use part of a core.

    python benchmarks/neighbour.py [--jobs reasoning embodied rollout] [--neighbours 1] [--rounds 3] [--quick]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import _common as common
import rollout
from runtime import ROOT

from rl_platform.runtime.cpu import keep_freed_memory

SETTLES_S = 3.0
SHIPPED, WITHOUT = "as shipped", "without"
MOST_BESIDE, LEAST_QUIET = 2.5, 0.97
OVERRIDES = {"reasoning": ["data.train_batch_size=16", "data.mini_batch_size=16", "data.val_size=1"], "embodied": []}


def training(turns: common.Turns, settings: argparse.Namespace) -> None:
    config = str(ROOT / "configs" / settings.job / "ppo.yaml")
    common.train_ours(turns, config, OVERRIDES[settings.job], _prepare(settings))


def generation(turns: common.Turns, settings: argparse.Namespace) -> None:
    _prepare(settings)()
    rollout.ours(turns, settings)


JOBS = {"reasoning": training, "embodied": training, "rollout": generation}


def _prepare(settings: argparse.Namespace) -> Callable[[], None]:
    return common.prepare_cpu if settings.name == SHIPPED else keep_freed_memory


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """So many processes that keep a core each busy."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def settled(run_lap: Callable[[], common.Lap]) -> float:
    """Seconds of a lap once there was time to adapt; of the only one if it takes longer."""
    began, found = time.monotonic(), list[float]()
    while time.monotonic() < began + 2 * SETTLES_S:
        late = time.monotonic() >= began + SETTLES_S
        seconds = run_lap().seconds
        found = [*(found if late else []), seconds]
    return statistics.median(found)


def measure(job: str, options: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """Quiet and crowded seconds of each round, as shipped and without the remedy."""
    entries = {
        name: common.Entry(
            JOBS[job], argparse.Namespace(job=job, name=name, count=16, tokens=64, mixed=False), options.threads
        )
        for name in (SHIPPED, WITHOUT)
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in entries}
    with common.contestants(entries) as run_lap:
        for number in range(options.warm_up + options.rounds):
            for name in list(entries)[:: -1 if number % 2 else 1]:
                quiet = settled(lambda name=name: run_lap(name))
                with neighbours(options.neighbours):
                    crowded = settled(lambda name=name: run_lap(name))
                if number >= options.warm_up:
                    found[name].append((quiet, crowded))
    return found


def main() -> None:
    parser = common.new_parser(__doc__, rounds=3)
    parser.add_argument("--jobs", nargs="+", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--neighbours", type=int, default=1, help="processes that keep a core busy each")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.warm_up = 1, 0
    found = {"machine": common.machine(["torch"])}
    for job in options.jobs:
        found[job] = seconds = measure(job, options)
        print(f"\n{job}, {options.neighbours} neighbour(s)")
        for name, rounds in seconds.items():
            quiet, crowded = (statistics.median(times) for times in zip(*rounds, strict=True))
            print(f"  {name}: quiet {quiet:.3g} s, crowded {crowded:.3g} s a lap: {crowded / quiet:.2f} times")
        shipped, without = seconds[SHIPPED], seconds[WITHOUT]
        common.print_verdict("  speed beside the neighbour", [q / c for q, c in shipped], 1 / MOST_BESIDE)
        pairs = zip(shipped, without, strict=True)
        common.print_verdict("  speed on the quiet machine", [b[0] / a[0] for a, b in pairs], LEAST_QUIET)
    common.write_json(options.json, found)


if __name__ == "__main__":
    main()
