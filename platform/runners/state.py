"""What a run keeps on disk to go on later: where it resumes from, what a checkpoint holds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from rl_platform.checkpoint import Checkpoint, CheckpointStore
from rl_platform.config.schema import Config
from rl_platform.metrics import Reporter
from rl_platform.runtime.group import WorkerGroup


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class HasParts(Stateful, Protocol):
    def parts(self) -> Mapping[str, WorkerGroup]: ...


class RunState:
    """Checkpoints of one run. `resume_from`: the checkpoint to go on from, chosen before anything was started."""

    def __init__(self, store: CheckpointStore, resume_from: Checkpoint | None, reporter: Reporter) -> None:
        self.store, self.resume_from, self.reporter = store, resume_from, reporter

    @classmethod
    def find(cls, config: Config, output_dir: Path) -> tuple[CheckpointStore, Checkpoint | None]:
        """The run's checkpoints and the one that `runner.resume` asks for."""
        store = CheckpointStore(output_dir / "checkpoints", config.runner.keep_checkpoints, fingerprint(config))
        if config.runner.resume == "never":
            return store, None
        if config.runner.resume == "auto":
            return store, store.latest()
        return store, store.open(config.runner.resume)

    def restore(self, task: HasParts, ppo: Stateful) -> int:
        """Everyone gets the state of the checkpoint; returns its step, 0 without one."""
        if self.resume_from is None:
            return 0
        for name, group in task.parts().items():
            group.load_state_dict(self.resume_from.load(name)).wait()
        run = self.resume_from.load("run")
        task.load_state_dict(run["task"])
        ppo.load_state_dict(run["ppo"])
        self.reporter.note(f"resumed from step {self.resume_from.step}: {self.resume_from.path}")
        return self.resume_from.step

    def save(self, step: int, task: HasParts, ppo: Stateful) -> None:
        parts = {name: group.rank(0).state_dict().result() for name, group in task.parts().items()}
        checkpoint = self.store.save(step, parts | {"run": {"task": task.state_dict(), "ppo": ppo.state_dict()}})
        self.reporter.note(f"checkpoint of step {step}: {checkpoint.path}")


def fingerprint(config: Config) -> str:
    """Changes when a checkpoint of the one config cannot be loaded by the other."""
    critic = config.critic.model or config.actor.model
    shape = [
        config.runner.task_type,
        config.actor.model.model_dump(),
        critic.model_dump(),
        config.env.id,
        config.env.num_envs,
    ]
    return hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:16]
