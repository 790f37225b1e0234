"""Results of the shipped embodied configs, from runs on this machine: a page, a learning curve and a table for each.

    python benchmarks/results.py                          # every embodied config, seeds 1 2 3, pages in docs/results
    python benchmarks/results.py hopper walker2d --peer   # beside Stable-Baselines3 with its zoo's hyperparameters
    python benchmarks/results.py cartpole --seeds 1 2 --set runner.max_steps=10 --output /tmp/results

Runs stay in `--runs`: one that is finished is not made again, one that was interrupted goes on. So more seeds or the
peer can be added later, and the pages are written anew from all that is there. A peer gets as many environment steps as
our run and is evaluated as often, on the same episodes. Seconds are those of training; evaluation is not counted on
either side. The machine is to be idle: nothing here takes turns.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from _common import machine
from _peer import ZOO, ZOO_SOURCE

from rl_platform.config import LoadedConfig, load_config
from rl_platform.config.schema import Config
from rl_platform.errors import ConfigError
from rl_platform.launch.headline import number
from rl_platform.launch.plot import Curve, median_curve, read_curve
from rl_platform.metrics import read_metrics

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs" / "embodied"
OURS, PEER = "rl-platform", "Stable-Baselines3"
PACKAGES = ("torch", "gymnasium", "mujoco", "numpy")
COLUMNS = ("episode/return", "val/return", "env/success_once", "val/success_once", "val/success_at_end")
CLEANRL_SOURCE = "https://docs.cleanrl.dev/rl-algorithms/ppo/"
# ppo_continuous_action.py, tag pr-424: mean and deviation of training episodes over 3 seeds of 1 M steps. Not of Ant
CLEANRL = {
    "HalfCheetah-v5": ("HalfCheetah-v4", 1442.64, 46.03),
    "Hopper-v5": ("Hopper-v4", 2382.86, 271.74),
    "Walker2d-v5": ("Walker2d-v4", 2287.95, 571.78),
}


@dataclass(frozen=True)
class Run:
    """A finished run. `made`: machine, versions and date."""

    who: str
    seed: int
    rows: list[dict[str, float]]
    made: Mapping[str, Any]

    @property
    def env_steps(self) -> int:
        return int(sum(row.get("perf/env_steps", 0) for row in self.rows))

    @property
    def seconds(self) -> float:
        """Of training, without evaluation."""
        return sum(row["time/step"] - row.get("time/validate", 0.0) for row in self.rows if row["step"] > 0)

    def curve(self, metric: str) -> Curve:
        return read_curve(self.rows, metric, "env_steps")

    def last(self, metric: str) -> float:
        """NaN if it was never reported."""
        return next((row[metric] for row in reversed(self.rows) if metric in row), math.nan)


def our_run(path: Path, overrides: Sequence[str], seed: int, folder: Path) -> Run | None:
    """The run of a config with this seed, made or finished now unless it is there. None if it cannot be made here."""
    options = [*overrides, f"runner.seed={seed}", f"runner.output_dir={folder}"]
    loaded = load_config(path, options)
    _check_same(loaded.resolved_yaml(), folder / "config.yaml")
    code = "from rl_platform.launch.cli import main; main()"
    if not _make([sys.executable, "-c", code, str(path), *options], folder, PACKAGES):
        return None
    return _read(OURS, seed, folder)


def peer_run(config: Config, env_steps: int, seed: int, folder: Path) -> Run | None:
    """Stable-Baselines3 with the budget of our run."""
    env = config.env
    asked = {
        "env": {"id": env.id, "kwargs": env.kwargs, "max_episode_steps": env.max_episode_steps},
        "seed": seed,
        "env_steps": env_steps,
        "every": config.runner.val_check_interval * env.num_envs * env.rollout_steps or env_steps,
        "evaluation": {"episodes": env.evaluation.episodes, "seed": env.evaluation.seed},
        "hyperparameters": ZOO[env.id],
    }
    text = json.dumps(asked, indent=1)
    _check_same(text, folder / "asked.json")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "asked.json").write_text(text, encoding="utf-8")
    command = [sys.executable, str(Path(__file__).with_name("_peer.py")), str(folder)]
    if not _make(command, folder, (*PACKAGES, "stable-baselines3")):
        return None
    return _read(PEER, seed, folder)


def _make(command: Sequence[str], folder: Path, packages: Sequence[str]) -> bool:
    """Run the command unless it has ended well before. Machine and versions are written last, beside what it makes.

    Returns whether there is a finished run now.
    """
    if (folder / "made.json").exists():
        return True
    print(f"{folder}: running", flush=True)
    ended = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    if ended.returncode:
        print(f"{folder}: ended with exit code {ended.returncode}, left out", flush=True)
        return False
    made = {**machine(packages), "date": datetime.now(UTC).date().isoformat()}
    (folder / "made.json").write_text(json.dumps(made, indent=1), encoding="utf-8")
    return True


def _check_same(text: str, file: Path) -> None:
    if file.exists() and file.read_text(encoding="utf-8") != text:
        raise SystemExit(f"{file.parent} holds a run of other settings: remove it, or name other --runs")


def _read(who: str, seed: int, folder: Path) -> Run:
    return Run(who, seed, read_metrics(folder), json.loads((folder / "made.json").read_text(encoding="utf-8")))


def write_csv(path: Path, runs: Sequence[Run]) -> None:
    """One line per PPO step of each run; what was not measured in it is empty."""
    present = [name for name in COLUMNS if any(name in row for run in runs for row in run.rows)]
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["who", "seed", "step", "env_steps", "seconds", *present])
        for run in runs:
            steps, seconds = 0.0, 0.0
            for row in run.rows:
                steps += row.get("perf/env_steps", 0.0)
                seconds += row["time/step"] - row.get("time/validate", 0.0) if row["step"] > 0 else 0.0
                values = (row.get(name, math.nan) for name in present)
                cells = ("" if math.isnan(value) else f"{value:.6g}" for value in values)
                writer.writerow([run.who, run.seed, int(row["step"]), int(steps), f"{seconds:.2f}", *cells])


def draw(path: Path, title: str, runs: Sequence[Run], published: tuple[str, float, float] | None) -> None:
    """Evaluation returns, and success rates where there are any, over environment steps: seeds thin, medians thick."""
    from matplotlib.figure import Figure

    metrics = [name for name in ("val/return", "val/success_once") if any(run.curve(name) for run in runs)]
    figure = Figure(figsize=(5.5 * len(metrics), 3.6), layout="constrained")
    for axes, metric in zip(figure.subplots(1, len(metrics), squeeze=False)[0], metrics, strict=True):
        for who, color in ((OURS, "tab:blue"), (PEER, "tab:orange")):
            curves = [curve for run in runs if run.who == who and (curve := run.curve(metric))]
            for curve in curves:
                axes.plot(*zip(*curve, strict=True), color=color, linewidth=1, alpha=0.35)
            if curves and (middle := median_curve(curves)):
                axes.plot(*zip(*middle, strict=True), color=color, linewidth=2, label=f"{who}, median of {len(curves)}")
        if published is not None and metric == "val/return":
            axes.axhline(published[1], color="gray", linestyle=":", label=f"CleanRL after 1 M steps, {published[0]}")
        axes.set(title=f"{title}: {metric}", xlabel="environment steps")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=150)


def page(name: str, loaded: LoadedConfig, runs: Sequence[Run], command: str) -> str:
    """The Markdown page of a config."""
    config = loaded.config
    published = CLEANRL.get(config.env.id)
    lines = [
        f"# {name}: {config.env.id}",
        "",
        f"![Learning curves]({name}.png)",
        "",
        f"Mean return of {config.env.evaluation.episodes} evaluation episodes with the most likely action, after the "
        f"last step. Every evaluated point is in [{name}.csv]({name}.csv).",
        "",
        "| who | seeds | environment steps | final return: mean ± deviation over seeds | lowest and highest | "
        "success at any step | minutes of training | steps/s |",
        "|---|---|---|---|---|---|---|---|",
        *(_summary(who, [run for run in runs if run.who == who]) for who in (OURS, PEER)),
    ]
    if published is not None:
        task, mean, deviation = published
        lines.append(f"| CleanRL, published ({task}) | 3 | 1,000,000 | {mean:,.0f} ± {deviation:,.0f} | | | | |")
    lines += ["", "| who | seed | final return | minutes |", "|---|---|---|---|"]
    lines += [f"| {run.who} | {run.seed} | {number(run.last('val/return'))} | {run.seconds / 60:.1f} |" for run in runs]
    notes = [f"Made with `{command}`.", *_machines(runs)]
    if any(run.who == PEER for run in runs):
        notes.append(f"{PEER}: hyperparameters of the [zoo]({ZOO_SOURCE}), tuned there for version 4 of the task.")
    if published is not None:
        what = "`ppo_continuous_action.py`, returns of training episodes"
        notes.append(f"CleanRL: {what}, from [its documentation]({CLEANRL_SOURCE}).")
    return "\n".join([line for line in lines if line is not None] + ["", *(f"* {note}" for note in notes), ""])


def _summary(who: str, runs: Sequence[Run]) -> str | None:
    if not runs:
        return None
    finals = [run.last("val/return") for run in runs]
    deviation = statistics.stdev(finals) if len(finals) > 1 else math.nan
    rates = [rate for run in runs if not math.isnan(rate := run.last("val/success_once"))]
    success = f"{100 * statistics.mean(rates):.0f} %" if rates else ""
    speed = statistics.median(run.env_steps / run.seconds for run in runs)
    cells = [
        who,
        str(len(runs)),
        f"{statistics.median(run.env_steps for run in runs):,.0f}",
        f"{number(statistics.mean(finals))} ± {number(deviation)}",
        f"{number(min(finals))} to {number(max(finals))}",
        success,
        f"{statistics.mean(run.seconds for run in runs) / 60:.1f}",
        f"{speed:,.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def _machines(runs: Sequence[Run]) -> list[str]:
    """Where and with what, once for all runs that agree."""
    found: dict[str, list[str]] = {}
    for run in runs:
        made = run.made
        versions = ", ".join(f"{package} {version}" for package, version in made["versions"].items())
        where = f"{made['cpu']}, {made['cores']} cores, Python {made['python']}, {versions}, {made['date']}"
        found.setdefault(where, []).append(f"{run.who} {run.seed}")
    return [f"{where} ({', '.join(of)})" for where, of in found.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="*", help="names in configs/embodied, or files; none: all of the folder")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--peer", action="store_true", help="Stable-Baselines3 too, where its zoo has the task")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the config")
    parser.add_argument("--runs", type=Path, default=Path("runs/results"))
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "results")
    options = parser.parse_args()
    if options.peer and importlib.util.find_spec("stable_baselines3") is None:
        parser.error("--peer needs Stable-Baselines3: pip install -c constraints/cpu.txt -e '.[bench]'")
    paths = [Path(name) if name.endswith(".yaml") else CONFIGS / f"{name}.yaml" for name in options.configs]
    left_out = 0
    for path in paths or sorted(CONFIGS.glob("*.yaml")):
        try:
            left_out += results_of(path, options)
        except ConfigError as error:
            parser.error(f"{path}: {error}")
    return 1 if left_out else 0


def results_of(path: Path, options: argparse.Namespace) -> int:
    """Runs and page of one config; how many runs were left out."""
    name, loaded = path.stem, load_config(path, options.set)
    home = options.runs.absolute() / name
    runs = [our_run(path, options.set, seed, home / f"seed-{seed}") for seed in options.seeds]
    if options.peer and loaded.config.env.id in ZOO and runs[0] is not None:
        budget = runs[0].env_steps
        runs += [peer_run(loaded.config, budget, seed, home / f"peer-seed-{seed}") for seed in options.seeds]
    made = [run for run in runs if run is not None]
    if made:
        options.output.mkdir(parents=True, exist_ok=True)
        write_csv(options.output / f"{name}.csv", made)
        draw(options.output / f"{name}.png", name, made, CLEANRL.get(loaded.config.env.id))
        words = [name, *(["--peer"] if options.peer else []), "--seeds", *map(str, options.seeds)]
        words += [word for change in options.set for word in ("--set", change)]
        command = f"python benchmarks/results.py {' '.join(words)}"
        (options.output / f"{name}.md").write_text(page(name, loaded, made, command), encoding="utf-8")
        print(options.output / f"{name}.md")
    return len(runs) - len(made)


if __name__ == "__main__":
    sys.exit(main())
