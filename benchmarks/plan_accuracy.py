"""Error of `--plan`: predicted beside measured seconds of a step and its phases, and peak memory.

    python benchmarks/plan_accuracy.py                      # all cases; writes docs/results/plan_accuracy.md
    python benchmarks/plan_accuracy.py --only tiny cartpole --output /tmp/page.md

Every case is predicted three times before it runs:

* data sheet: nothing is measured.
* machine: with the measurement of `--plan=calibrate`.
* run: with that measurement and `--calibrate` of another case, the base of its family. A base itself is not counted.

A case is a process of its own; the first of its steps is a warm-up, the others give medians. Runs and measurements stay
in `--runs` and are not repeated, so another call continues. After `--minutes` no further case begins. The page is
written after each case; docs/results/README.md needs a link to it. The layouts of one config are also ranked: the
predicted best one is compared with the measured best one. Not covered: GPUs, several machines, hosted engines.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from _common import machine, write_page

from rl_platform.environment_variables import changed_variables
from rl_platform.errors import ConfigError
from rl_platform.launch.placed_config import load
from rl_platform.launch.plans.plan_forms import plan
from rl_platform.metrics import read_metrics
from rl_platform.placement.estimates.hardware import device_of
from rl_platform.planner.calibration import read_measured
from rl_platform.planner.rates import fingerprint, stored_machine

ROOT = Path(__file__).parents[1]
CODE = "from rl_platform.launch.cli import main; main()"
QUIET = ("runner.trace_steps=0", "runner.logger_backends=[]", "runner.val_check_interval=0", "runner.save_interval=0")
GIB = 2**30
BASES = ("data sheet", "machine", "run")


@dataclass(frozen=True)
class Case:
    """A config with overrides. base: the case whose run calibrates it; empty for the base of a family."""

    config: str
    base: str = ""
    overrides: tuple[str, ...] = ()
    steps: int = 12


def workers(count: int, placement: str) -> tuple[str, ...]:
    return f"cluster.devices_per_node={count}", f"cluster.component_placement={{{placement}}}"


TINY, ROBOT = "reasoning/ppo_tiny.yaml", "embodied/ppo.yaml"
SIZES = "hidden_size: 384, num_layers: 6, num_heads: 6, intermediate_size: 1536, max_positions: 192"
LONG = (f"actor.model.random_init={{{SIZES}}}", "data.max_response_length=32")
DEEP = "actor.model.random_init.num_layers=12"
ONE_MODEL = ("critic.use_critic_model=false", "cluster.component_placement={'actor,rollout,reward': all}")
ROBOT_FEW = ("env.evaluation.video=false",)
LAYOUTS = {
    "one process": (),
    "all on two workers": workers(2, "'actor,critic,rollout,reward': all"),
    "rollout apart": workers(2, "'actor,critic,reward': 0, rollout: 1"),
    "critic apart": workers(2, "'actor,rollout,reward': 0, critic: 1"),
    "actor apart": workers(2, "'critic,rollout,reward': 0, actor: 1"),
    "learners on both, rollout on one": workers(2, "'actor,critic': 0-1, 'rollout,reward': 1"),
}
CASES = {
    "tiny": Case(TINY, steps=30),
    "tiny, 4 x the prompts": Case(TINY, "tiny", ("data.train_batch_size=512", "data.mini_batch_size=256"), 12),
    "tiny, small mini-batches": Case(TINY, "tiny", ("data.mini_batch_size=16",), 20),
    "tiny, two epochs": Case(TINY, "tiny", ("algorithm.ppo_epochs=2",), 20),
    "large": Case(TINY, "", LONG, 6),
    **{
        f"large, {name}": Case(TINY, "large", (*LONG, *overrides), 5)
        for name, overrides in LAYOUTS.items()
        if overrides
    },
    "robot": Case(ROBOT, "", ROBOT_FEW, 8),
    "robot, 64 environments": Case(ROBOT, "robot", (*ROBOT_FEW, "env.num_envs=64"), 8),
    "robot, wide policy": Case(ROBOT, "robot", (*ROBOT_FEW, "actor.model.hidden_sizes=[256, 256]"), 6),
    "robot, long rollouts": Case(ROBOT, "robot", (*ROBOT_FEW, "env.rollout_steps=256"), 6),
    "cartpole": Case("embodied/cartpole.yaml", "robot", (), 12),
    "large, half of the prompts": Case(TINY, "large", (*LONG, "data.train_batch_size=64"), 6),
    "large, short responses": Case(TINY, "large", (*LONG, "data.max_response_length=8"), 6),
    "large, deeper": Case(TINY, "large", (*LONG, DEEP), 5),
    "large, 4 samples of a prompt": Case(
        TINY,
        "large",
        (*LONG, "algorithm.adv_type=grpo", "algorithm.group_size=4", "data.train_batch_size=32", *ONE_MODEL),
        6,
    ),
    "robot, Walker2d": Case(ROBOT, "robot", (*ROBOT_FEW, "env.id=Walker2d-v5"), 8),
}


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step and its phases, and bytes of the fullest device with sequences of mean length."""

    step: float
    phases: dict[str, float]
    memory: float


