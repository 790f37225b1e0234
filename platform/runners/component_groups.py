"""The calls that runners make on worker groups, with their types.

A `WorkerGroup` submits any public method of its component on all ranks and returns a `Handle`. A protocol lists the
calls of one component that a runner needs, so that a type checker follows `groups["actor"].publish(3).wait()`. The
components implement these methods without the `Handle`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, Self, TypedDict

from torch import Tensor

from rl_platform.checkpoint.verify import Written
from rl_platform.components.environment import NewEpisodes
from rl_platform.components.policy_rollout import Actions, Observations, Policy
from rl_platform.components.rollout import Group
from rl_platform.config.schema.rollout import Sampling
from rl_platform.envs.embodied.evaluate import EvaluationResult
from rl_platform.records import Prompt, RolloutBatch, StateDict, Trajectory, Weights, WeightsReceived
from rl_platform.runtime.channel import Channel
from rl_platform.runtime.weights_token import WeightsToken
from rl_platform.runtime.worker_group import Handle

if TYPE_CHECKING:
    from rl_platform.components.env_ranks.all_envs import Peers


class Ranks(Protocol):
    """The interface of every worker group."""

    @property
    def name(self) -> str: ...
    @property
    def world_size(self) -> int: ...
    def on(self, ranks: Iterable[int]) -> Self: ...
    def rank(self, rank: int) -> Self: ...
    def timings(self) -> dict[str, tuple[int, float]]: ...


class EvaluatorGroup(Ranks, Protocol):
    """Ranks that compute log-probs or values of a batch."""

    def evaluate(self, batch: RolloutBatch) -> Handle[dict[str, Tensor]]: ...
    def offload(self, weights: bool) -> Handle[None]: ...


class LearnerGroup(EvaluatorGroup, Protocol):
    """Ranks that train a model and publish its weights."""

    def update(self, batch: RolloutBatch, step: int) -> Handle[dict[str, float]]: ...
    def latest_steps(self) -> Handle[list[dict[str, float]]]: ...
    def publish(self, version: int, copy: bool = False, on_request: bool = False) -> Handle[Weights | WeightsToken]: ...
    def whole_weights(self) -> Handle[dict[str, Tensor]]: ...
    def save_state(self, folder: str) -> Handle[dict[str, Written]]: ...
    def load_state(self, folder: str) -> Handle[None]: ...
    def state_bytes(self) -> Handle[int]: ...


class LanguageActorGroup(LearnerGroup, Protocol):
    def evaluate_reference(self, batch: RolloutBatch) -> Handle[dict[str, Tensor]]: ...
    def receive_reference_head(self, head: Tensor) -> Handle[None]: ...
    def export(self, folder: str) -> Handle[str]: ...


class EmbodiedActorGroup(LearnerGroup, Protocol):
    def warm_start(self) -> Handle[dict[str, float]]: ...
    def export(self, folder: str, step: int, normalizer: StateDict | None) -> Handle[str]: ...


class ReferenceGroup(EvaluatorGroup, Protocol):
    def head(self) -> Handle[Tensor]: ...


class RewardGroup(Ranks, Protocol):
    def stream(self, source: Channel[Trajectory], sink: Channel[Trajectory]) -> Handle[int]: ...


class RolloutGroup(Ranks, Protocol):
    """Of language models and of embodied policies, which share `receive` only."""

    def receive(self, weights: Weights | WeightsToken) -> Handle[WeightsReceived]: ...
    def serve(self, source: Channel[Observations], sink: Channel[Actions]) -> Handle[None]: ...
    def generate(
        self,
        prompts: Sequence[Prompt],
        samples: int,
        sampling: Sampling,
        purpose: str,
        step: int,
        sink: Channel[Trajectory],
        version: int | None = None,
        answered: Sequence[tuple[int, int]] = (),
        updates: Channel[Weights | WeightsToken] | None = None,
    ) -> Handle[None]: ...
    def generate_until(
        self,
        groups: Sequence[Group],
        needed: int,
        sampling: Sampling,
        step: int,
        complete: Channel[Trajectory],
        cut: Channel[Trajectory],
        version: int | None,
    ) -> Handle[None]: ...


class EnvGroup(Ranks, Protocol):
    """Ranks that step the environments and collect embodied rollouts."""

    def begin(self, peers: Peers | None) -> Handle[None]: ...
    def collect(
        self, step: int, policy: Policy | None, peers: Peers | None = None
    ) -> Handle[tuple[RolloutBatch, dict[str, float]]]: ...
    def simulate(self, peers: Peers) -> Handle[None]: ...
    def finds_policy(self) -> Handle[bool]: ...
    def rollout_path(self, acts_here: bool) -> Handle[str]: ...
    def evaluate(
        self, step: int, video: str | None, last: bool, deterministic: bool, policy: Policy | None
    ) -> Handle[EvaluationResult]: ...
    def drawn(self) -> Handle[str]: ...
    def state_dict(self) -> Handle[StateDict]: ...
    def load_state_dict(self, state: StateDict) -> Handle[NewEpisodes]: ...
    def see_new_episodes(self, of_ranks: Sequence[NewEpisodes]) -> Handle[None]: ...
    def normalizer(self) -> Handle[StateDict | None]: ...


class TypedGroups(TypedDict, total=False):
    """The worker groups of a run by component. The actor of an embodied run, `EmbodiedActorGroup`, has two names."""

    actor: LanguageActorGroup
    critic: LearnerGroup
    reference: ReferenceGroup
    rollout: RolloutGroup
    reward: RewardGroup
    env: EnvGroup
