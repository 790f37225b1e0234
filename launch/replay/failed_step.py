"""Keeps the PPO step that fails in the run's folder, for `rl-platform replay`.

A step that does not fail costs nothing: until then there are only references. The folder has the last failure alone.
Not covered: failures outside the update, such as those of the generation, and processes that die or hang.
"""

from __future__ import annotations

import logging
import shlex
import shutil
from pathlib import Path

from rl_platform.checkpoint.verify import folder_name
from rl_platform.checkpoint.write import CheckpointStore, Shards
from rl_platform.config.schema import Config
from rl_platform.disk import link
from rl_platform.errors import PlatformError, WorkerDied
from rl_platform.launch.replay.recorded_step import RecordedPPO, fields_of
from rl_platform.launch.replay.recordings import RECORDED, VERSION
from rl_platform.records import RolloutBatch
from rl_platform.reporter import Reporter
from rl_platform.run_files import CONFIG
from rl_platform.runners.component_groups import LearnerGroup
from rl_platform.runners.run_fingerprint import fingerprint
from rl_platform.runners.state import shards
from rl_platform.runners.task_runner import Learners, Metrics

log = logging.getLogger(__name__)

FAILED = Path("recordings") / "failed"  # in the folder of a run


class FailedStepPPO(RecordedPPO):
    """Records a step that fails into the `folder` of the run, with the models before it, as far as they still exist.

    They are the newest checkpoint, if it is that of the step before. Else they are the models of now, if they have one
    rank and the step has not changed them.
    """

    def __init__(self, config: Config, learners: Learners, reporter: Reporter, folder: Path) -> None:
        super().__init__(config, learners, reporter, recorded=-1, keep=lambda record: None)
        self.config, self.folder = config, folder
        self.phases.keeps_steps = False

    def update(self, batch: RolloutBatch, step: int) -> Metrics:
        self.record = {"ppo": self.state_dict(), "numbers": self.numbers}
        try:
            return super().update(batch, step)
        except Exception as error:
            if not isinstance(error, PlatformError) or error.exit_code != WorkerDied.exit_code:
                self._keep_failure(batch, step + 1, error)
            raise
        finally:
            self.record = {}
            self.numbers.clear()

    def _keep_failure(self, batch: RolloutBatch, number: int, error: Exception) -> None:
        """Writes the record of step `number` (from 1). A failure to do so is logged: the first error matters more."""
        target = self.folder / FAILED
        try:
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
            shutil.copy(self.folder / CONFIG, target)
            names = self._keep_models(target, number)
            kept = {name: value for name, value in self.record.items() if name != "training"}
            batches = {"inputs": batch, **{name: self.record[name] for name in self.record.keys() - kept.keys()}}
            kept |= {name: fields_of(rows) for name, rows in batches.items()}
            kept |= {"error": str(error), "version": VERSION, "models": names}
            CheckpointStore(target / RECORDED, 1, fingerprint(self.config)).save(number, {"step": kept})
        except Exception as problem:  # of the disk, or of a rank that does not answer
            log.warning("step %d could not be recorded in %s: %s", number, target, problem)
            return
        if names == self._parts():
            error.add_note(f"the step is recorded: rl-platform replay {shlex.quote(str(target))}")
            return
        started = "" if any((self.folder / "checkpoints").glob("step-*")) else " --from-start"
        error.add_note(
            f"the input of the step is recorded in {target}. The step changed the models before it failed, so this "
            f"records it whole: rl-platform record {shlex.quote(str(self.folder))} --step {number}{started}"
        )

    def _kept(self, batch: RolloutBatch) -> object:
        return batch

    def _parts(self) -> list[str]:
        return ["actor"] if self.learners.critic is None else ["actor", "critic"]

    def _keep_models(self, target: Path, number: int) -> list[str]:
        """Stores the models before step `number`; returns their names."""
        before = self.folder / "checkpoints" / folder_name(number - 1)
        if number == 1:  # the config and the seed give them
            return self._parts()
        if before.is_dir():
            shutil.copytree(before, target / "checkpoints" / before.name, copy_function=link)
            return self._parts()
        models = self._unchanged()
        if models:
            parts: dict[str, Shards] = {name: shards(group) for name, group in models.items()}
            CheckpointStore(target / "checkpoints", 1, fingerprint(self.config)).save(number - 1, parts)
        return list(models)

    def _unchanged(self) -> dict[str, LearnerGroup]:
        """Returns the models of one rank that no optimizer step of this PPO step has changed."""
        groups: dict[str, LearnerGroup | None] = {"actor": self.learners.actor, "critic": self.learners.critic}
        models = {name: group for name, group in groups.items() if group is not None and group.world_size == 1}
        if "training" in self.record:
            models = {name: group for name, group in models.items() if not any(group.latest_steps().wait()[0])}
        return models