@dataclass(frozen=True)
class Result:
    """A case: the median of its steps, of their phases, its peak memory, and the predictions by basis."""

    name: str
    step: float
    phases: dict[str, float]
    memory: float
    predicted: dict[str, Prediction]


def cache(folder: Path) -> AbstractContextManager[None]:
    """Machine measurements are read from and written to this folder."""
    return changed_variables({"RL_PLATFORM_CACHE": str(folder)})


def settings_of(case: Case) -> list[str]:
    return [*QUIET, *case.overrides, f"runner.max_steps={case.steps}"]


def predict(case: Case, calibrate: Path | None = None) -> Prediction:
    planned = load(str(ROOT / "configs" / case.config), settings_of(case))
    report: dict[str, Any] = json.loads(plan("json", planned, calibrate=None if calibrate is None else str(calibrate)))
    phases = {one["phase"]: one["seconds"] for one in report["step"]["phases"] if not one["note"]}
    # a run reports the peak of its largest process, so a device that several processes share is left out
    keys = {name: part["process"] for name, part in report["components"].items()}
    alone = [device for device in report["devices"] if len({keys[name] for name in device["ranks"]}) == 1]
    peak = max(device["memory_bytes"]["expected"] for device in alone)
    return Prediction(report["step"]["seconds"], phases, peak)


def run(case: Case, folder: Path) -> None:
    """Runs the case once. Raises SystemExit if the run fails or `folder` has a run of other settings."""
    made, settings = folder / "made.json", [case.config, *settings_of(case)]
    if made.exists():
        if json.loads(made.read_text(encoding="utf-8")) != settings:
            raise SystemExit(f"{folder} has a run of other settings: remove it, or choose another folder with --runs")
        return
    shutil.rmtree(folder, ignore_errors=True)
    config = str(ROOT / "configs" / case.config)
    command = [sys.executable, "-c", CODE, config, *settings[1:], f"runner.output_dir={folder}"]
    ended = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    if ended.returncode:
        raise SystemExit(f"{folder}: the run ended with exit code {ended.returncode}")
    made.write_text(json.dumps(settings), encoding="utf-8")


def measure(case: Case) -> None:
    """Measures the machine once, and what the case needs: its prompts or policy, and transfers."""
    loaded, _, inventory = load(str(ROOT / "configs" / case.config), settings_of(case))
    machine = stored_machine(device_of(inventory), inventory)
    kinds = {"policies": "policy"} if loaded.config.runner.task_type == "embodied" else {"prompts": "data"}
    known = machine is not None and all(fingerprint(loaded.config, of) in machine.tree[at] for at, of in kinds.items())
    if not known or (inventory.num_accelerators > 1 and not machine.tree["all_reduce"]):
        # a process of its own, as for a user: an embodied policy leaves settings of torch's threads behind
        command = [sys.executable, "-c", CODE, str(ROOT / "configs" / case.config), *settings_of(case)]
        subprocess.run([*command, "--plan=calibrate"], stdout=subprocess.DEVNULL, check=True)


def result_of(name: str, case: Case, runs: Path) -> Result:
    """Predicts the case, runs it, and reads what it took."""
    with cache(runs / "no measurements"):
        predicted = {"data sheet": predict(case)}
    with cache(runs / "measurements"):
        measure(case)
        predicted["machine"] = predict(case)
        if case.base:
            predicted["run"] = predict(case, folder_of(case.base, runs))
    folder = folder_of(name, runs)
    run(case, folder)
    measured = read_measured(folder)
    peak = max(row.get("perf/memory_peak", 0.0) for row in read_metrics(folder)) * GIB
    return Result(name, measured.seconds["step"], dict(measured.seconds), peak, predicted)


def folder_of(name: str, runs: Path) -> Path:
    return runs / "".join(letter if letter.isalnum() else "_" for letter in name)


def error(predicted: float, measured: float) -> float:
    """Of the prediction, as a share of the measured value; negative if it is too low."""
    return predicted / measured - 1


def errors_of(results: Sequence[Result], basis: str, value: Callable[[Prediction | Result], float]) -> list[float]:
    return [error(value(one.predicted[basis]), value(one)) for one in results if basis in one.predicted]


