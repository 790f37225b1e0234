"""Checkpoints of real runs: damaged files, and files and manifests with absurd values under a right seal."""

from __future__ import annotations

import hashlib
import json
import pickle
import random
import shutil
from collections.abc import Callable
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from fuzz import values
from tiny_configs import EMBODIED, REASONING

from rl_platform.checkpoint.verify import seal
from rl_platform.envs.reasoning.tasks import build_questions
from rl_platform.launch import command
from rl_platform.launch.runtime_choice import runtime_for
from rl_platform.launch.session import run, task_of
from rl_platform.launch.start_checks.env_spaces import spaces_of
from rl_platform.reporter import Reporters
from rl_platform.runners.ppo import PPO
from rl_platform.runners.rollouts import Rollouts
from rl_platform.runners.state import RunState
from rl_platform.runners.task_runner import TaskRunner

PARTS = (
    *("../../../../etc/passwd", "/etc/passwd", "..", ".", "", "env.pt/../../x", "link.pt", "manifest.json", "\0"),
    "a" * 300,
)


class Ran:
    """Unpickling it would run code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("code of a checkpoint ran: Traceback",)


class Checkpoints:
    """Restores a run of each task from each checkpoint, as a resume does."""

    def __init__(self, folder: Path) -> None:
        self.runs = {task: Run(folder, task, text) for task, text in (("embodied", EMBODIED), ("reasoning", REASONING))}

    def case(self, numbers: random.Random) -> tuple[str, Callable[[], object]]:
        task = numbers.choice(tuple(self.runs))
        chosen = self.runs[task]
        shutil.rmtree(chosen.output / "checkpoints", ignore_errors=True)
        shutil.copytree(chosen.kept, chosen.output / "checkpoints")
        folder = chosen.output / "checkpoints" / "step-00000001"
        done = self._change(numbers, folder)
        resume = numbers.choice(("auto", str(folder)))
        return f"{task}, runner.resume={resume}: {done}"[:3000], lambda: chosen.restore(resume)

    def close(self) -> None:
        for each in self.runs.values():
            each.stack.close()

    def _change(self, numbers: random.Random, folder: Path) -> str:
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json")
        file = numbers.choice(files)
        match numbers.randrange(8):
            case 0:
                file = numbers.choice((*files, folder / "manifest.json"))
                file.write_bytes(values.damaged(file.read_bytes(), numbers))
                return f"{file.name} damaged"
            case 1:
                file.write_bytes(values.damaged(file.read_bytes(), numbers))
                said = f"{file.name} damaged under a right seal"
            case 2:
                file.write_bytes(pickle.dumps(Ran()) if numbers.random() < 0.5 else b"")
                said = f"{file.name} a pickle or empty"
            case 3 | 4 | 5:
                plain = [each for each in files if each.suffix == ".pt"]
                file = numbers.choice(plain)
                state = torch.load(file, weights_only=True)
                new = values.changed(state, numbers, numbers.randrange(1, 3))
                if numbers.random() < 0.05:
                    new = {"x": Ran()}
                try:
                    torch.save(new, file)
                except Exception as error:
                    return f"not written: {error}"
                said = f"{file.name}: {_differences(state, new)}"
            case _:
                return self._manifest(numbers, folder)
        _seal(folder)
        return said

    def _manifest(self, numbers: random.Random, folder: Path) -> str:
        body = json.loads((folder / "manifest.json").read_bytes())
        body.pop("sha256")
        if numbers.random() < 0.3:
            (folder / "link.pt").symlink_to("/etc/passwd")
            body["parts"][numbers.choice(sorted(body["parts"]))] = numbers.choice(PARTS)
        else:
            body = values.changed(body, numbers, numbers.randrange(1, 3))
        try:
            (folder / "manifest.json").write_bytes(seal(body))
        except Exception:
            (folder / "manifest.json").write_text(json.dumps(body))
        return f"manifest {json.dumps(body)[:2000]}"


class Run:
    """A run of one step, whose components stay until a restore of them fails."""

    def __init__(self, folder: Path, task: str, text: str) -> None:
        self.output, self.kept = folder / task, folder / f"{task}-kept"
        self.stack, self.runner = ExitStack(), None
        file = folder / f"{task}.yaml"
        file.write_text(text)
        overrides = [f"runner.output_dir={self.output}", "runner.max_steps=1"]
        if task == "embodied":
            overrides += ["env.normalize_observations=true", "env.normalize_rewards=true"]
        placed = command.load(str(file), overrides)
        self.config, self.placement, self.inventory = placed.config, placed.placement, placed.inventory
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            run(placed, str(file))
        embodied = task == "embodied"
        self.world = spaces_of(self.config) if embodied else build_questions(self.config.data, self.config.runner.seed)
        shutil.copytree(self.output / "checkpoints", self.kept)
        self._started()

    def restore(self, resume: str) -> None:
        """Loads the checkpoint into all components, as a resume does."""
        reporter = Reporters([])
        state = RunState(self.config.changed({"runner.resume": resume}), self.output, reporter)
        runner = self._started()
        try:
            state.restore(
                runner, PPO(self.config, runner.learners, reporter), Rollouts(runner, self.config.runner.max_steps)
            )
        except BaseException:
            self.runner = None
            raise

    def _started(self) -> TaskRunner:
        if self.runner is None:
            self.stack.close()
            runtime = self.stack.enter_context(runtime_for(self.config, self.placement))
            parts = (runtime, Reporters([]), self.output, self.world, self.placement, self.inventory)
            self.runner = task_of(self.config, *parts)
        return self.runner


def _seal(folder: Path) -> None:
    """Makes the manifest that of the files as they are."""
    file = folder / "manifest.json"
    body = json.loads(file.read_bytes())
    body.pop("sha256")
    for name in body["files"]:
        data = (folder / name).read_bytes()
        body["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    file.write_bytes(seal(body))


def _differences(before: Any, after: Any, path: str = "") -> list[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        keys = [*before, *(key for key in after if key not in before)]
        return [
            line
            for key in keys
            for line in _differences(before.get(key, "(none)"), after.get(key, "(none)"), f"{path}.{key}")
        ]
    same = before is after or (repr(before) == repr(after))
    return [] if same else [f"{path}: {repr(before)[:60]} -> {repr(after)[:200]}"]
