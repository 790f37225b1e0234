"""Recordings: folders with the state before a PPO step, what went into it and the numbers that came out.

`record` resumes a run from its checkpoint before the step in a folder of its own, and leaves the run's folder as it is.
That folder is a run's folder, which `rl-platform report` reads, and has a sealed part `recorded` beside it.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from rl_platform.checkpoint.fingerprints import fingerprint_difference
from rl_platform.checkpoint.verify import Checkpoint, UnknownFormat, folder_name
from rl_platform.checkpoint.write import CheckpointStore
from rl_platform.config import load_config
from rl_platform.config.schema import Config
from rl_platform.disk import link
from rl_platform.errors import CheckpointError, ConfigError, FolderInUse, PlatformError, Problem
from rl_platform.launch.placed_config import load
from rl_platform.launch.replay.recorded_step import RecordedPPO
from rl_platform.launch.session import run
from rl_platform.launch.start_checks.output_check import unwritable
from rl_platform.records import StateDict
from rl_platform.reporter import Reporter
from rl_platform.run_files import CONFIG, STEP_FOLDER, complete_checkpoints
from rl_platform.runners.ppo import PPO
from rl_platform.runners.run_fingerprint import fingerprint
from rl_platform.runners.task_runner import Learners

RECORDED = "recorded"
MOST_NAMED = 5  # recordings that a hint lists
VERSION = version("rl-platform")
UNCOMPARED = ("time/", "perf/", "memory/", "val/")  # metrics that depend on the machine, or that `record` leaves out


@dataclass(frozen=True)
class StepRecording:
    """A recording that was verified. step: from 1, as in metrics.jsonl; before: the state before it, None at step 1.

    models: those whose state before the step is known; None: all. A step that failed may have changed the others.
    """

    folder: Path
    config: Config
    step: int
    record: StateDict
    before: Checkpoint | None
    models: Sequence[str] | None

    @classmethod
    def open(cls, folder: Path) -> StepRecording:
        """Raises ConfigError for a folder that is no recording, is damaged, or is of another version or config."""
        inside = folder / RECORDED
        steps = [path for path in inside.iterdir() if STEP_FOLDER.fullmatch(path.name)] if inside.is_dir() else []
        if not steps:
            hint = _recordings_near(folder) or "rl-platform record RUN --step N makes one; it prints its folder"
            message = "is not the folder of a recording" if folder.exists() else "no such folder"
            raise _problem("RECORDING", message, folder, hint)
        try:
            recorded = Checkpoint.open(steps[0])
            record = recorded.load("step")
            models = record.get("models")
            earlier = folder / "checkpoints" / folder_name(recorded.step - 1)
            before = Checkpoint.open(earlier) if recorded.step > 1 and models != [] else None
        except UnknownFormat as error:
            raise _problem("RECORDING", str(error), folder) from error
        except CheckpointError as error:
            hint = "remove the folder and record the step again: rl-platform record RUN --step N"
            raise _problem("RECORDING", str(error), folder, hint) from error
        if record["version"] != VERSION:
            message = f"was made by version {record['version']} of the platform, this is {VERSION}"
            raise _problem("RECORDING", message, folder, f"pip install rl-platform=={record['version']}")
        config = load_config(folder / CONFIG, ["runner.resume=auto"], stored=True).config
        if difference := fingerprint_difference(recorded.fingerprint, fingerprint(config)):
            theirs, ours = difference
            message = f"config.yaml is of another model than the recording: this has {theirs}, the config {ours}"
            raise _problem("RECORDING", message, folder, "copy the config.yaml of the recording back")
        return cls(folder, config, recorded.step, record, before, models)


def record(folder: Path, step: int, output: Path | None, from_start: bool) -> Iterator[str]:
    """Runs a run again up to `step` (from 1) and keeps that step; yields lines for the terminal.

    Raises ConfigError for a step that the run does not have or that no checkpoint precedes.
    """
    if not (folder / CONFIG).is_file():
        hint = "name the folder that the run wrote to, its runner.output_dir"
        raise _problem("RUN", "is not the folder of a run" if folder.exists() else "no such folder", folder, hint)
    config = load_config(folder / CONFIG, ["runner.resume=auto"], stored=True).config
    steps = config.runner.max_steps
    if not 1 <= step <= steps:
        raise ConfigError([Problem("--step", "the run has no such step", value=str(step), allowed=f"1 to {steps}")])
    start = _start(folder, step, from_start)
    target = (output or folder / "recordings" / f"step-{step}").expanduser().absolute()
    if os.path.lexists(target):
        again = "to record again, remove the folder or name another: -o FOLDER"
        hint = f"rl-platform replay {shlex.quote(str(target))}; {again}"
        raise _problem("--output", "exists", target, hint)
    if reason := unwritable(target):
        raise _problem("--output", reason, target, "name another folder: -o FOLDER")
    placed = load(folder / CONFIG, _overrides(config, step, start, target), stored=True)

    failures: list[str] = []

    def keep(kept: StateDict) -> None:
        stored = {**kept, "version": VERSION}
        CheckpointStore(target / RECORDED, 1, fingerprint(placed.config)).save(step, {"step": stored})
        failures.append(kept["error"])

    def ppo_of(config: Config, learners: Learners, reporter: Reporter) -> PPO:
        if start is not None and start.name == folder_name(step - 1):  # a run does not write the one it began with
            _keep(start, target / "checkpoints" / start.name)
        return RecordedPPO(config, learners, reporter, step - 1, keep)

    def at_the_step(done: int, _: object) -> bool:
        return done >= step

    try:
        run(placed, str(folder / CONFIG), [at_the_step], ppo_of=ppo_of)
    except FolderInUse:  # another recording
        raise
    except (PlatformError, KeyboardInterrupt) as error:
        if isinstance(error, KeyboardInterrupt) or not any(failures):  # the run failed before the step, or after it
            shutil.rmtree(target, ignore_errors=True)  # else the same command would be refused
            if start is not None and isinstance(error, CheckpointError) and _is_damaged(start):
                error.__notes__ = ["nothing was recorded; --from-start records it without that checkpoint"]
            elif hasattr(error, "__notes__"):  # of a run, which continues from its checkpoint
                error.__notes__ = ["nothing was recorded; the same command begins again"]
            raise
        yield f"step {step} failed as it was recorded: {failures[0]}"
    yield f"recording of step {step}: {target}"
    yield from _against_the_run(folder, target, step)
    yield f"to run it again on this machine: rl-platform replay {shlex.quote(str(target))}"


def _recordings_near(folder: Path) -> str:
    """Returns a hint with recordings inside the folder of a run, or around one of their parts; empty without any."""
    below = (found.parent for depth in ("*", "recordings/*") for found in folder.glob(f"{depth}/{RECORDED}"))
    above = [path for path in folder.absolute().parents[:2] if (path / RECORDED).is_dir()]
    names = shlex.join(map(str, sorted({*below, *above})[:MOST_NAMED]))
    return f"rl-platform replay {names}" if names else ""


def _keep(start: Path, place: Path) -> None:
    """Links or copies a checkpoint, which a run that is going on may delete. Raises CheckpointError if that fails."""
    try:
        shutil.copytree(start, place, copy_function=link)
    except OSError as error:
        reason = error.args[0][0][-1] if isinstance(error, shutil.Error) else error
        raise CheckpointError(f"checkpoint {start} cannot be copied to {place}: {reason}") from error


def _is_damaged(checkpoint: Path) -> bool:
    try:
        Checkpoint.open(checkpoint)
    except CheckpointError:
        return True
    return False


def _start(folder: Path, step: int, from_start: bool) -> Path | None:
    """Returns the newest checkpoint before `step`; None: the run begins again."""
    checkpoints = complete_checkpoints(folder / "checkpoints")
    earlier = [number for number in checkpoints if number < step]
    if earlier and not from_start:
        return checkpoints[max(earlier)].absolute()
    if step > 1 and not from_start:
        message = f"{folder} has no checkpoint before step {step}"
        allowed = f"steps from {min(checkpoints) + 1} on" if checkpoints else "none: the run wrote no checkpoint"
        hint = "--from-start begins again at step 0; runner.save_interval and keep_checkpoints decide what is kept"
        raise ConfigError([Problem("--step", message, value=str(step), allowed=allowed, hint=hint)])
    return None


def _overrides(config: Config, step: int, start: Path | None, target: Path) -> list[str]:
    samples = config.data.train_batch_size * config.algorithm.group_size
    reasoning = [f"runner.log_samples={samples}"] if config.runner.task_type == "reasoning" else []
    return [
        f"runner.output_dir={json.dumps(str(target))}",
        f"runner.resume={'never' if start is None else json.dumps(str(start))}",
        f"runner.save_interval={max(step - 1, 1)}",
        "runner.keep_checkpoints=3",
        "runner.val_check_interval=0",
        "runner.logger_backends=[]",
        *reasoning,
    ]


def _against_the_run(folder: Path, target: Path, step: int) -> Iterator[str]:
    """Compares the metrics of the step with those that the run wrote."""
    theirs, ours = (_metrics_of(place / "metrics.jsonl", step) for place in (folder, target))
    names = [name for name in theirs if name in ours and not name.startswith(UNCOMPARED) and name != "step"]
    if not names:
        yield "the run wrote no metrics of this step: the recording is compared with nothing"
        return
    parted = [name for name in names if theirs[name] != ours[name] and theirs[name] == theirs[name]]
    if parted:
        name = parted[0]
        yield (
            f"{len(parted)} of {len(names)} metrics differ from those of the run: {name} was {theirs[name]}, is "
            f"{ours[name]}. Runs on GPUs repeat their numbers with runner.deterministic only"
        )
    else:
        yield f"the {len(names)} metrics of the step equal those of the run"


def _metrics_of(path: Path, step: int) -> dict[str, float]:
    """Returns the numbers of a step's last line; empty if no such line can be read."""
    lines = path.read_bytes().splitlines() if path.is_file() else []
    for line in reversed(lines):
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            continue  # damaged, or the last line of a run that was killed
        if isinstance(values, dict) and values.get("step") == step:
            return {name: value for name, value in values.items() if isinstance(value, int | float)}
    return {}


def _problem(key: str, message: str, folder: Path, hint: str = "") -> ConfigError:
    return ConfigError([Problem(key, message, value=str(folder), hint=hint)])