def step_table(results: Sequence[Result]) -> Iterator[str]:
    yield "| case | measured s | " + " | ".join(BASES) + " | peak GiB | predicted |"
    yield "|---|---|" + "---|" * (len(BASES) + 2)
    for one in results:
        errors = [f"{error(one.predicted[b].step, one.step):+.0%}" if b in one.predicted else "" for b in BASES]
        memory = f"{one.memory / GIB:.2f} | {error(one.predicted['machine'].memory, one.memory):+.0%}"
        yield f"| {one.name} | {one.step:.3g} | {' | '.join(errors)} | {memory} |"


def summary_table(results: Sequence[Result]) -> Iterator[str]:
    yield "| error of | basis | mean absolute error | worst |"
    yield "|---|---|---|---|"
    for basis in BASES:
        for what, value in (("a step", lambda one: one.step), ("memory", lambda one: one.memory)):
            found = errors_of(results, basis, value)
            if found and (what == "a step" or basis == "machine"):
                mean, worst = statistics.mean(map(abs, found)), max(found, key=abs)
                yield f"| {what} | {basis} | {mean:.0%} | {worst:+.0%} |"


def phase_table(results: Sequence[Result]) -> Iterator[str]:
    """Yields the mean of the absolute errors of each phase, over the cases that have it."""
    yield "| phase | " + " | ".join(BASES) + " |"
    yield "|---|" + "---|" * len(BASES)
    cases: dict[str, list[Result]] = {}
    for one in results:
        for phase in one.predicted["machine"].phases:
            if one.phases.get(phase):
                cases.setdefault(phase, []).append(one)
    for phase, having in cases.items():
        errors = (errors_of(having, basis, lambda one, phase=phase: one.phases[phase]) for basis in BASES)
        cells = (f"{statistics.mean(map(abs, each)):.0%}" if each else "" for each in errors)
        yield f"| {phase} | {' | '.join(cells)} |"


def ranking(results: Sequence[Result]) -> Iterator[str]:
    layouts = [one for one in results if one.name == "large" or one.name.removeprefix("large, ") in LAYOUTS]
    if len(layouts) < 2:
        return
    best = min(layouts, key=lambda one: one.step)

    def predicted(one: Result, basis: str) -> float:
        # the run that calibrates is known
        return one.predicted[basis].step if basis in one.predicted else one.step

    yield "| basis | chosen layout | slower than the best |"
    yield "|---|---|---|"
    for basis in BASES:
        chosen = min(layouts, key=lambda one: predicted(one, basis))
        yield f"| {basis} | {chosen.name} | {chosen.step / best.step - 1:.0%} |"


def page(results: Sequence[Result]) -> str:
    where = machine(["torch"])
    made = f"Made with `python benchmarks/plan_accuracy.py`, {where['cpu']}, {where['cores']} cores, torch "
    made += (
        f"{where['versions']['torch']}, {datetime.now(UTC).date().isoformat()}: {len(results)} of {len(CASES)} cases."
    )
    lines = ["# Error of the plan", "", made, ""]
    lines += [
        "[--plan](../placement.md#calibrate-the-plan) beside medians of real runs: by data sheets with nothing",
        "measured, by this machine as `--plan=calibrate` measured it, and by a run of the first case of the family",
        "(`--calibrate`).",
        "",
    ]
    for title, rows in (
        ("Summary", summary_table(results)),
        ("Steps and memory", step_table(results)),
        ("Chosen layouts of large", ranking(results)),
        ("Mean absolute errors by phase", phase_table(results)),
    ):
        lines += [f"## {title}", "", *rows, ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="CASE", choices=CASES, help="cases; their bases run as well")
    parser.add_argument("--runs", type=Path, default=Path("runs/plan_accuracy"), help="folder of the runs")
    parser.add_argument("--minutes", type=float, default=11, help="after them no further case begins")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/results/plan_accuracy.md")
    given = parser.parse_args()
    wanted = given.only or [*CASES]
    wanted = [name for name in CASES if name in wanted or any(CASES[one].base == name for one in wanted)]
    results, began = list[Result](), time.monotonic()
    for name in wanted:
        if time.monotonic() - began > 60 * given.minutes:
            print(f"{len(wanted) - len(results)} cases are left out after {given.minutes:g} minutes; call it again")
            break
        try:
            results.append(result_of(name, CASES[name], given.runs))
        except ConfigError as problem:
            raise SystemExit(f"{name}: {problem}") from None
        print(f"{name}: {results[-1].step:.3g} s a step, {time.monotonic() - began:.0f} s so far", flush=True)
        write_page(given.output, page(results))


if __name__ == "__main__":
    main()
