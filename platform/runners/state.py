"""State of a run on disk: checkpoints, the one it resumes from, and the mark of a finished run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rl_platform.checkpoint.verify import Checkpoint, Written
from rl_platform.checkpoint.write import CheckpointStore, Part, Shards
from rl_platform.config.schema import Config
from rl_platform.errors import CheckpointError, ConfigError, Problem, WorkerError
from rl_platform.records import StateDict
from rl_platform.reporter import Reporter
from rl_platform.run_files import FINISHED
from rl_platform.runners.component_groups import LearnerGroup
from rl_platform.runners.run_fingerprint import fingerprint

if TYPE_CHECKING:
    from rl_platform.runners.ppo import PPO
    from rl_platform.runners.rollouts import Rollouts
    from rl_platform.runners.task_runner import TaskRunner

MISTYPED = (KeyError, IndexError, TypeError, ValueError, AttributeError, AssertionError, ArithmeticError, RuntimeError)
TRUST = "To resume from it, set runner.trust_checkpoint=true if you trust everyone who could write to its folder"


@dataclass(frozen=True)
class SmallState:
    """The state of a run without its learners, which is small enough for a copy in memory.

    parts: of the environments; run: of the runner, the PPO object and the rollouts.
    """

    parts: dict[str, StateDict]
    run: StateDict


class RunState:
    """Checkpoints of the run in `output_dir`, and `resume_from`: the newest one that was written, before that the one
    of `runner.resume` (None: start at step 0).

    Raises CheckpointError for a damaged checkpoint at an explicit path and for one of another model. Also raises it if
    every checkpoint of the folder is damaged or cannot be read. Raises ConfigError for a finished run whose checkpoints
    were deleted: a new start would overwrite its metrics and model. restarted: this command has written checkpoints
    before, of which the newest counts, whatever `runner.resume` is. saved: one was written.
    """

    def __init__(self, config: Config, output_dir: Path, reporter: Reporter, restarted: bool = False) -> None:
        self.store = CheckpointStore(output_dir / "checkpoints", config.runner.keep_checkpoints, fingerprint(config))
        self.reporter = reporter
        self._max_steps, self._max_epochs = config.runner.max_steps, config.runner.max_epochs
        self._resume = config.runner.resume
        self._trusts, self._wrote = config.runner.trust_checkpoint, False
        self._mark = output_dir / FINISHED
        self.resume_from: Checkpoint | None = None
        self.saved = self.restored = False
        if restarted or config.runner.resume == "auto":
            self.resume_from = self.store.latest()
            if self.resume_from is None and self._mark.exists():
                raise ConfigError([_without_checkpoints(output_dir)])
        elif config.runner.resume != "never":
            self.resume_from = self.store.open(config.runner.resume)

    @property
    def ended_by(self) -> str:
        """The key that ended an earlier run, with its exports, and would end this one at its checkpoint; else empty."""
        if self.resume_from is None or not self._mark.exists():
            return ""
        if self.resume_from.step >= self._max_steps:
            return "runner.max_steps"
        at_end = self._max_epochs is not None and self._mark.read_text(errors="replace") == self._used_up()
        return "runner.max_epochs" if at_end else ""

    def _used_up(self) -> str:
        """Returns the content of the mark of a run whose data was used up at its newest checkpoint."""
        assert self.resume_from is not None
        return f"step {self.resume_from.step}, max_epochs {self._max_epochs}"

    def begin(self) -> None:
        """Marks the run as unfinished, and sets checkpoints of later steps aside.

        Must come before the metrics of later steps are cut: a checkpoint that counts has the metrics of its steps.
        """
        self._mark.unlink(missing_ok=True)
        step = 0 if self.resume_from is None else self.resume_from.step
        if left := self.store.set_aside(step):
            steps = ", ".join(map(str, left))
            self.reporter.note(
                f"going back to step {step}: checkpoints of later steps ({steps}) are hidden in {self.store.folder} "
                "as .left-step-*; the next checkpoint deletes them"
            )

    def finish(self, reason: str) -> None:
        """Marks the run as finished. reason: as `train` returns it."""
        self._mark.write_text(self._used_up() if reason == "max_epochs" else "")

    def restore(self, runner: TaskRunner, ppo: PPO, rollouts: Rollouts) -> int:
        """Loads the state of the checkpoint into all parts; returns its step, 0 without one.

        Raises CheckpointError for a state of another run, and for one that may run code unless
        `runner.trust_checkpoint` is true.
        """
        if self.resume_from is None:
            self.restored = True
            return 0
        try:
            self._load(self.resume_from, runner, ppo, rollouts)
        except (WorkerError, *MISTYPED) as error:  # of a state that was not saved by such a run
            cause = error.__cause__ if isinstance(error, WorkerError) and error.__cause__ else error
            reason = f"{type(cause).__name__}: {cause}"
            raise CheckpointError(
                f"checkpoint {self.resume_from.path} holds other values than this run saves: {reason}. "
                "Use the config and the version of the platform that it was written with"
            ) from error
        self.restored = True
        return self.resume_from.step

    def _load(self, checkpoint: Checkpoint, runner: TaskRunner, ppo: PPO, rollouts: Rollouts) -> None:
        for name, group in runner.learned_parts().items():
            group.load_state(str(checkpoint.file(name))).wait()
        for name, part in runner.parts().items():
            state = checkpoint.load(name)
            if not self._trusts:
                try:
                    part.refuse_code(state)
                except CheckpointError as error:
                    raise CheckpointError(f"checkpoint file {checkpoint.file(name)}: {error}. {TRUST}") from error
            part.load_state_dict(state).wait()
        run = checkpoint.load("run")
        runner.load_state_dict(run["task"])
        ppo.load_state_dict(run["ppo"])
        rollouts.load_state_dict(run.get("rollouts", {}))

    def read(self, runner: TaskRunner, ppo: PPO, rollouts: Rollouts) -> SmallState:
        """Returns the present state, which may refer to objects of the run. Call `rollouts.settle` first."""
        parts = {name: part.state_dict().wait()[0] for name, part in runner.parts().items()}
        run = {"task": runner.state_dict(), "ppo": ppo.state_dict(), "rollouts": rollouts.state_dict()}
        return SmallState(parts, run)

    def save(self, step: int, runner: TaskRunner, small: SmallState) -> None:
        """Writes a checkpoint of `small` and of the learners as they are now."""
        parts: dict[str, Part] = {name: shards(group) for name, group in runner.learned_parts().items()}
        if not self._trusts and not self._wrote:
            self._note_code(runner, small.parts)
        self._wrote = True
        self.reporter.sync()  # a checkpoint without the metrics of its steps would leave a gap in them
        checkpoint = self.resume_from = self.store.save(step, parts | small.parts | {"run": small.run})
        self.saved = True
        self.reporter.note(f"checkpoint of step {step}: {checkpoint.path}")

    def _note_code(self, runner: TaskRunner, states: Mapping[str, StateDict]) -> None:
        """Notes that a resume will refuse these states."""
        for name, part in runner.parts().items():
            try:
                part.refuse_code(states[name])
            except CheckpointError as error:
                self.reporter.note(f"checkpoints: {error}. {TRUST}")

    def outlook(self) -> str:
        """Returns how to continue after the run was stopped, for messages."""
        try:
            steps = self.store.steps()
        except CheckpointError:
            return f"{self.store.folder} cannot be read"
        again = "the same command" if self._resume == "auto" else "runner.resume=auto"
        if steps:
            return f"{again} goes on from step {steps[-1]}"
        begins = f"{again} starts over"
        if self._resume not in ("auto", "never"):
            begins = f"the same command goes on from {self._resume}"
        return f"no checkpoint was written yet (runner.save_interval): {begins}"


def _without_checkpoints(output_dir: Path) -> Problem:
    message = "a finished run without its checkpoints: to start anew would overwrite its metrics and its model"
    hint = f"name another runner.output_dir; or remove {output_dir / FINISHED}, and they are overwritten"
    return Problem("runner.output_dir", message, value=str(output_dir), hint=hint)


def shards(group: LearnerGroup) -> Shards:
    """Returns the checkpoint part that all ranks of a learner write."""

    def write(folder: Path) -> dict[str, Written]:
        return {name: file for files in group.save_state(str(folder)).wait() for name, file in files.items()}

    return Shards(sum(group.state_bytes().wait()), write)
