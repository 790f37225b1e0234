"""Margins of the learning tests: the runs of tests/integration over seeds and processor settings, beside their limits.

    python benchmarks/margins.py                    # every claim, seeds 1 to 5; writes docs/results/margins.md
    python benchmarks/margins.py last_digit --seeds 1 2 3 4 5 6 7 8 9 10
    python benchmarks/margins.py cartpole --variants avx2 --output /tmp/margins.md

A margin is the distance from the mean over all runs to the limit, in standard deviations over these runs. A learning
test needs at least three; with a deviation of zero every run gave the same value. Runs stay in `--runs`: a finished
run is not repeated, so that seeds and variants can be added later. The page contains every claim that has finished
runs there. The variants stand for other processors: they change the number of threads or the instruction set of
oneDNN, and with them the rounding. Not covered: GPUs, and the accuracy of the claims on processors without AVX2.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from _common import machine

from rl_platform.metrics import read_metrics

ROOT = Path(__file__).parents[1]
CODE = "from rl_platform.launch.cli import main; main()"
QUIET = "runner.trace_steps=0", "runner.logger_backends=[]"
VARIANTS = {
    "threads": {},  # as many threads as the machine has cores
    "one": {"OMP_NUM_THREADS": "1"},
    "avx2": {"OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx512": {"OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
}


@dataclass(frozen=True)
class Limit:
    """`metric` on average over `count` reports, the first ones or (negative) the last ones, against `value`."""

    metric: str
    count: int
    sign: str  # ">", ">=" or "<"
    value: float

    def measured(self, rows: Sequence[dict[str, float]]) -> float:
        found = [row[self.metric] for row in rows if self.metric in row]
        return statistics.mean(found[: self.count] if self.count > 0 else found[self.count :])

    def __str__(self) -> str:
        reports = "" if abs(self.count) == 1 else f"{abs(self.count)} "
        return f"{'first' if self.count > 0 else 'last'} {reports}`{self.metric}` {self.sign} {self.value:g}"


@dataclass(frozen=True)
class Claim:
    """A config as a test runs it, and what the test asks of its metrics."""

    config: str
    limits: tuple[Limit, ...]
    overrides: tuple[str, ...] = ()


BRIEF = ("runner.max_steps=30", "runner.val_check_interval=0", "env.evaluation.episodes=4")
TENSOR_RANKS = (
    "cluster={devices_per_node: 4, component_placement: {actor: 0-1, critic: 2-3, 'rollout,reward': 0}}",
    *(f"{role}.{key}" for role in ("actor", "critic") for key in ("training_backend=megatron", "parallel={tensor: 2}")),
    *(f"{role}.optim={{lr: 1.0e-3, lr_warmup_steps: 10}}" for role in ("actor", "critic")),
)
CLAIMS = {
    "last_digit": Claim(
        "reasoning/ppo_tiny.yaml", (Limit("val/accuracy", 1, "<", 0.2), Limit("val/accuracy", -1, ">", 0.9))
    ),
    "megatron": Claim(
        "reasoning/ppo_tiny.yaml",
        (Limit("val/accuracy", 1, "<", 0.1), Limit("reward/mean", 5, "<", 0.02), Limit("reward/mean", -5, ">", 0.2)),
        (*TENSOR_RANKS, "runner.max_steps=100"),
    ),
    "calculator": Claim(
        "reasoning/multi_turn.yaml",
        (Limit("val/accuracy", 1, "<", 0.1), Limit("tool/calls", -1, ">", 0.9), Limit("val/accuracy", -1, ">", 0.3)),
    ),
    "cartpole": Claim("embodied/cartpole.yaml", (Limit("val/return", 1, "<", 100), Limit("val/return", -1, ">=", 475))),
    "remembers": Claim(
        "embodied/masked_cartpole.yaml", (Limit("val/return", 1, "<", 100), Limit("val/return", -1, ">", 400)), BRIEF
    ),
    "forgets": Claim(
        "embodied/masked_cartpole.yaml",
        (Limit("val/return", -1, "<", 100),),
        (*BRIEF, "actor.model={hidden_sizes: [64, 64]}"),
    ),
    "pixels": Claim(
        "embodied/pixels.yaml",
        (Limit("episode/return", 1, "<", 12), Limit("episode/return", -1, ">", 15)),
        ("runner.max_steps=20", "env.evaluation.episodes=1"),
    ),
}


def make(claim: Claim, seed: int, variant: str, overrides: Sequence[str], folder: Path) -> None:
    """Runs the claim's config once, unless `folder` has a finished run. Raises SystemExit if the run fails."""
    settings = [claim.config, *claim.overrides, *QUIET, *overrides, f"runner.seed={seed}"]
    made = folder / "made.json"
    if made.exists():
        if json.loads(made.read_text(encoding="utf-8"))["settings"] != settings:
            raise SystemExit(f"{folder} has a run of other settings: remove it, or choose another folder with --runs")
        return
    print(f"{folder}: running", flush=True)
    command = [sys.executable, "-c", CODE, str(ROOT / "configs" / claim.config), *settings[1:]]
    began = time.perf_counter()
    clean = {name: value for name, value in os.environ.items() if name not in VARIANTS["avx2"]}
    ended = subprocess.run(
        [*command, f"runner.output_dir={folder}"], stdout=subprocess.DEVNULL, env=clean | VARIANTS[variant], check=False
    )
    if ended.returncode:
        raise SystemExit(f"{folder}: the run ended with exit code {ended.returncode}")
    seconds = time.perf_counter() - began
    made.write_text(json.dumps({"settings": settings, "seconds": round(seconds, 1)}), encoding="utf-8")


