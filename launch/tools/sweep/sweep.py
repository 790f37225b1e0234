"""`rl-platform sweep`: checks all points, runs them in a folder each, and compares them. Repeating it continues."""

from __future__ import annotations

import json
import os
import shlex
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypedDict

import yaml
from rich.console import Console

from rl_platform.config import LoadedConfig
from rl_platform.config.differences import differences
from rl_platform.config.source import COMMAND_LINE, Tree
from rl_platform.disk import make_folder
from rl_platform.environment_variables import changed_variables
from rl_platform.errors import ConfigError, PlatformError, Problem
from rl_platform.interrupts import shutting_down
from rl_platform.launch.placed_config import load, located
from rl_platform.launch.run_lock import LOCK, locked
from rl_platform.launch.start_checks.env_check import check_env
from rl_platform.launch.start_checks.output_check import unwritable
from rl_platform.launch.tools.run_groups import SEED
from rl_platform.launch.tools.sweep.grid import SweepPoint, Varied, read_arguments
from rl_platform.launch.tools.sweep.metric_check import check_metric
from rl_platform.launch.tools.sweep.optuna_search import OptunaTrials, Spec, read_spec
from rl_platform.launch.tools.sweep.summary import Summary
from rl_platform.launch.tools.sweep.sweep_jobs import THREADS, Jobs, shares
from rl_platform.launch.views.headline import headline_of
from rl_platform.placement.inventory import VISIBLE_DEVICES
from rl_platform.run_files import CONFIG, FINISHED

MARK = "sweep.yaml"


class PointsFailed(PlatformError):
    """Points of a sweep failed. exit_code: theirs if all ended with the same one."""

    def __init__(self, failed: Mapping[str, str], total: int, folder: Path) -> None:
        codes = {reason.removeprefix("exit code ") for reason in failed.values()}
        code = codes.pop() if len(codes) == 1 else ""
        self.exit_code = int(code) if code.isdecimal() else 70
        lines = [f"    {name}: {reason}, {folder / name}.log" for name, reason in failed.items()]
        super().__init__("\n".join([f"{len(failed)} of {total} points failed:", *lines]))


class _Grid:
    """The points of a grid, as a source of `Jobs`."""

    def __init__(self, points: Sequence[SweepPoint]) -> None:
        self._points, self.total = deque(points), len(points)

    def next(self) -> SweepPoint | None:
        return self._points.popleft() if self._points else None

    def hopeless(self, point: SweepPoint) -> bool:
        return False

    def ended(self, point: SweepPoint, reason: str) -> None:
        pass


class Definition(TypedDict):
    """The definition of the sweep in a folder. search: the parameters of Optuna, None for a grid."""

    config: str
    fixed: list[str]
    varied: dict[str, list[str]]
    search: Tree | None


@dataclass(frozen=True)
class Checked:
    """A valid sweep. points: of a grid, or samples of a search. configs: those of the points."""

    config: str
    varied: Varied
    spec: Spec | None
    points: list[SweepPoint]
    configs: list[LoadedConfig]

    @property
    def default_folder(self) -> Path:
        return Path(f"{self.configs[0].config.runner.output_dir}-sweep")

    @property
    def seeds(self) -> list[str]:
        return self.varied.axes.get(SEED, [])

    def definition(self) -> Definition:
        spec = None if self.spec is None else self.spec.model_dump(mode="json")
        return {"config": self.config, "fixed": self.varied.fixed, "varied": self.varied.axes, "search": spec}

    def command(self, point: SweepPoint, folder: Path) -> list[str]:
        """Returns the arguments of `platform-launch` for a point."""
        path = json.dumps(str(folder / point.name)).replace("${", "$${")
        return [self.config, *self.varied.fixed, *point.overrides, f"runner.output_dir={path}"]


def sweep(
    config: str, arguments: Sequence[str], jobs: int, optuna: str | None, output: Path | None, metric: str, dry: bool
) -> None:
    """Runs a sweep. Raises ConfigError with all problems before the first point starts, PointsFailed at the end."""
    environments = shares(jobs)
    with changed_variables(environments[0]):  # a point sees these GPUs
        checked = check(config, arguments, optuna, metric)
    folder = (output or checked.default_folder).absolute()
    key, asked = ("metric", checked.spec.metric) if checked.spec is not None else ("--metric", metric)
    if asked:
        runs = [folder / point.name for point in checked.points]
        check_metric(key, asked, checked.configs[0].config, runs)
    fresh = _folder_problems(folder, checked)
    say = partial(print, flush=True)
    say(_headline(checked, folder, environments))
    if dry:
        for point in checked.points if checked.spec is None else ():
            say(shlex.join(["platform-launch", *checked.command(point, folder)]))
        return
    with shutting_down():
        _make(folder, fresh)
        with locked(folder, "--output"):
            text = yaml.safe_dump(checked.definition(), sort_keys=False, allow_unicode=True, width=120)
            (folder / MARK).write_text(text, encoding="utf-8")
            runner = Jobs(folder, lambda point: checked.command(point, folder), environments, say)
            summary, failed = _run(checked, folder, runner, metric, say)
            summary.write()
            picture = summary.draw()
    summary.print(Console())
    for line in (str(folder / "summary.json"), str(folder / "summary.csv"), picture):
        if line:
            say(line)
    if failed:
        raise PointsFailed(failed, len(summary.results), folder)


