"""Search by Optuna: the file that describes it, and the trials, whose record lies in the sweep's folder.

Not covered: the algorithms of Optuna, whose defaults are used (TPE).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Literal

from pydantic import Field, ValidationError, model_validator

from rl_platform.config.layers import dotted
from rl_platform.config.schema.section import Section
from rl_platform.config.source import YamlReader
from rl_platform.disk import read_regular
from rl_platform.errors import ConfigError, Problem, shown
from rl_platform.launch.tools.run_groups import SEED, short_names
from rl_platform.launch.tools.sweep.grid import RESERVED, SweepPoint
from rl_platform.launch.tools.sweep.summary import last_value, steps_of
from rl_platform.run_files import FINISHED
from rl_platform.suggest import did_you_mean
from rl_platform.text_files import NotUTF8, text_of

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.pruners import BasePruner
    from optuna.trial import FrozenTrial
    from pydantic_core import ErrorDetails

RECORD = "optuna.log"
MOST_BYTES = 1_000_000


class Range(Section):
    """Values of a key: from low to high (whole numbers if both are whole), or one of the choices."""

    low: int | float | None = None
    high: int | float | None = None
    step: int | float | None = Field(None, gt=0)
    log: bool = False
    choices: list[object] | None = Field(None, min_length=1)

    @model_validator(mode="after")
    def _complete(self) -> Range:
        ends = (self.low, self.high)
        if self.choices is not None:
            if ends != (None, None) or self.step is not None or self.log:
                raise ValueError("choices stand alone, without low, high, step and log")
        elif self.low is None or self.high is None:
            raise ValueError("needs low and high, or choices")
        elif self.low >= self.high:
            raise ValueError("low must be below high")
        elif self.log and self.low <= 0:
            raise ValueError("a logarithmic range begins above 0")
        elif self.log and self.step is not None:
            raise ValueError("a logarithmic range has no step")
        elif self.is_whole and isinstance(self.step, float):
            raise ValueError("the step between whole numbers is a whole number")
        return self

    @property
    def is_whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    def ends(self) -> list[str]:
        """Returns the extreme values, or all choices, as texts of overrides."""
        if self.choices is not None:
            return [json.dumps(choice) for choice in self.choices]
        return [repr(self.low), repr(self.high)]

    def suggest(self, trial: Trial, key: str) -> None:
        if self.choices is not None:
            trial.suggest_categorical(key, self.ends())
        elif self.is_whole:
            trial.suggest_int(key, int(self.low or 0), int(self.high or 0), step=int(self.step or 1), log=self.log)
        else:
            trial.suggest_float(key, float(self.low or 0), float(self.high or 0), step=self.step, log=self.log)


class Pruner(Section):
    """Ends trials that are worse than others. From `warmup_steps` PPO steps and `startup_trials` trials on.

    median: below the median of the others at the same step. hyperband: successive halving.
    """

    type: Literal["median", "hyperband"]
    startup_trials: int = Field(5, ge=0)
    warmup_steps: int = Field(0, ge=0)

    def build(self) -> BasePruner:
        import optuna

        if self.type == "hyperband":
            return optuna.pruners.HyperbandPruner(min_resource=max(self.warmup_steps, 1))
        return optuna.pruners.MedianPruner(self.startup_trials, self.warmup_steps)


class Spec(Section):
    """A search. metric: empty for the validation metric of the task. seed: of Optuna's random numbers."""

    parameters: dict[str, Range] = Field(min_length=1)
    trials: int = Field(ge=1, le=10_000)
    metric: str = ""
    direction: Literal["maximize", "minimize"] = "maximize"
    seed: int = Field(1, ge=0, lt=2**31)
    pruner: Pruner | None = None

    def corners(self) -> Iterator[dict[str, str]]:
        """Yields points to check: every end and choice of each parameter, the others at their first one."""
        first = {key: each.ends()[0] for key, each in self.parameters.items()}
        yield first
        for key, each in self.parameters.items():
            for text in each.ends()[1:]:
                yield first | {key: text}