def table(runs: Path) -> list[str]:
    """A line for each limit of each claim that has finished runs."""
    lines = [
        "| claim | limit | runs | lowest | mean | highest | margin |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, claim in CLAIMS.items():
        found = [read_metrics(made.parent) for made in sorted(runs.glob(f"{name}/*/made.json"))]
        for limit in claim.limits if found else ():
            values = [limit.measured(rows) for rows in found]
            mean, deviation = statistics.mean(values), statistics.stdev(values) if len(values) > 1 else math.nan
            numbers = (f"{number:.4g}" for number in (min(values), mean, max(values)))
            cells = [name, str(limit), str(len(values)), *numbers, margin(limit, mean, deviation)]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def margin(limit: Limit, mean: float, deviation: float) -> str:
    """Deviations between mean and limit; negative on the wrong side."""
    distance = limit.value - mean if limit.sign == "<" else mean - limit.value
    if deviation == 0:
        return "all equal" if distance > 0 or (distance == 0 and limit.sign == ">=") else f"{-math.inf}"
    return f"{distance / deviation:.1f}"


def page(runs: Path, packages: Sequence[str]) -> str:
    where = machine(packages)
    versions = ", ".join(f"{package} {version}" for package, version in where["versions"].items())
    names = ", ".join(sorted({made.parent.name.split("-")[0] for made in runs.glob("*/*/made.json")}))
    return "\n".join(
        [
            "# Margins of the learning tests",
            "",
            "A margin is the distance from the mean of the runs to a test's limit, in standard deviations; at least",
            f"three are needed. The runs differ in seed and processor settings ({names}). Configs:",
            "[margins.py](../../benchmarks/margins.py).",
            "",
            *table(runs),
            "",
            f"Made with `python benchmarks/margins.py`, {where['cpu']}, {where['cores']} cores, Python "
            f"{where['python']}, {versions}, {datetime.now(UTC).date().isoformat()}.",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("claims", nargs="*", metavar="CLAIM", help=f"of {', '.join(CLAIMS)}; none: all of them")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["one", "avx2"])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the config")
    parser.add_argument("--runs", type=Path, default=Path("runs/margins"))
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "results" / "margins.md")
    options = parser.parse_args()
    if unknown := [name for name in options.claims if name not in CLAIMS]:
        parser.error(f"no such claim: {', '.join(unknown)} (there are {', '.join(CLAIMS)})")
    runs = options.runs.absolute()
    for name in options.claims or CLAIMS:
        for variant in options.variants:
            for seed in options.seeds:
                make(CLAIMS[name], seed, variant, options.set, runs / name / f"{variant}-{seed}")
    options.output.write_text(page(runs, ("torch", "gymnasium", "mujoco", "numpy")), encoding="utf-8")
    print(options.output)


if __name__ == "__main__":
    main()
