"""Results of the shipped embodied configs, from runs on this machine: a page, a learning curve and a table for each.

    python benchmarks/results.py                          # every embodied config, seeds 1 2 3, pages in docs/results
    python benchmarks/results.py hopper walker2d --peer   # beside Stable-Baselines3 with its zoo's hyperparameters
    python benchmarks/results.py cartpole --seeds 1 2 --set runner.max_steps=10 --output /tmp/results
    python benchmarks/results.py dm_walker --seeds 1 2 3 --keep             # makes the seeds that its page lacks

Runs stay in `--runs`: one that is finished is not made again, one that was interrupted goes on. So more seeds or the
peer can be added later, and the pages are written anew from all that is there. `--keep` adds the runs that are only in
the CSV file of the page; the config must be the same. A peer gets as many environment steps as our run and is evaluated
as often, on the same episodes. Seconds are those of training; evaluation is not counted on either side. Ours are those
of the clock on all cores, so the machine is to be idle for them; the peer's are CPU seconds of its one thread.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from _common import machine
from _peer import ZOO
from _results_page import CLEANRL, OURS, PEER, Run, draw, page, read_csv, where, write_csv

from rl_platform.config import load_config
from rl_platform.config.schema import Config
from rl_platform.errors import ConfigError
from rl_platform.metrics import read_metrics

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs" / "embodied"
PACKAGES = ("torch", "numpy")
SIMULATORS = ("gymnasium", "mujoco")  # of this interpreter: an environment in another one has its own


def our_run(path: Path, overrides: Sequence[str], seed: int, folder: Path) -> Run | None:
    """The run of a config with this seed, made or finished now unless it is there. None if it cannot be made here."""
    options = [*overrides, f"runner.seed={seed}", f"runner.output_dir={folder}"]
    options.append("runner.trust_checkpoint=true")  # an interrupted run has written its checkpoints here
    loaded = load_config(path, options)
    _check_same(loaded.resolved_yaml(), folder / "config.yaml")
    code = "from rl_platform.launch.cli import main; main()"
    packages = PACKAGES if loaded.config.env.python else (*PACKAGES, *SIMULATORS)
    if not _make([sys.executable, "-c", code, str(path), *options], folder, packages):
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
    if not _make(command, folder, (*PACKAGES, *SIMULATORS, "stable-baselines3")):
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
    earlier = file.read_text(encoding="utf-8") if file.exists() else text
    if earlier.replace("trust_checkpoint: false", "trust_checkpoint: true") != text:  # no result depends on it
        raise SystemExit(f"{file.parent} holds a run of other settings: remove it, or name other --runs")


def _read(who: str, seed: int, folder: Path) -> Run:
    made = json.loads((folder / "made.json").read_text(encoding="utf-8"))
    return Run(who, seed, read_metrics(folder), where(made))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="*", help="names in configs/embodied, or files; none: all of the folder")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--peer", action="store_true", help="Stable-Baselines3 too, where its zoo has the task")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change the config")
    parser.add_argument("--keep", action="store_true", help="runs of the page whose folders are not in --runs stay")
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
    kept = {(run.who, run.seed): run for run in read_csv(options.output / f"{name}.md")} if options.keep else {}

    def run_of(who: str, seed: int, folder: Path, make: Callable[[int, Path], Run | None]) -> Run | None:
        return make(seed, folder) if folder.exists() or (who, seed) not in kept else kept[who, seed]

    ours = partial(our_run, path, options.set)
    runs = [run_of(OURS, seed, home / f"seed-{seed}", ours) for seed in options.seeds]
    if options.peer and loaded.config.env.id in ZOO and runs[0] is not None:
        peer = partial(peer_run, loaded.config, runs[0].env_steps)
        runs += [run_of(PEER, seed, home / f"peer-seed-{seed}", peer) for seed in options.seeds]
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