def read_spec(path: str) -> Spec:
    """Reads the YAML file of a search. Raises ConfigError with all problems, also without the package optuna."""
    if find_spec("optuna") is None:
        hint = "pip install 'rl-platform[optuna]'"
        raise ConfigError([Problem("--optuna", "optuna is not installed", value=path, hint=hint)])
    try:
        text = text_of(read_regular(path, MOST_BYTES), path)
    except NotUTF8 as error:
        refused = Problem("--optuna", str(error), where=f"{path}:{error.line}", value=path, hint=error.hint)
        raise ConfigError([refused]) from error
    except (OSError, ValueError) as error:
        message = f"cannot be read: {getattr(error, 'strerror', None) or error}"
        raise ConfigError([Problem("--optuna", message, value=path)]) from error
    reader = YamlReader(path)
    tree = reader.read(text)
    if reader.problems:
        raise ConfigError(reader.problems)
    if not isinstance(tree, dict):
        allowed = "a mapping with parameters and trials"
        raise ConfigError([Problem("--optuna", "holds no search", value=path, allowed=allowed)])

    def problem(key: str, message: str, value: str = "", allowed: str = "", hint: str = "") -> Problem:
        section = key
        while section and section not in reader.where:
            section = section.rpartition(".")[0]
        return Problem(key, message, where=reader.where.get(section, path), value=value, allowed=allowed, hint=hint)

    problems = []
    parameters = tree.get("parameters")
    for key in parameters if isinstance(parameters, dict) else ():
        reason = {**RESERVED, SEED: "every trial runs with the seeds of the command line: runner.seed=1,2,3"}.get(key)
        if reason is not None:
            problems.append(problem(f"parameters.{key}", f"cannot be searched: {reason}"))
    try:
        spec = Spec.model_validate(tree)
    except ValidationError as error:
        problems += [problem(**_explained(detail)) for detail in error.errors(include_url=False)]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return spec


def _explained(detail: ErrorDetails) -> dict[str, str]:
    """Returns key, message, value, allowed values and hint of one of pydantic's errors."""
    *sections, last = place = [step for step in detail["loc"] if step not in ("int", "float")] or ["parameters"]
    kind, value = detail["type"], detail["input"]
    if kind == "missing":
        return {"key": dotted(place), "message": "this key is required"}
    if kind == "extra_forbidden":
        section = Range if sections[:1] == ["parameters"] else Pruner if sections == ["pruner"] else Spec
        names = list(section.model_fields)
        hint = did_you_mean(str(last), names)
        return {"key": dotted(place), "message": "unknown key", "allowed": ", ".join(names), "hint": hint}
    if kind in ("model_type", "dict_type"):
        message = "must be a mapping"
    elif kind == "too_short":
        message = "must not be empty"
    elif detail["loc"][-1] in ("int", "float"):  # one of the two types of a number
        message = "must be a number"
    else:
        message = detail["msg"].removeprefix("Value error, ").replace("Input should", "must", 1)
    return {"key": dotted(place), "message": message, "value": shown(value)}