def check(config: str, arguments: Sequence[str], optuna: str | None, metric: str = "") -> Checked:
    """Reads the command line and loads the config of every point. Raises ConfigError with the problems of all."""
    problems: list[Problem] = []
    varied, spec = Varied([], {}), None
    try:
        varied = read_arguments(arguments)
    except ConfigError as error:
        problems += error.problems
    if optuna is not None:
        try:
            spec = read_spec(optuna)
        except ConfigError as error:
            problems += error.problems
        problems += _of_search(varied, spec, metric)
    elif not varied.axes and not problems:
        message = "no key has several values, so there is nothing to compare"
        hint = "separate values by commas, without brackets, as runner.seed=1,2,3"
        problems.append(Problem("sweep", message, where=COMMAND_LINE, hint=hint))
    if problems:
        raise ConfigError(problems)
    points = varied.points() if spec is None else _samples(spec, varied)
    return Checked(config, varied, spec, points, _load_all(config, varied, points))


def _of_search(varied: Varied, spec: Spec | None, metric: str) -> Iterator[Problem]:
    for key in varied.axes:
        if key != SEED:
            message = "a search varies the parameters of its file, and runner.seed"
            yield Problem(key, message, where=COMMAND_LINE, hint=f"parameters: {{{key}: {{choices: [...]}}}}")
    if metric:
        yield Problem("--metric", "a search has its metric in the file of --optuna", where=COMMAND_LINE, value=metric)
    if spec is not None and spec.pruner is not None and SEED in varied.axes:
        message = "a pruner stops single runs, and a trial has several here"
        yield Problem("pruner", message, hint="remove the pruner, or set one runner.seed")


def _samples(spec: Spec, varied: Varied) -> list[SweepPoint]:
    seeds = [{SEED: seed} for seed in varied.axes.get(SEED, [])[:1]] or [{}]
    return [
        SweepPoint(", ".join(f"{k}={v}" for k, v in each.items()), "", "", each | seeds[0]) for each in spec.corners()
    ]


def _load_all(config: str, varied: Varied, points: Sequence[SweepPoint]) -> list[LoadedConfig]:
    """Loads the config of each point. Raises ConfigError with the distinct problems, also for points that are equal."""
    refused: dict[str, tuple[Problem, list[str]]] = {}
    configs, same, fitting = [], dict[str, str](), set[str]()
    for point in points:
        try:
            configs.append(load(config, [*varied.fixed, *point.overrides])[0])
            _check_env(configs[-1], fitting)
        except ConfigError as error:
            for problem in error.problems:
                refused.setdefault(str(problem), (problem, []))[1].append(point.name)
            continue
        text = configs[-1].config.model_dump_json()
        if text in same:
            message = f"has the same config as {same[text]}"
            refused[point.name] = Problem(point.name, message, where=COMMAND_LINE), []
        same[text] = point.name
    if refused:
        raise ConfigError([_with_points(*each, len(points)) for each in refused.values()])
    return configs


def _check_env(loaded: LoadedConfig, fitting: set[str]) -> None:
    """Builds the environment of a point once, unless one of the same sections is in `fitting`. Raises ConfigError."""
    sections = loaded.config.env.model_dump_json() + loaded.config.actor.model.model_dump_json()
    if sections not in fitting:
        with located(loaded):
            check_env(loaded.config)
        fitting.add(sections)


def _with_points(problem: Problem, names: Sequence[str], total: int) -> Problem:
    """Adds the points that have a problem to its message, unless all have it."""
    if not names or len(names) == total:
        return problem
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return replace(problem, message=f"{problem.message} (point {names[0]}{others})")


