"""Finds a checkpoint and the config of its run. Importing it does not import torch, so a typo is reported at once."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rl_platform.config import LoadedConfig, load_config
from rl_platform.config.overrides import key_of
from rl_platform.config.python_values import OVERRIDES
from rl_platform.config.schema import Config
from rl_platform.config.source import COMMAND_LINE
from rl_platform.errors import CheckpointError, ConfigError, PlatformError, Problem
from rl_platform.run_files import CONFIG, MANIFEST, complete_checkpoints

if TYPE_CHECKING:
    from rl_platform.checkpoint.verify import Checkpoint

Result = TypeVar("Result")

LATEST = "latest"
RUNS = Path("runs")  # searched for `latest`; the default of runner.output_dir is inside
KEYS = {  # may differ in an evaluation; other keys belong to the model or its training
    "embodied": (
        "env.address",
        "env.evaluation.episodes",
        "env.evaluation.seed",
        "env.evaluation.video",
        "env.id",
        "env.kwargs",
        "env.max_episode_steps",
        "env.num_workers",
        "env.python",
        "env.restarts",
        "env.step_timeout_s",
        "env.token_file",
        "runner.deadline_s",
    ),
    "reasoning": (
        "rollout.sampling",
        "rollout.val_sampling",
        "rollout.multi_turn",
        "rollout.agent",
        "rollout.max_running_requests",
        "reward",
        "runner.deadline_s",
    ),
}


@dataclass(frozen=True)
class SavedRun:
    """The folder of a run and one of its checkpoints.

    asked: the option or function that named them, for messages. newest: the run was named, not this checkpoint.
    """

    folder: Path
    checkpoint: Path
    asked: str
    newest: bool = False

    def read_by(self, read: Callable[[SavedRun], Result]) -> Result:
        """Returns `read(self)`.

        A run that is going on deletes old checkpoints. If it deletes this one meanwhile, calls `read` with its newest
        one, unless this one was named.
        """
        run = self
        while True:
            try:
                return read(run)
            except (PlatformError, OSError):
                later = complete_checkpoints(run.checkpoint.parent)
                if not self.newest or (run.checkpoint / MANIFEST).exists() or not later:
                    raise
                run = replace(run, checkpoint=later[max(later)])

    def load(self, overrides: Sequence[str] | Mapping[str, object]) -> LoadedConfig:
        """Returns the config with overrides. Raises ConfigError, also for keys that change no evaluation."""
        path, resume = self.folder / CONFIG, "runner.resume"  # the folder that it was resumed from may be removed
        if isinstance(overrides, Mapping):
            keys, place = list(overrides), OVERRIDES
        else:
            keys, place = [key_of(override) for override in overrides], COMMAND_LINE
        task = load_config(path, [f"{resume}=auto"], stored=True).config.runner.task_type
        allowed, others = KEYS[task], {key for keys in KEYS.values() for key in keys}

        def refuse(message: str, wrong: Sequence[str]) -> None:
            if wrong:
                raise ConfigError(
                    [Problem(key, message, where=place, allowed=", ".join(allowed)) for key in wrong],
                )

        foreign = [key for key in keys if _below(key, others) and not _below(key, allowed)]
        refuse(f"has no effect: the task of {self.folder} is {task}", foreign)
        if isinstance(overrides, Mapping):
            loaded = load_config(path, {resume: "auto", **overrides}, stored=True)
        else:
            loaded = load_config(path, [f"{resume}=auto", *overrides], stored=True)
        message = "belongs to the model or its training, which an evaluation cannot change"
        refuse(message, [key for key in keys if not _below(key, allowed)])
        return loaded

    def open(self, config: Config) -> Checkpoint:
        """Verifies the checkpoint. Raises ConfigError if it is of another version or of another model than `config`,
        CheckpointError if it is damaged."""
        from rl_platform.checkpoint.fingerprints import fingerprint_difference
        from rl_platform.checkpoint.verify import Checkpoint, UnknownFormat
        from rl_platform.runners.run_fingerprint import fingerprint

        try:
            checkpoint = Checkpoint.open(self.checkpoint)
        except UnknownFormat as error:
            raise self._problem(str(error)) from error
        except CheckpointError as error:
            others = [path for path in complete_checkpoints(self.checkpoint.parent).values() if path != self.checkpoint]
            error.add_note(f"name another checkpoint of the run: {others[-1]}" if others else _anew(self.folder))
            raise
        # in an embodied run the environment may differ, as long as the policy fits it
        of_policy = (
            "\n".join(line for line in text.splitlines() if not line.startswith("env."))
            for text in (checkpoint.fingerprint, fingerprint(config))
        )
        if difference := fingerprint_difference(*of_policy):
            theirs, ours = difference
            raise self._problem(
                f"the checkpoint is of another model than config.yaml beside it: it has {theirs}, the config {ours}"
            )
        return checkpoint

    def _problem(self, message: str) -> ConfigError:
        return ConfigError([Problem(self.asked, message, value=str(self.checkpoint))])


def _below(key: str, names: Collection[str]) -> bool:
    """Returns whether a key is one of the names, or a key inside one of them."""
    return any(f"{key}.".startswith(f"{name}.") for name in names)


def similar_folder(path: Path) -> str:
    """Returns a hint with the run of that name in runs/, or the nearest name beside `path`; empty if there is none."""
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    close = [RUNS / path.name] if (RUNS / path.name).is_dir() else []
    close += [path.with_name(name) for name in difflib.get_close_matches(path.name, siblings, n=1)]
    return f"did you mean {close[0]}?" if close else ""


def _changed(path: Path) -> float:
    """Returns when a file was changed; 0.0 if a run that is going on has deleted it meanwhile."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _anew(run: Path) -> str:
    """Returns the command that trains what the run in a folder trained, in another folder."""
    return f"platform-launch {shlex.quote(str(run / CONFIG))} runner.output_dir=ANOTHER trains anew"


