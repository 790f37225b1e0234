"""The small typed records that travel between components.

Shapes: B rows (sequences or transitions), T positions. A reasoning row is one sequence, prompt and response together;
an embodied rollout has one row per environment and one position per step, and is flattened to one row per transition
(`RolloutBatch.flatten`) once advantages are known, so that mini-batches mean the same thing in both tasks. Policies
that choose chunks of actions have one transition per chunk, and at finer levels than chunks several positions each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Shaped


@dataclass(frozen=True)
class Prompt:
    """One task instance. `index` is its position in the data, `answer` what the verifier compares to."""

    index: int
    text: str
    answer: str
    token_ids: tuple[int, ...]
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. `temperature` 0 means greedy; `top_k` 0 and `top_p` 1 switch the filters off."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True)
class Conversation:
    """What a response of several turns has besides its tokens.

    turns: the policy's own, as text; observed: per token of the response, whether it was answered by the tool or the
    environment (its log-prob is 0, and nothing is trained on it); observations: how many such answers there are;
    failed: one did not come, so the response has no reward.
    """

    turns: tuple[str, ...]
    observed: tuple[bool, ...]
    observations: int
    failed: bool = False


@dataclass(frozen=True)
class Trajectory:
    """One sampled response, of one turn, or of several with what was answered between them.

    token_ids: response tokens including EOS if it was sampled; log_probs: the engine's log-probability of each of them
    (of the temperature-scaled, unfiltered distribution); finish_reason: "stop" (EOS), "length", or "abort" of one that
    is not complete and goes on in the next step; weights_version: of the policy that generated it; reward, metric and
    step_rewards (where in token_ids a step ends, and its reward) are set by the reward component, `valid` is False when
    scoring failed. conversation: only of several turns; the version is then that of the first turn, and the last token
    is always a sampled one. segments: (version, tokens) of the stretches, in their order, of a response that several
    versions generated; the version is then that of the first. Empty: all of it is of `weights_version`.
    """

    prompt: Prompt
    sample: int
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: str
    weights_version: int
    text: str = ""
    reward: float = 0.0
    metric: float = 0.0
    valid: bool = True
    step_rewards: tuple[tuple[int, float], ...] = ()
    conversation: Conversation | None = None
    segments: tuple[tuple[int, int], ...] = ()

    @property
    def complete(self) -> bool:
        return self.finish_reason != "abort"

    @property
    def sampled(self) -> tuple[bool, ...]:
        """Per token of the response: whether the policy chose it."""
        if self.conversation is None:
            return (True,) * len(self.token_ids)
        return tuple(not observed for observed in self.conversation.observed)

    def state_dict(self) -> dict[str, Any]:
        """Plain values, the prompt by its index: for checkpoints."""
        turns = None if self.conversation is None else vars(self.conversation)
        return {**vars(self), "prompt": self.prompt.index, "conversation": turns}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], prompts: Mapping[int, Prompt]) -> Trajectory:
        """What `state_dict` was taken of. `prompts` by their index."""
        turns = state.get("conversation")  # checkpoints of before had none
        conversation = None if turns is None else Conversation(**turns)
        return cls(**{**state, "prompt": prompts[state["prompt"]], "conversation": conversation})


@dataclass
class RolloutBatch:
    """Everything the PPO step knows about one rollout. Tensors are float32 unless said otherwise.

    inputs: what the model reads, keyed by name, first dimension B: {"tokens": [B,T] int64, "lengths": [B] int64} for
    reasoning; {"observations", "actions": [B,C,...]} for embodied, C choices of the policy (C = T but for action
    chunks, which have "executed" [B,C,K] bool too: the actions that count; recurrent policies have "episode_starts"
    [B,T] bool and "hidden_states" [B,S,H], before the first step of each of S sequences that a row consists of;
    policies with an instruction for each of several tasks have "tasks" [B,C] int64).
    action_mask [B,T] bool: positions sampled by the policy. sample_mask [B] bool: rows that count.
    group_ids [B] int64: prompt identity. rewards [B,T]: per position, already placed.
    rollout_log_probs [B,T]: as reported by the rollout engine. log_probs [B,T]: of the training engine before the
    update. values [B,T]: V of the state before the action. ends [B,T] bool: the episode (or the rollout) ends after
    this position; bootstrapped [B,T] bool: such an end after which a value counts; end_observations [B,C,...]: what
    was seen after it; end_values [B,T]: the value of that state, 0 elsewhere. All four None: one episode per row;
    without `ends` but with the two others: one episode per row, that may have been cut.
    value_mask [B,T] bool: positions at which rewards, values and returns stand; None: all. entropy_units [B,T]: what
    the entropy of a position counts for in the mean over entropies; None: 1 (see algorithms/action_levels.py).
    correct [B] bool: the task's own metric says that the row solved it. versions [B] int64: of the weights behind the
    row. compared [B] bool: rows whose score others of their group are compared to; None: those that count.
    kl_penalties [B,T]: what was subtracted from the rewards. loss_weights [B,T]: constants on the policy loss, finite
    everywhere; None: all 1. reference_states [B,T,H], full_kl [B,T]: hidden states of the reference that predict each
    token, and the KL of the whole distributions before the update; only with an estimator `full`.
    """

    inputs: dict[str, Tensor]
    action_mask: Bool[Tensor, "batch seq"]
    sample_mask: Bool[Tensor, " batch"]
    group_ids: Int[Tensor, " batch"]
    rewards: Float[Tensor, "batch seq"]
    rollout_log_probs: Float[Tensor, "batch seq"]
    ends: Bool[Tensor, "batch seq"] | None = None
    bootstrapped: Bool[Tensor, "batch seq"] | None = None
    end_observations: Shaped[Tensor, "batch choices ..."] | None = None
    end_values: Float[Tensor, "batch seq"] | None = None
    log_probs: Float[Tensor, "batch seq"] | None = None
    reference_log_probs: Float[Tensor, "batch seq"] | None = None
    reference_states: Float[Tensor, "batch seq hidden"] | None = None
    full_kl: Float[Tensor, "batch seq"] | None = None
    values: Float[Tensor, "batch seq"] | None = None
    advantages: Float[Tensor, "batch seq"] | None = None
    returns: Float[Tensor, "batch seq"] | None = None
    correct: Bool[Tensor, " batch"] | None = None
    versions: Int[Tensor, " batch"] | None = None
    compared: Bool[Tensor, " batch"] | None = None
    kl_penalties: Float[Tensor, "batch seq"] | None = None
    loss_weights: Float[Tensor, "batch seq"] | None = None
    value_mask: Bool[Tensor, "batch seq"] | None = None
    entropy_units: Float[Tensor, "batch seq"] | None = None

    def __len__(self) -> int:
        return self.action_mask.shape[0]

    @property
    def mask(self) -> Bool[Tensor, "batch seq"]:
        """[B,T] bool: action positions of rows that count."""
        return self.action_mask & self.sample_mask[:, None]

    @property
    def baseline_mask(self) -> Bool[Tensor, "batch seq"]:
        """[B,T] bool: action positions of rows that a group's statistics are made of."""
        return self.mask if self.compared is None else self.action_mask & self.compared[:, None]

    @property
    def value_positions(self) -> Bool[Tensor, "batch seq"]:
        """[B,T] bool: positions of rows that count at which rewards, values and returns stand."""
        return self.mask if self.value_mask is None else self.value_mask & self.sample_mask[:, None]

    def select(self, rows: Int[Tensor, " selected"]) -> RolloutBatch:
        """The given rows (int64 indices), in that order, every field together."""
        return self._map(lambda tensor: tensor.index_select(0, rows))

    def empty_like(self) -> RolloutBatch:
        """A batch of the same fields, whose numbers are still to be written."""
        return self._map(torch.empty_like)

    def split(self, size: int) -> list[RolloutBatch]:
        """The rows in their order, `size` at a time; the tensors are views."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in _TENSOR_FIELDS}
        parts = {name: tensor.split(size) for name, tensor in fields.items() if tensor is not None}
        inputs = {name: tensor.split(size) for name, tensor in self.inputs.items()}
        return [
            RolloutBatch(
                inputs={name: tensors[index] for name, tensors in inputs.items()},
                **{name: tensors[index] for name, tensors in parts.items()},
            )
            for index in range(len(parts["action_mask"]))
        ]

    def to(self, device: torch.device) -> RolloutBatch:
        """Every field on `device`; the batch itself when it is there already."""
        return (
            self
            if self.action_mask.device == device
            else self._map(lambda tensor: tensor.to(device, non_blocking=True))
        )

    def flatten(self) -> RolloutBatch:
        """One row per choice of the policy, or per sequence of a recurrent one: B*C rows of T/C positions, row-major,
        without what only the estimator reads."""
        choices = self.inputs.get("hidden_states", self.inputs["observations"]).shape[1]
        kept = dataclasses.replace(self, ends=None, bootstrapped=None, end_observations=None, end_values=None)
        return kept._map(lambda tensor: _flatten(tensor, choices))

    def tensors(self) -> list[Tensor]:
        """All there are, in the order of the fields."""
        fields = (getattr(self, name) for name in _TENSOR_FIELDS)
        return [*self.inputs.values(), *(tensor for tensor in fields if tensor is not None)]

    def _map(self, function: Callable[[Tensor], Tensor]) -> RolloutBatch:
        fields: dict[str, Any] = {name: getattr(self, name) for name in _TENSOR_FIELDS}
        changed = {name: None if tensor is None else function(tensor) for name, tensor in fields.items()}
        return RolloutBatch(inputs={name: function(tensor) for name, tensor in self.inputs.items()}, **changed)


_TENSOR_FIELDS = [field.name for field in dataclasses.fields(RolloutBatch) if field.name != "inputs"]


def _flatten(tensor: Tensor, choices: int) -> Tensor:
    if tensor.dim() == 1:  # per-row fields are repeated for each of the row's choices
        return tensor.repeat_interleave(choices)
    rows, length, *rest = tensor.shape
    return tensor.reshape(rows * choices, length // choices, *rest)


@dataclass(frozen=True)
class Weights:
    """Published parameters: `state` maps names to tensors, by reference inside one process. Versions count updates.

    delta: another process gets only what it has not (`rollout.sync`). offered: it may ask for them by a process group
    (`rollout.weight_transfer`). bytes, buckets: what came from another process; 0 by reference.
    gathered: of a learner whose ranks share the parameters, instead of a state: puts them together one after the other,
    as (names, tensor), on all ranks at the same time. stores: the rank that passes them on.
    """

    version: int
    state: dict[str, torch.Tensor]
    delta: bool = False
    offered: bool = False
    bytes: int = 0
    buckets: int = 0
    gathered: Callable[[], Iterator[tuple[Sequence[str], torch.Tensor]]] | None = None
    stores: bool = True


@dataclass(frozen=True)
class WeightsReceived:
    """What a rollout rank says after it took over weights: their version, and what came from another process."""

    version: int
    bytes: int
    buckets: int