def _folder_problems(folder: Path, checked: Checked) -> bool:
    """Returns whether the folder holds no sweep yet. Raises ConfigError if it holds another one, or something else."""
    problems = []
    if reason := unwritable(folder):
        problems.append((reason, "name another folder"))
    elif (folder / MARK).is_file():
        hint = "repeat its command (values may be added), or name another folder with --output"
        problems += [(f"contains another sweep: {each}", hint) for each in _changes(folder, checked)]
    elif folder.is_dir() and {entry.name for entry in folder.iterdir()} - {LOCK}:
        problems.append(("is not empty and contains no sweep", "name another folder with --output"))
    if problems:
        raise ConfigError([Problem("--output", text, value=str(folder), hint=hint) for text, hint in problems])
    return not (folder / MARK).is_file()


def _changes(folder: Path, checked: Checked) -> list[str]:
    """Returns how the sweep of the folder differs from this one, apart from added values, trials and steps."""
    try:
        before = yaml.safe_load((folder / MARK).read_text(encoding="utf-8"))
        varied, search = dict(before["varied"]), before["search"]
        lists = [f"{key} over {', '.join(map(str, texts))}" for key, texts in varied.items()]
    except (yaml.YAMLError, LookupError, TypeError, ValueError, AttributeError, RecursionError):
        return [f"{MARK} is damaged"]
    now = checked.definition()
    if (search is None) != (checked.spec is None):
        return ["a search by Optuna" if search else "; ".join(lists)]
    if search is not None:
        searches = [{**each, "trials": 0} for each in (search, now["search"] or {})]
        same = {**before, "search": searches[0]} == {**now, "search": searches[1]}
        return [] if same else [f"a search of {before['config']} with other parameters, settings, overrides or seeds"]
    if varied.keys() != now["varied"].keys():
        return ["; ".join(lists)]
    fewer = (set(texts) - set(now["varied"][key]) for key, texts in varied.items())
    return [line for line, gone in zip(lists, fewer, strict=True) if gone] or _config_changes(folder, checked)


def _config_changes(folder: Path, checked: Checked) -> list[str]:
    """Returns the keys in which a started point has another config than now; runner.max_steps may differ."""
    changes: dict[str, None] = {}
    for point, loaded in zip(checked.points, checked.configs, strict=True):
        path = folder / point.name / CONFIG
        if path.is_file():
            for line in differences(path.read_text(encoding="utf-8"), loaded.resolved_yaml()):
                if not line.startswith(("runner.output_dir ", "runner.max_steps ")):
                    changes[line] = None
    return list(changes)


def _run(
    checked: Checked, folder: Path, jobs: Jobs, metric: str, say: Callable[[str], None]
) -> tuple[Summary, dict[str, str]]:
    if checked.spec is None:
        open_points = [
            point
            for point, loaded in zip(checked.points, checked.configs, strict=True)
            if not _is_finished(folder / point.name, loaded)
        ]
        if done := len(checked.points) - len(open_points):
            say(f"{done} of {len(checked.points)} points were finished before")
        failed = jobs.run(_Grid(open_points))
        return Summary(folder, checked.points, failed, metric=metric), failed
    spec = checked.spec
    if not spec.metric:
        loaded = checked.configs[0]
        spec = spec.model_copy(update={"metric": headline_of(loaded.shown()).validation})
    search = OptunaTrials(spec, folder, checked.seeds, len(jobs.environments))
    failed = jobs.run(search)
    both = search.failed() | failed
    return Summary(folder, search.points(), both, search.pruned(), spec.metric, spec.direction), failed


def _is_finished(run: Path, loaded: LoadedConfig) -> bool:
    if not (run / FINISHED).exists():
        return False
    changed = differences((run / CONFIG).read_text(encoding="utf-8"), loaded.resolved_yaml())
    return not any(line.startswith("runner.max_steps ") for line in changed)


def _make(folder: Path, fresh: bool) -> None:
    try:
        make_folder(folder, 0o700 if fresh else 0o777)
    except OSError as error:
        message = f"cannot be made: {error.strerror}"
        raise ConfigError([Problem("--output", message, value=str(folder))]) from error


def _headline(checked: Checked, folder: Path, environments: Sequence[Mapping[str, str]]) -> str:
    if checked.spec is not None:
        seeds = f" with {len(checked.seeds)} seeds each" if checked.seeds else ""
        what = f"search of {checked.spec.trials} trials{seeds} over {', '.join(checked.spec.parameters)}"
    else:
        counts = " x ".join(f"{len(texts)} {key}" for key, texts in checked.varied.axes.items())
        what = f"{len(checked.points)} points ({counts})"
    part = ""
    if len(environments) > 1:
        threads = environments[0].get(THREADS, os.environ.get(THREADS))
        gpus = f" and GPUs {environments[0][VISIBLE_DEVICES]} ..." if VISIBLE_DEVICES in environments[0] else ""
        part = f", {len(environments)} at a time with {threads} thread{'s' if threads != '1' else ''}{gpus}"
    return f"{what}{part}, in {folder}"
