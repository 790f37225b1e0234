"""A PPO step that keeps its input and the numbers that each phase returns. Recording and replay use it.

Not covered: files (`recordings.py`), and the generation, whose output is the input of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields

import torch
from torch import Tensor

from rl_platform.config.schema import Config
from rl_platform.errors import Diverged, PlatformError
from rl_platform.records import RolloutBatch, StateDict
from rl_platform.reporter import Reporter
from rl_platform.runners.component_groups import LearnerGroup
from rl_platform.runners.phases import Phase, Phases, T
from rl_platform.runners.ppo import PPO
from rl_platform.runners.task_runner import Learners, Metrics

Numbers = dict[str, dict[str, Tensor]]  # of a step, by phase and name, in the order in which they are computed
EVALUATED = {  # the phase that computes a field of the batch
    "reference": ("reference_log_probs", "reference_states"),
    "log-probs": ("log_probs", "full_kl", "squared_probs"),
    "values": ("values", "end_values"),
}
PHASES = (*EVALUATED, "advantages", "critic", "actor")


class RecordedPPO(PPO):
    """Keeps step `recorded` (from 0). `keep` is called once with its record, also if the step fails.

    A record has the values: inputs (the batch of the step), ppo (the state before it), numbers, training (the batch
    that the models are trained on; absent if the step failed before), error (empty if it did not fail). only: the one
    phase to compute.
    """

    phases: RecordedPhases

    def __init__(
        self,
        config: Config,
        learners: Learners,
        reporter: Reporter,
        recorded: int,
        keep: Callable[[StateDict], None],
        only: str | None = None,
    ) -> None:
        super().__init__(config, learners, reporter)
        self.recorded, self.keep = recorded, keep
        self.numbers: Numbers = {}
        self.record: StateDict = {}
        self.phases = RecordedPhases(config, learners, reporter, self.numbers, only)

    def update(self, batch: RolloutBatch, step: int) -> Metrics:
        if step != self.recorded:
            return super().update(batch, step)
        self.numbers.clear()
        self.record = {"inputs": fields_of(batch), "ppo": self.state_dict(), "numbers": self.numbers, "error": ""}
        try:
            metrics = super().update(batch, step)
            if self.phases.only is None:
                self._keep_weights()
        except PlatformError as error:
            self.record["error"] = str(error)
            raise
        finally:
            self.keep(self.record)
        return metrics

    def _estimate(self, batch: RolloutBatch) -> RolloutBatch:
        numbers = self.numbers.setdefault("advantages", {}) if self._records else {}
        numbers["rewards"] = batch.rewards
        if batch.loss_weights is not None:
            numbers["loss_weights"] = batch.loss_weights
        batch = super()._estimate(batch)
        assert batch.advantages is not None
        numbers["advantages"] = batch.advantages
        if batch.returns is not None:  # estimators of groups have none
            numbers["returns"] = batch.returns
        return batch

    def _train(self, batch: RolloutBatch, step: int) -> Metrics:
        if self._records:
            self.record["training"] = self._kept(batch)
        return super()._train(batch, step)

    def _kept(self, batch: RolloutBatch) -> object:
        """Returns the fields of a batch that a record stores."""
        return fields_of(batch)

    @property
    def _records(self) -> bool:
        return bool(self.record)

    def _keep_weights(self) -> None:
        for name, group in self.phases.trained():
            weights = group.whole_weights().wait()[0]
            self.numbers[f"weights of the {name}"] = {key: tensor.clone() for key, tensor in weights.items()}


class RecordedPhases(Phases):
    """Adds the results of phases to `numbers`. only: the one phase of training to run; None: all."""

    def __init__(
        self, config: Config, learners: Learners, reporter: Reporter, numbers: Numbers, only: str | None
    ) -> None:
        super().__init__(config, learners.turns, reporter)
        self.learners, self.numbers, self.only = learners, numbers, only
        self.keeps_steps = True  # also of an update that did not fail
        self._names: list[str] = []

    def trained(self) -> Iterator[tuple[str, LearnerGroup]]:
        """Yields the models that the latest update trained."""
        for name in self._names:
            group = self.learners.critic if name == "critic" else self.learners.actor
            assert group is not None
            yield name, group

    def run(self, stage: Sequence[Phase[T]]) -> dict[str, T]:
        training = [phase for phase in stage if phase.name.startswith("train ")]
        if training and self.only is not None:
            training = stage = [phase for phase in stage if phase.component == self.only]
        self._names = [phase.component for phase in training]
        try:
            results = super().run(stage)
        except Diverged:
            self._keep_steps()
            raise
        if self.keeps_steps:
            self._keep_steps()
        computed: Mapping[str, object] = results
        for phase, names in EVALUATED.items():
            if tensors := {name: value for name in names if isinstance(value := computed.get(name), Tensor)}:
                self.numbers[phase] = tensors
        return results

    def _keep_steps(self) -> None:
        """Keeps the metrics of each mini-batch that was trained on."""
        for name, group in self.trained():
            for number, metrics in enumerate(group.latest_steps().wait()[0], start=1):
                values = metrics or {"gradient_not_finite": 1.0}
                self.numbers[f"train {name}, mini-batch {number}"] = {
                    key: torch.tensor(value, dtype=torch.float64) for key, value in values.items()
                }


def fields_of(batch: RolloutBatch) -> StateDict:
    """Returns the tensors of a batch by name, for `batch_of`."""
    values = {field.name: getattr(batch, field.name) for field in fields(batch) if field.name not in ("inputs", "host")}
    copied = {name: value.clone() for name, value in values.items() if value is not None}
    return {"inputs": {name: value.clone() for name, value in batch.inputs.items()}, **copied}


def batch_of(state: StateDict) -> RolloutBatch:
    """Returns the batch whose fields are the entries of a recorded state."""
    return RolloutBatch(**state)


def without_phases(batch: RolloutBatch, phases: Sequence[str]) -> RolloutBatch:
    """Returns the batch without the fields that these phases compute."""
    return batch.with_fields({name: None for phase in phases for name in EVALUATED.get(phase, ())})