class OptunaTrials:
    """Trials as points, one for each of the `seeds` (texts; empty: that of the config). A source of `Jobs`.

    A trial's value is the mean of `metric` over its seeds. Interrupted trials continue first.
    """

    def __init__(self, spec: Spec, folder: Path, seeds: Sequence[str], jobs: int) -> None:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.spec, self.folder, self._seeds = spec, folder, list(seeds)
        self.metric = spec.metric
        self._states = optuna.trial.TrialState
        storage = JournalStorage(JournalFileBackend(str(folder / RECORD)))
        self.study: Study = optuna.create_study(
            storage=storage,
            study_name="sweep",
            direction=spec.direction,
            load_if_exists=True,
            pruner=optuna.pruners.NopPruner() if spec.pruner is None else spec.pruner.build(),
        )
        done = self.study.get_trials(deepcopy=False)
        # another seed after a resume: the same one would repeat its first suggestions
        self.study.sampler = optuna.samplers.TPESampler(seed=spec.seed + len(done), constant_liar=jobs > 1)
        self._waiting: deque[SweepPoint] = deque()
        self._open: dict[str, tuple[Trial, set[str]]] = {}  # by the trial's name: names of its points that run or wait
        self._reasons: dict[str, list[str]] = {}
        self._reported: dict[str, int] = {}
        for trial in done:
            if trial.state == self._states.RUNNING:
                self._enqueue(trial, trial.params)
        self.total = len(self._waiting) + max(spec.trials - len(done), 0) * max(len(seeds), 1)

    def points(self) -> list[SweepPoint]:
        """Returns the points of all trials so far."""
        trials = self.study.get_trials(deepcopy=False)
        return [point for trial in trials for point in self._points(trial.number, trial.params)]

    def pruned(self) -> frozenset[str]:
        """Returns the names of the points of pruned trials."""
        trials = self.study.get_trials(deepcopy=False, states=(self._states.PRUNED,))
        return frozenset(point.name for trial in trials for point in self._points(trial.number, trial.params))

    def failed(self) -> dict[str, str]:
        """Returns the names of points that did not finish, of failed trials."""
        trials = self.study.get_trials(deepcopy=False, states=(self._states.FAIL,))
        points = [point for trial in trials for point in self._points(trial.number, trial.params)]
        return {point.name: "" for point in points if not (self.folder / point.name / FINISHED).exists()}

    def next(self) -> SweepPoint | None:
        if not self._waiting and len(self.study.get_trials(deepcopy=False)) < self.spec.trials:
            trial = self.study.ask()
            for key, each in self.spec.parameters.items():
                each.suggest(trial, key)
            self._enqueue(trial, trial.params)
        return self._waiting.popleft() if self._waiting else None

    def hopeless(self, point: SweepPoint) -> bool:
        if self.spec.pruner is None:
            return False
        trial, _ = self._open[point.group]
        for row in steps_of(self.folder / point.name):
            step, value = int(row["step"]), last_value([row], self.metric)
            if value is not None and step > self._reported.get(point.group, -1):
                trial.report(value, step)
                self._reported[point.group] = step
        return point.group in self._reported and trial.should_prune()

    def ended(self, point: SweepPoint, reason: str) -> None:
        trial, open_points = self._open[point.group]
        open_points.discard(point.name)
        self._reasons.setdefault(point.group, []).append(reason)
        if open_points:
            return
        points = self._points(trial.number, trial.params)
        values = [last_value(steps_of(self.folder / each.name), self.metric) for each in points]
        reasons = self._reasons.pop(point.group)
        if "pruned" in reasons:
            self.study.tell(trial.number, state=self._states.PRUNED)
        elif any(each != "exit code 0" for each in reasons) or None in values:
            self.study.tell(trial.number, state=self._states.FAIL)
        else:
            self.study.tell(trial.number, mean(value for value in values if value is not None))
        del self._open[point.group]

    def _enqueue(self, trial: Trial | FrozenTrial, params: Mapping[str, object]) -> None:
        from optuna.trial import Trial as OpenTrial

        if params.keys() != self.spec.parameters.keys():  # it was interrupted before it had all values
            self.study.tell(trial.number, state=self._states.FAIL)
            return
        points = self._points(trial.number, params)
        self._waiting += points
        handle = trial if isinstance(trial, OpenTrial) else OpenTrial(self.study, trial._trial_id)
        self._open[points[0].group] = handle, {point.name for point in points}

    def _points(self, number: int, params: Mapping[str, object]) -> list[SweepPoint]:
        group = f"trial-{number:03}"
        values = {key: value if isinstance(value, str) else repr(value) for key, value in params.items()}
        names = short_names(list(params))
        label = ", ".join([group, *(f"{names[key]}={_rounded(value)}" for key, value in params.items())])
        if not self._seeds:
            return [SweepPoint(group, group, label, values)]
        return [SweepPoint(f"{group},seed={seed}", group, label, {**values, SEED: seed}) for seed in self._seeds]


def _rounded(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
