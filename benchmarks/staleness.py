"""What `runner.max_staleness` k gains and costs: pace of a step, idle workers, and learning curves for k 0, 1, 2, 4, 8.

    python benchmarks/staleness.py pace       # every load once with each k: needs a quiet machine, about 9 minutes
    python benchmarks/staleness.py curves     # three seeds of each task with each k: about 40 minutes of one core
    python benchmarks/staleness.py            # both; writes docs/results/max_staleness.md and its picture
    python benchmarks/staleness.py simulate --lengths RUN   # half a minute: 64 and 1,024 GPUs, into the same page

Pace: seconds of a step, and the share of the time in which a CPU worker runs no call, beside the plan's with the rates
of this machine (`--plan=calibrate`). The reward, whose calls wait for responses, does not count as work. Curves: greedy
validation. Runs stay in `--runs` and are not repeated, so another call continues; after `--minutes` no further run
begins. A table of the page stays as it is if `--runs` has no runs of it.
Simulated: the run of a recipe whose rollout has half of the GPUs, by the plan with data sheets. The responses of each
step are drawn from those in `RUN/samples.jsonl` (`runner.log_samples`), scaled so that the longest one has
`data.max_response_length` tokens. RUN of the page: six steps of `ppo_tiny.yaml` with `data.max_response_length=512
actor.model.random_init.max_positions=640 data.train_batch_size=64 runner.log_samples=64`.
Not covered: measurements on GPUs, and other correction than truncated importance weights.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from _common import machine
from _simulated_clusters import FILL, SIMULATED, simulated
from plan_accuracy import ROOT, Case, cache, folder_of, measure, run, settings_of, workers

from rl_platform.launch.placed_config import load
from rl_platform.launch.plans.plan_forms import plan
from rl_platform.launch.tools.plot import Curve, median_curve, read_curve
from rl_platform.launch.tools.timeline import covered, read_lanes, shown
from rl_platform.metrics import read_metrics

AHEAD = (0, 1, 2, 4, 8)
SEEDS = (1, 2, 3)
MEASURED = 16  # steps after those that fill the buffer
CORRECTED = "algorithm.rollout_is={}"
REWARD = "def score(response, answer, metadata):\n    return float(len(response.encode()) % 2 == 0)\n"
TINY, ROBOT = "reasoning/ppo_tiny.yaml", "embodied/ppo.yaml"
EQUAL = (
    "algorithm.entropy_bonus=0.0",
    "data.train_batch_size=64",
    "data.mini_batch_size=32",
    "data.max_response_length=12",
)
VARIED = (
    *EQUAL,
    "algorithm.group_size=2",
    "data.train_batch_size=32",
    "algorithm.dynamic_sampling={prompts_per_round: 24, max_rounds: 8, on_exhausted: fill_with_rejected}",
)


@dataclass(frozen=True)
class Load:
    """A config on CPU workers. on: the components of each worker; more: what its title says."""

    config: str
    on: tuple[tuple[str, ...], ...]
    keys: tuple[str, ...]
    more: str = ""

    @property
    def placement(self) -> str:
        return ", ".join(f"{','.join(names)}: {number}" for number, names in enumerate(self.on))


APART = ("actor", "critic"), ("rollout", "reward")
LOADS = {
    "one worker": Load(TINY, (("actor", "critic", "rollout", "reward"),), EQUAL),
    "rollout apart": Load(TINY, APART, EQUAL),
    "critic apart": Load(TINY, (("actor", "rollout", "reward"), ("critic",)), EQUAL),
    "rollout apart, dynamic sampling": Load(TINY, APART, VARIED, "steps take a varying number of rounds"),
    "environments apart": Load(ROBOT, (("actor_critic",), ("rollout", "env")), ("env.evaluation.video=false",)),
}


@dataclass(frozen=True)
class Task:
    """A config whose validation is compared. every: steps between validations."""

    config: str
    metric: str
    steps: int
    every: int
    keys: tuple[str, ...] = ()


TASKS = {
    "CartPole": Task("embodied/cartpole.yaml", "val/return", 60, 10, ("env.evaluation.episodes=20",)),
    "HalfCheetah": Task(ROBOT, "val/return", 98, 14, ("env.evaluation.video=false",)),
    "last digit": Task(TINY, "val/accuracy", 160, 20),
}


@dataclass(frozen=True)
class Pace:
    """seconds: of a step; idle: share of each worker; age: mean of the weights, in updates; ready: rollouts that waited
    when a step began, NaN if not recorded."""

    seconds: float
    idle: tuple[float, ...]
    age: float
    ready: float = math.nan


def correction(config: str, ahead: int) -> tuple[str, ...]:
    """Embodied runs take no correction without staleness."""
    return (CORRECTED,) if ahead or "embodied" not in config else ()


def load_case(name: str, ahead: int, runs: Path) -> Case:
    """A run whose last MEASURED steps count. Its prompts do not run out, and it validates after the last step."""
    one = LOADS[name]
    placement = ", ".join(f"'{','.join(names)}': {number}" for number, names in enumerate(one.on))
    keys = [
        *workers(len(one.on), placement),
        *one.keys,
        *correction(one.config, ahead),
        f"runner.max_staleness={ahead}",
    ]
    keys.append(f"runner.trace_steps={FILL + MEASURED - 1}")
    if "dynamic sampling" in name:
        (runs / "length_parity.py").write_text(REWARD, encoding="utf-8")
        keys.append(f"reward.type={runs.absolute() / 'length_parity.py'}:score")
    return Case(one.config, overrides=tuple(keys), steps=FILL + MEASURED)


def task_case(name: str, ahead: int, seed: int) -> Case:
    one = TASKS[name]
    keys = (f"runner.seed={seed}", f"runner.val_check_interval={one.every}", f"runner.max_staleness={ahead}")
    return Case(one.config, overrides=(*keys, *one.keys, *correction(one.config, ahead)), steps=one.steps)


def measured(folder: Path, on: Sequence[Sequence[str]]) -> Pace:
    """The last steps that the run has traced."""
    lanes, counted = read_lanes(folder), MEASURED - 1
    begin, end = shown(lanes, counted)

    def idle(names: Sequence[str]) -> float:
        parts = [name for name in names if name != "reward"]
        calls = (event for part in parts for event in lanes[f"{part}[0]"] if event["cat"] == "call")
        inside = ((max(call["ts"], begin), min(call["ts"] + call["dur"], end)) for call in calls)
        return 1 - covered((first, last - first) for first, last in inside if last > first) / (end - begin)

    rows = read_metrics(folder)[-counted - 1 : -1]  # the last one validates
    return Pace(
        (end - begin) / 1e6 / counted,
        tuple(map(idle, on)),
        statistics.mean(row.get("staleness/mean", 0.0) for row in rows),
        statistics.mean(row.get("perf/rollouts_ready", math.nan) for row in rows),
    )


def planned(name: str, ahead: int, runs: Path) -> Pace:
    """The same by the plan. That of k = 0 is the alternating step in the plan of k = 1."""
    case = load_case(name, max(ahead, 1), runs)
    loaded = load(str(ROOT / "configs" / case.config), settings_of(case))
    step = json.loads(plan("json", loaded))["step"]
    found = step["overlap"]
    seconds, idle = (found["seconds"], found["idle"]) if ahead else (step["seconds"], found["alternating"])
    return Pace(seconds, tuple(idle[names[0]] for names in LOADS[name].on), found["staleness"] if ahead else 0)


def pace_of(name: str, ahead: int, runs: Path) -> tuple[Pace, Pace] | None:
    """Measured and planned; None if it has not run."""
    folder = folder_of(f"{name} {ahead}", runs)
    if not (folder / "made.json").exists():
        return None
    with cache(runs / "measurements"):
        return measured(folder, LOADS[name].on), planned(name, ahead, runs)


def pace_table(name: str, runs: Path) -> Iterator[str]:
    paces = {ahead: found for ahead in AHEAD if (found := pace_of(name, ahead, runs)) is not None}
    if not paces:
        return
    one, day = LOADS[name], made(folder_of(f"{name} {max(paces)}", runs))
    yield title(name)
    yield ""
    yield f"`{one.placement}`, {one.config}{', ' * bool(one.more)}{one.more}, {day}."
    yield ""
    yield (
        "| k | step | planned | steps/s against k = 0 |"
        + "".join(f" idle: {','.join(names)} | planned |" for names in one.on)
        + " age | rollouts ready |"
    )
    yield "|---|---|---|---|" + "---|---|" * len(one.on) + "---|---|"
    for ahead, (ours, plans) in paces.items():
        cells = [str(ahead), f"{ours.seconds * 1e3:.0f} ms", f"{plans.seconds * 1e3:.0f} ms"]
        cells.append(f"{paces[0][0].seconds / ours.seconds:.2f}" if 0 in paces else "")
        for share, predicted in zip(ours.idle, plans.idle, strict=True):
            cells += [f"{share:.0%}", f"{predicted:.0%}"]
        cells += [f"{ours.age:.1f}", "" if math.isnan(ours.ready) else f"{ours.ready:.1f}"]
        yield f"| {' | '.join(cells)} |"
    yield ""


def curves_of(name: str, ahead: int, runs: Path) -> list[Curve]:
    """Of the seeds that have run."""
    folders = (folder_of(f"{name} {ahead} {seed}", runs) for seed in SEEDS)
    made = [folder for folder in folders if (folder / "made.json").exists()]
    return [read_curve(read_metrics(folder), TASKS[name].metric, "step") for folder in made]


def curve_table(name: str, runs: Path) -> Iterator[str]:
    found = {ahead: curves for ahead in AHEAD if (curves := curves_of(name, ahead, runs))}
    if not found:
        return
    task = TASKS[name]
    steps = [int(x) for x, _ in next(iter(found.values()))[0] if x > 0]  # before training k changes nothing
    yield title(name)
    yield ""
    seeds = [len(curves) for curves in found.values()]
    day = made(folder_of(f"{name} {max(found)} {SEEDS[0]}", runs))
    what = f"`{task.config}`, {task.steps} steps, {day}, `{task.metric}`: "
    if max(seeds) == 1:
        yield f"{what}one seed."
    else:
        count = f"{min(seeds)} to {max(seeds)}" if min(seeds) < max(seeds) else str(max(seeds))
        yield f"{what}median over {count} seeds, with the lowest and highest if they differ."
    yield ""
    yield "| k | " + " | ".join(f"step {step}" for step in steps) + " |"
    yield "|---|" + "---|" * len(steps)
    for ahead, curves in found.items():
        cells = []
        for step in steps:
            values = [value for curve in curves for x, value in curve if x == step]
            lowest, middle, highest = (text(part(values)) for part in (min, statistics.median, max))
            cells.append(middle if lowest == highest else f"{middle} ({lowest}, {highest})")
        yield f"| {ahead} | {' | '.join(cells)} |"
    yield ""


def section_of(page: str) -> str:
    """The simulated section of a page; empty if it has none."""
    _, found, rest = page.partition(SIMULATED)
    return found + rest.partition("\n## ")[0].rstrip() + "\n" if found else ""


def title(name: str) -> str:
    return f"### {name[0].upper()}{name[1:]}"


def kept(page: str, heading: str) -> list[str]:
    """Returns the heading and the lines below it of a page; none if the page lacks the heading."""
    lines = page.split("\n")
    if heading not in lines:
        return []
    first = lines.index(heading)
    ends = (number for number in range(first + 1, len(lines)) if lines[number].startswith("#"))
    return lines[first : next(ends, len(lines))]


def made(folder: Path) -> str:
    """Returns the day on which a run ended."""
    return datetime.fromtimestamp((folder / "made.json").stat().st_mtime, UTC).date().isoformat()


def text(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 2 else f"{value:,.0f}"


def draw(path: Path, runs: Path) -> None:
    """Seeds thin, medians thick; a panel for each task, a colour for each k."""
    from matplotlib.figure import Figure

    names = [name for name in TASKS if any(curves_of(name, ahead, runs) for ahead in AHEAD)]
    if not names:
        return
    figure = Figure(figsize=(4.6 * len(names), 3.6), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for number, ahead in enumerate(AHEAD):
            curves = curves_of(name, ahead, runs)
            for curve in curves:
                axes.plot(*zip(*curve, strict=True), color=f"C{number}", linewidth=0.8, alpha=0.3)
            if curves:
                axes.plot(*zip(*median_curve(curves), strict=True), color=f"C{number}", label=f"k = {ahead}")
        axes.set(title=f"{name}: {TASKS[name].metric}", xlabel="step")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=120)


def page(runs: Path, picture: str, before: str) -> str:
    """Returns the page with the runs that were made. before: the present page, whose other tables stay."""
    where = machine(["torch", "ray"])
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    paces = [line for name in LOADS for line in [*pace_table(name, runs)] or kept(before, title(name))]
    curves = [line for name in TASKS for line in [*curve_table(name, runs)] or kept(before, title(name))]
    lines = [
        "# Generation ahead of training: what k gains and costs",
        "",
        f"[`runner.max_staleness: k`](../staleness.md), made with `python benchmarks/staleness.py`, {where['cpu']}, "
        f"{where['cores']} cores, no GPU, {versions}.",
        "",
    ]
    if paces:
        lines += [
            "## Pace",
            "",
            f"{MEASURED - 1} steps after the first {FILL}, on CPU workers that represent GPUs, one run a row. "
            "Planned: `--plan` with the rates of this machine (`--plan=calibrate`). Idle: share of the time without a "
            "call. Other work moves step times more than idle shares.",
            "",
            *paces,
        ]
    if curves:
        lines += ["## Learning", "", f"![Curves for each k]({picture})", "", *curves]
    if section := section_of(before):
        lines.append(section)
    return "\n".join(lines)


def cases(part: str, runs: Path) -> Mapping[str, Case]:
    """The runs of a part, by the name of their folder."""
    if part == "pace":
        return {f"{name} {ahead}": load_case(name, ahead, runs) for name in LOADS for ahead in AHEAD}
    order = ((ahead, seed, name) for name in TASKS for seed in SEEDS for ahead in AHEAD)
    return {f"{name} {ahead} {seed}": task_case(name, ahead, seed) for ahead, seed, name in order}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=("pace", "curves", "simulate"), help="without it: the first two")
    parser.add_argument("--lengths", type=Path, help="simulate: the folder of a run")
    parser.add_argument("--only", help="only runs whose name begins so, such as 'rollout apart' or 'CartPole'")
    parser.add_argument("--runs", type=Path, default=Path("runs/staleness"), help="folder of the runs")
    parser.add_argument("--minutes", type=float, default=60, help="after them no further run begins")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/results/max_staleness.md")
    given = parser.parse_args()
    before = given.output.read_text(encoding="utf-8") if given.output.exists() else ""
    if given.part == "simulate":
        if given.lengths is None or not (given.lengths / "samples.jsonl").is_file():
            raise SystemExit(f"--lengths {given.lengths}: no folder of a run with samples.jsonl")
        section, old = "\n".join(simulated(given.lengths, AHEAD)), section_of(before)
        print(section)
        page_now = before.replace(old, section) if old else f"{before.rstrip()}\n\n{section}"
        given.output.write_text(page_now, encoding="utf-8")
        return
    given.runs.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    parts = [given.part] if given.part else ["pace", "curves"]
    named = {
        name: (part, case)
        for part in parts
        for name, case in cases(part, given.runs).items()
        if name.startswith(given.only or "")
    }
    if not named:
        raise SystemExit(f"--only {given.only}: no run begins so; names: {', '.join([*LOADS, *TASKS])}")
    for name, (part, case) in named.items():
        if time.monotonic() - began > 60 * given.minutes:
            print(f"{given.minutes:g} minutes are over; call it again for {name} and the runs after it")
            break
        if part == "pace":
            with cache(given.runs / "measurements"):
                measure(case)
        run(case, folder_of(name, given.runs))
        print(f"{name}: done, {time.monotonic() - began:.0f} s so far", flush=True)
    picture = given.output.with_suffix(".png")
    draw(picture, given.runs)
    given.output.write_text(page(given.runs, picture.name, before), encoding="utf-8")


if __name__ == "__main__":
    main()
