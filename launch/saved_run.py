"""Finds the checkpoint of `--eval` and its config. Imports no torch, so a typo is reported at once."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rl_platform.config import LoadedConfig, load_config
from rl_platform.config.overrides import key_of
from rl_platform.config.source import COMMAND_LINE
from rl_platform.errors import ConfigError, Problem

LATEST = "latest"
RUNS = Path("runs")  # searched for `latest`; the default of runner.output_dir is inside
KEYS = {  # may differ in an evaluation; other keys belong to the model or its training
    "embodied": (
        "env.evaluation.episodes",
        "env.evaluation.seed",
        "env.evaluation.video",
        "env.id",
        "env.kwargs",
        "env.max_episode_steps",
        "env.num_workers",
        "env.step_timeout_s",
        "runner.deadline_s",
    ),
    "reasoning": (
        "rollout.sampling",
        "rollout.val_sampling",
        "rollout.multi_turn",
        "rollout.max_running_requests",
        "reward",
        "runner.deadline_s",
    ),
}


@dataclass(frozen=True)
class SavedRun:
    """The folder of a run and one of its checkpoints."""

    folder: Path
    checkpoint: Path

    def load(self, overrides: Sequence[str]) -> LoadedConfig:
        """Returns the config with overrides. Raises ConfigError, also for keys that change no evaluation."""
        # the folder that the run was resumed from may have been removed
        loaded = load_config(self.folder / "config.yaml", ["runner.resume=auto", *overrides])
        allowed = KEYS[loaded.config.runner.task_type]
        keys = [key_of(override) for override in overrides]
        message = "belongs to the model or its training, which an evaluation cannot change"
        problems = [
            Problem(key, message, COMMAND_LINE, allowed=", ".join(allowed))
            for key in keys
            if not any(f"{key}.".startswith(f"{name}.") for name in allowed)
        ]
        if problems:
            raise ConfigError(problems)
        return loaded


def find_run(name: str) -> SavedRun:
    """Returns a run by `name`: its folder (newest checkpoint), a checkpoint, or `latest` (newest one in runs/).

    Raises ConfigError if there is none.
    """
    checkpoint = _latest() if name == LATEST else _named(Path(name).expanduser().absolute(), name)
    folder = checkpoint.parent.parent
    if not (folder / "config.yaml").is_file():
        message = f"{folder / 'config.yaml'} is missing, without which the checkpoint cannot be evaluated"
        raise _problem(name, message, hint="evaluate checkpoints where their run wrote them, or copy its folder")
    return SavedRun(folder, checkpoint)


def _latest() -> Path:
    manifests = list(RUNS.glob("*/checkpoints/step-*/manifest.json"))
    if not manifests:
        raise _problem(LATEST, f"no run in {RUNS.absolute()} has a checkpoint", hint="name a run's folder")
    return max(manifests, key=lambda path: path.stat().st_mtime).parent.absolute()


def _named(path: Path, name: str) -> Path:
    if not path.exists():
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        close = difflib.get_close_matches(path.name, siblings, n=1)
        raise _problem(name, "no such folder", hint=f"did you mean {path.with_name(close[0])}?" if close else "")
    if path.is_file():
        hint = (
            "name the folder that the run wrote to, its runner.output_dir" if path.suffix in (".yaml", ".yml") else ""
        )
        raise _problem(name, "is a file, not the folder of a run or a checkpoint", hint=hint)
    if (path / "manifest.json").is_file():
        return path
    inside = path if path.name == "checkpoints" else path / "checkpoints"
    steps = sorted(entry for entry in inside.glob("step-*") if (entry / "manifest.json").is_file())
    if steps:
        return steps[-1]
    if (path / "config.yaml").is_file():
        raise _problem(
            name,
            "the run has not written a checkpoint yet",
            hint="runner.save_interval sets when checkpoints are written",
        )
    raise _problem(name, "contains neither a run nor a checkpoint")


def _problem(name: str, message: str, hint: str = "") -> ConfigError:
    allowed = f"a run's folder, one of its checkpoints, or {LATEST}"
    return ConfigError([Problem("--eval", message, COMMAND_LINE, value=name, allowed=allowed, hint=hint)])