def _runs_in(folder: Path) -> list[Path]:
    """Returns the runs in a folder that have a checkpoint."""
    return sorted(path.parent for path in folder.glob("*/checkpoints") if complete_checkpoints(path))


def _some_run() -> str:
    """Returns a hint with the runs in runs/."""
    runs = _runs_in(RUNS)
    return f"name one of these runs: {_listed(runs)}" if runs else "name the folder of a run, its runner.output_dir"


def _listed(paths: Sequence[Path]) -> str:
    """Returns at most five paths, and the number of others."""
    more = f" and {len(paths) - 5} more" if len(paths) > 5 else ""
    return f"{', '.join(map(str, paths[:5]))}{more}"


@dataclass(frozen=True)
class _Search:
    """Looks for a checkpoint by name. asked: as in `SavedRun`; step: the one to find, None: the newest."""

    name: str
    asked: str
    step: int | None

    def checkpoint(self) -> Path:
        return self._latest() if self.name == LATEST else self._named(Path(self.name).expanduser().absolute())

    def _latest(self) -> Path:
        checkpoints = [path for folder in RUNS.glob("*/checkpoints") for path in complete_checkpoints(folder).values()]
        if not checkpoints:
            raise self.problem(f"no run in {RUNS.absolute()} has a checkpoint", hint=_some_run())
        newest = max(checkpoints, key=lambda path: _changed(path / MANIFEST)).absolute()
        return newest if self.step is None else self._of_step(newest.parent)

    def _named(self, path: Path) -> Path:
        inside = path if path.name == "checkpoints" else path / "checkpoints"
        if (path / MANIFEST).is_file():
            return path if self.step is None else self._of_step(path.parent)
        if complete_checkpoints(inside):
            return self._of_step(inside)
        if (inside.parent / CONFIG).is_file():
            raise self._without_checkpoint(inside.parent)
        if path.name.startswith("step-") and (path.parent.parent / CONFIG).is_file():
            raise self._without_step(path)
        if not path.exists():
            raise self.problem("no such folder", hint=similar_folder(path) or _some_run())
        if path.is_file():
            hint = "name the folder that the run wrote to, its runner.output_dir"
            message = "is a file, not the folder of a run or a checkpoint"
            raise self.problem(message, hint=hint if path.suffix in (".yaml", ".yml") else _some_run())
        runs = _runs_in(path)
        hint = f"name one of its runs: {_listed(runs)}" if runs else _some_run()
        raise self.problem("contains neither a run nor a checkpoint", hint=hint)

    def _without_checkpoint(self, run: Path) -> ConfigError:
        """Returns the problem of a run whose folder has no complete checkpoint."""
        model = run / "model"
        if not model.is_dir():
            again = f"platform-launch {shlex.quote(str(run / CONFIG))}"
            hint = f"wait for its first one (runner.save_interval). A run that was stopped begins again: {again}"
            return self.problem("the run has not written a checkpoint yet", hint=hint)
        from rl_platform.models.saved_policy import DESCRIPTION  # loads torch

        if (model / DESCRIPTION).is_file():
            reader = f"rl_platform.load_policy({str(model)!r})"
        else:
            reader = f"transformers.AutoModelForCausalLM.from_pretrained({str(model)!r})"
        hint = f"{reader} reads what it has trained; {_anew(run)}"
        return self.problem("the checkpoints of this run were deleted", hint=hint)

    def _without_step(self, path: Path) -> ConfigError:
        """Returns the problem of a checkpoint's folder that is missing or incomplete."""
        others = complete_checkpoints(path.parent)
        if not others:
            return self._without_checkpoint(path.parent.parent)
        message = f"this checkpoint is incomplete: it has no {MANIFEST}" if path.exists() else "no such checkpoint"
        steps = ", ".join(map(str, others))
        hint = f"the run has checkpoints of the steps {steps} (runner.keep_checkpoints), as {others[max(others)]}"
        return self.problem(message, hint=hint)

    def _of_step(self, folder: Path) -> Path:
        checkpoints = complete_checkpoints(folder)
        if self.step is None:
            return checkpoints[max(checkpoints)]
        if self.step not in checkpoints:
            allowed = ", ".join(map(str, checkpoints))
            message = f"{folder} has no checkpoint of step {self.step}"
            hint = "runner.keep_checkpoints sets how many of the newest ones are kept"
            raise ConfigError([Problem(self.asked, message, value=str(self.step), allowed=allowed, hint=hint)])
        return checkpoints[self.step]

    def problem(self, message: str, hint: str = "") -> ConfigError:
        allowed = f"a run's folder, one of its checkpoints, or {LATEST}"
        return ConfigError([Problem(self.asked, message, value=self.name, allowed=allowed, hint=hint)])


def find_run(name: str, asked: str, step: int | None = None) -> SavedRun:
    """Returns a run by `name`: its folder (newest checkpoint, or that of `step`), a checkpoint, or `latest` (newest one
    in runs/). asked: see `SavedRun`.

    Raises ConfigError if there is none.
    """
    search = _Search(name, asked, step)
    checkpoint = search.checkpoint()
    folder = checkpoint.parent.parent
    if not (folder / CONFIG).is_file():
        message = f"{folder / 'config.yaml'} is missing, without which the checkpoint cannot be loaded"
        raise search.problem(message, hint="name checkpoints where their run wrote them, or copy its folder")
    return SavedRun(folder, checkpoint, asked, step is None and checkpoint != Path(name).expanduser().absolute())
