"""Seconds of a PPO step and idle shares of devices for `runner.max_staleness` 0, 1, 2, 4, beside the plan's.

A small language model on two CPU workers: `actor,critic` on one, `rollout,reward` on the other, one thread each. Runs
of all k follow one another, `--rounds` times. A component is busy while it runs a call; the reward, whose calls wait
for responses, does not count. Loads: steps of equal work; dynamic sampling, whose steps take a varying number of
rounds; HalfCheetah with `actor_critic` on one worker and `rollout,env` on the other. Not covered: what a step teaches
(docs/staleness.md has the accuracy), GPUs.

    python benchmarks/staleness.py [--rounds 1] [--only HalfCheetah] [--json FILE]
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from _common import machine, new_parser, write_json

from rl_platform.config import load_config
from rl_platform.metrics import read_metrics
from rl_platform.placement.inventory import inventory_for
from rl_platform.placement.scheduler import schedule
from rl_platform.planner.report import plan_report

CONFIGS = Path(__file__).parents[1] / "configs"
KEYS = (
    "cluster.devices_per_node=2",
    "algorithm.rollout_is={}",
    "runner.val_check_interval=0",
    "runner.logger_backends=[]",
    "runner.trace_steps=0",
)
REASONING = (
    "cluster.component_placement={'actor,critic': 0, 'rollout,reward': 1}",
    "algorithm.entropy_bonus=0.0",
    "data.train_batch_size=64",
    "data.mini_batch_size=32",
    "data.max_response_length=12",
)
LOADS = {
    "equal steps": ("reasoning/ppo_tiny.yaml", *REASONING),
    "dynamic sampling": (
        "reasoning/ppo_tiny.yaml",
        *REASONING,
        "algorithm.group_size=2",
        "data.train_batch_size=32",
        "algorithm.dynamic_sampling={prompts_per_round: 24, max_rounds: 8, on_exhausted: fill_with_rejected}",
        "reward.type=length_parity:score",
    ),
    "HalfCheetah": (
        "embodied/ppo.yaml",
        "cluster.component_placement={actor_critic: 0, 'rollout,env': 1}",
        "runner.save_interval=0",
        "env.evaluation.video=false",
    ),
}
REWARD = "def score(response, answer, metadata):\n    return float(len(response.encode()) % 2 == 0)\n"
AHEAD = (0, 1, 2, 4)
SKIPPED = 6  # steps at the start: the first ones only fill the buffer


def keys_of(load: str, ahead: int) -> tuple[str, ...]:
    """The config and the keys of its run. Embodied runs take no correction without staleness."""
    config, *keys = LOADS[load]
    corrected = [key for key in KEYS if ahead or "rollout_is" not in key or "embodied" not in config]
    return (str(CONFIGS / config), *corrected, *keys, f"runner.max_staleness={ahead}")


def measured(load: str, ahead: int, steps: int) -> dict[str, float]:
    """Mean seconds of a step, the idle share of each side, and rollouts that were ready when a step began."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "length_parity.py").write_text(REWARD)
        config, *keys = keys_of(load, ahead)
        keys.append(f"runner.max_steps={steps}")
        command = [sys.executable, "-c", "from rl_platform.launch.cli import main; main()", config, *keys]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": folder}
        command.append("runner.output_dir=out")
        run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if run.returncode:
            raise SystemExit(
                f"{load}, k = {ahead}: exit code {run.returncode}\n{run.stdout[-2000:]}{run.stderr[-8000:]}"
            )
        rows = read_metrics(Path(folder, "out"))[1 + SKIPPED : -1]  # the last one validates
    total = sum(row["time/step"] for row in rows)
    sides = {"training": ("time/actor.", "time/actor_critic.", "time/critic.")}
    sides["generation"] = ("time/env.",) if load == "HalfCheetah" else ("time/rollout.",)
    busy = {side: sum(row[name] for row in rows for name in row if name.startswith(of)) for side, of in sides.items()}
    idle = {f"idle {side}": 1 - seconds / total for side, seconds in busy.items()}
    return {
        "seconds": total / len(rows),
        **idle,
        "age": statistics.mean(row.get("staleness/mean", 0.0) for row in rows),
        "ready": statistics.mean(row.get("perf/rollouts_ready", math.nan) for row in rows),  # NaN: not recorded
    }


def planned(load: str, ahead: int) -> dict[str, float]:
    """The same by the plan with the rates of data sheets, without the rollouts that are ready.

    k = 0 is the alternating step of the plan of k = 1.
    """
    path, *keys = keys_of(load, max(ahead, 1))
    config = load_config(Path(path), keys).config
    inventory = inventory_for(config.cluster)
    report = plan_report(config, schedule(config.cluster, inventory), inventory)
    found = report.overlap
    assert found is not None
    seconds, idle = (found.seconds, found.idle) if ahead else (report.seconds, found.alternating)
    return {
        "seconds": seconds,
        "idle training": idle["actor_critic" if "actor_critic" in idle else "actor"],
        "idle generation": idle["rollout"],
        "age": found.staleness if ahead else 0,
    }


def main() -> None:
    parser = new_parser(__doc__, rounds=1)
    parser.add_argument("--only", choices=LOADS, help="this load alone")
    options = parser.parse_args()
    steps = SKIPPED + (3 if options.quick else 20)
    found = {"machine": machine(["torch", "ray"])}
    for load in [options.only] if options.only else LOADS:
        runs: dict[int, list[dict[str, float]]] = {ahead: [] for ahead in AHEAD}
        for _ in range(options.rounds):
            for ahead in AHEAD:
                runs[ahead].append(measured(load, ahead, steps))
        plans = {ahead: planned(load, ahead) for ahead in AHEAD}
        print(f"{load:18}  k  step      idle (planned): training    generation   age (planned)  rollouts ready")
        for ahead in AHEAD:
            row = {name: statistics.median(run[name] for run in runs[ahead]) for name in runs[ahead][0]}
            sides = ("idle training", "idle generation")
            shares = "  ".join(f"{f'{row[side]:.0%} ({plans[ahead][side]:.0%})':>12}" for side in sides)
            age = f"{row['age']:.1f} ({plans[ahead]['age']:.0f})"
            print(f"{'':18}  {ahead}  {row['seconds'] * 1e3:4.0f} ms  {shares:>36}  {age:>13}  {row['ready']:14.1f}")
        found[load] = {"measured": runs, "planned": plans}
    write_json(options.json, found)


if __name__ == "__main__":
    main()
