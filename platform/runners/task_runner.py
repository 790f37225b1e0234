"""The interface of the two tasks to the PPO loop: `reasoning.py` and `embodied.py` implement it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rl_platform.records import RolloutBatch, StateDict, Weights
from rl_platform.runners.component_groups import LanguageActorGroup, LearnerGroup, ReferenceGroup
from rl_platform.runners.phases import TakingTurns
from rl_platform.runners.recovery import EnvPart
from rl_platform.runners.rollouts import Collected
from rl_platform.runtime.weights_token import WeightsToken
from rl_platform.runtime.worker_group import WorkerGroup

Metrics = dict[str, float]


@dataclass(frozen=True)
class Learners:
    """The worker groups that hold models.

    critic None: values come from the actor, or the estimator needs none. reference None: there are no KL terms, or they
    compare to `base`, which is the actor: it evaluates its model without adapters. turns None: all are on the same
    devices and stay there.
    """

    actor: LearnerGroup
    critic: LearnerGroup | None = None
    reference: ReferenceGroup | None = None
    base: LanguageActorGroup | None = None
    turns: TakingTurns | None = None


class TaskRunner(Protocol):
    """The interface of the two tasks: collection of experience, validation, and parts of a checkpoint."""

    learners: Learners

    @property
    def groups(self) -> Mapping[str, WorkerGroup]:
        """The worker groups by component."""

    def warm_start(self) -> Metrics:
        """Trains the new models before the first step (`runner.warm_start`)."""

    def publish(self, version: int) -> Weights | WeightsToken:
        """Returns the present weights of the actor. They stay readable while the models are trained."""

    def receive(self, weights: Weights | WeightsToken) -> Metrics:
        """Sends published weights to the rollout."""

    def update(self, weights: Weights | WeightsToken) -> bool:
        """Sends published weights to the rollout while it generates; returns False if it does not generate."""

    def collect(self, step: int) -> Collected:
        """Returns one rollout batch, scored."""

    def trained(self, batch: RolloutBatch) -> Metrics:
        """Counts the rows of `batch` after its update; returns metrics of the responses that are in flight."""

    def check_samples(self, waiting: Sequence[RolloutBatch]) -> None:
        """Compares the counts while nothing is generated. waiting: rollouts that were collected and not trained on.

        Raises Unaccounted if responses were lost or trained on twice.
        """

    def validate(self, step: int) -> Metrics: ...

    def log_tokens(self, step: int, batch: RolloutBatch) -> None:
        """Reports the tokens of a batch that was trained on."""

    def exhausted(self) -> bool:
        """Returns whether the data is used up (`runner.max_epochs`)."""

    def learned_parts(self) -> Mapping[str, LearnerGroup]:
        """Returns the components that are trained, by the name of their checkpoint part: all their ranks write it."""

    def parts(self) -> Mapping[str, EnvPart]:
        """Returns the other components with state, by the name of their checkpoint part."""

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state: StateDict) -> None: ...

    def finish(self, step: int) -> None:
        """Writes the trained model after the last step."""
