"""The small typed records that components send to each other.

Shapes: B rows (sequences or transitions), T positions. A reasoning row is one sequence, prompt and response together.
An embodied rollout has one row per environment and one position per step. Once advantages are known, it is flattened to
one row per transition (`RolloutBatch.flatten`), so that mini-batches mean the same thing in both tasks. Policies that
choose chunks of actions have one transition per chunk, and at finer levels than chunks several positions each.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_platform.device_copy import on_device

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Shaped


StateDict = dict[str, Any]
"""The state of an object in a checkpoint: plain values and tensors, by name."""


Message = dict[str, str]
"""A turn of a chat: {"role": "system" | "user" | "assistant", "content": text}."""


@dataclass(frozen=True)
class Prompt:
    """One task instance. index: position in the data; answer: what the verifier compares a response to; messages: the
    prompt as a chat, empty if it is made of `text`; source: its label in `data.sources`.
    """

    index: int
    text: str
    answer: str
    token_ids: tuple[int, ...]
    metadata: dict[str, object] = field(default_factory=dict)
    messages: tuple[Message, ...] = ()
    source: str = ""


def numbered(prompts: Sequence[Prompt], samples: int) -> list[tuple[Prompt, int]]:
    """Returns each prompt `samples` times, with the number of the response, which selects its random numbers.

    The numbers of a prompt that occurs again go on, so none of them occurs twice.
    """
    seen: Counter[int] = Counter()
    responses = []
    for prompt in prompts:
        responses += [(prompt, seen[prompt.index] + number) for number in range(samples)]
        seen[prompt.index] += samples
    return responses


@dataclass(frozen=True)
class SamplingParams:
    """Settings of the sampling of tokens. `temperature` 0 means greedy; `top_k` 0 and `top_p` 1 switch the filters
    off."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True)
class Conversation:
    """The turns of a response that has several.

    turns: texts of the policy. observed: per token of the response, whether the tool or the environment wrote it (its
    log-prob is 0, and it is not trained on). observations: number of these texts. failed: the tool or the agent failed,
    so the response has no reward. retries: further attempts of an agent. reward: of an agent that returned one. counts:
    (name, number) of calls of several tools, of their errors and timeouts.
    """

    turns: tuple[str, ...]
    observed: tuple[bool, ...]
    observations: int
    failed: bool = False
    retries: int = 0
    reward: float | None = None
    counts: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Trajectory:
    """One sampled response, of one turn, or of several turns with observations between them.

    token_ids: response tokens including EOS if it was sampled; log_probs: the engine's log-probability of each of them
    (of the temperature-scaled, unfiltered distribution); finish_reason: "stop" (EOS), "length", or "abort" if it is
    incomplete and continues in the next step; weights_version: of the policy that generated it. The reward component
    sets reward, metric, step_rewards (position in token_ids where a step ends, reward) and reward_parts (name, score of
    each of several functions); `valid` is False if scoring failed. conversation: only of several turns;
    weights_version is that of the first turn, and the last token is a sampled one. segments: (version, tokens) in
    order, of a response that several versions generated; weights_version is that of the first. Empty: all tokens are of
    `weights_version`. outcome, verdict: how the tests of a program ended in a word, and in a sentence; of a response
    without a score its cause. routes: experts that the engine selected for all tokens of prompt and response but the
    last, int16 [tokens,layers,K], see `models/experts/routers.py`. rows: further rows of a trajectory whose agent has
    rewritten its context; they have its reward. continues: such a row, or one that fills a mini-batch.
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
    reward_parts: tuple[tuple[str, float], ...] = ()
    outcome: str = ""
    verdict: str = ""
    routes: Int[Tensor, "tokens layers k"] | None = field(default=None, compare=False, repr=False)
    rows: tuple[Trajectory, ...] = ()
    continues: bool = False

    @property
    def complete(self) -> bool:
        return self.finish_reason != "abort"

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"

    @property
    def tokens_by_version(self) -> tuple[tuple[int, int], ...]:
        """(version, tokens) in order, also of a response that one version generated."""
        return self.segments or ((self.weights_version, len(self.token_ids)),)

    @property
    def sampled(self) -> tuple[bool, ...]:
        """Per token of the response: whether the policy chose it."""
        if self.conversation is None:
            return (True,) * len(self.token_ids)
        return tuple(not observed for observed in self.conversation.observed)

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the policy chose, in all rows of the trajectory."""
        return sum(sum(row.sampled) for row in (self, *self.rows))


@dataclass
class RolloutBatch:
    """One rollout, or a part of one: B rows of T positions. The numbers are float32.

    `inputs` are what the model reads, by name, with first dimension B:

    * reasoning: "tokens" [B,T] int64 and "lengths" [B] int64; "routes" [B,T,L,K] int16 with `actor.router_replay`;
    * embodied: "observations" and "actions" [B,C,...] of the policy's C choices (C = T except for action chunks), with
      pi0 the denoising chains instead of actions;
      "executed" [B,C,K] bool, the actions of a chunk that count; "episode_starts" [B,T] bool and "hidden_states"
      [B,S,H] of recurrent policies, before the first step of each of S sequences; "tasks" [B,C] int64, where a policy
      reads one of several instructions.

    A field that is None does not exist (yet). Without `ends` a row is one episode; with `bootstrapped` and `end_values`
    it may have been cut.
    """

    inputs: dict[str, Tensor]
    action_mask: Bool[Tensor, "batch seq"]  # positions that the policy chose
    sample_mask: Bool[Tensor, " batch"]  # rows that count
    group_ids: Int[Tensor, " batch"]  # identity of the prompt, or of the state in which an episode begins
    rewards: Float[Tensor, "batch seq"]  # r_t
    rollout_log_probs: Float[Tensor, "batch seq"]  # log pi_rollout, as the rollout engine reports them
    ends: Bool[Tensor, "batch seq"] | None = None  # the episode, or the rollout, ends after this position
    bootstrapped: Bool[Tensor, "batch seq"] | None = None  # ends after which the value of the next state counts
    end_observations: Shaped[Tensor, "batch choices ..."] | None = None  # of the state after an end
    end_values: Float[Tensor, "batch seq"] | None = None  # V of the state after an end, otherwise 0
    log_probs: Float[Tensor, "batch seq"] | None = None  # log pi_old, of the training engine before the update
    reference_log_probs: Float[Tensor, "batch seq"] | None = None  # log pi_ref
    reference_states: Float[Tensor, "batch seq hidden"] | None = None  # hidden states, for an estimator `full`
    full_kl: Float[Tensor, "batch seq"] | None = None  # KL(pi || pi_ref) of whole distributions, before the update
    values: Float[Tensor, "batch seq"] | None = None  # V_t, of the state before the action
    advantages: Float[Tensor, "batch seq"] | None = None  # A_t
    returns: Float[Tensor, "batch seq"] | None = None  # R_t
    correct: Bool[Tensor, " batch"] | None = None  # the task's own metric counts the row as solved
    versions: Int[Tensor, " batch"] | None = None  # of the weights that generated the row, or its first token
    token_versions: Int[Tensor, "batch seq"] | None = None  # of the weights that sampled each token; None: `versions`
    compared: Bool[Tensor, " batch"] | None = None  # rows in the statistics of a group; None: those that count
    squared_probs: Float[Tensor, "batch seq"] | None = None  # sum of pi_old^2 over the vocabulary
    baselines: Float[Tensor, " batch"] | None = None  # reward of the greedy response to the row's prompt
    kl_penalties: Float[Tensor, "batch seq"] | None = None  # subtracted from the rewards
    loss_weights: Float[Tensor, "batch seq"] | None = None  # factors of the policy loss, finite; None: all 1
    value_mask: Bool[Tensor, "batch seq"] | None = None  # positions of rewards, values and returns; None: all
    covariant: Bool[Tensor, "batch seq"] | None = None  # positions that clip_cov and kl_cov treat apart
    entropy_units: Float[Tensor, "batch seq"] | None = None  # weight of an entropy (action_levels.py); None: 1
    continues: Bool[Tensor, " batch"] | None = None  # further rows of a trajectory; None: every row is one trajectory
    host: RolloutBatch | None = field(default=None, repr=False, compare=False)  # the same rows in main memory, see `to`

    def __len__(self) -> int:
        return self.action_mask.shape[0]

    def with_fields(self, fields: Mapping[str, Tensor | None]) -> RolloutBatch:
        """Returns the batch with these tensors as fields, by name; None: without the field."""
        return dataclasses.replace(self, **fields)  # type: ignore[arg-type]

    @property
    def mask(self) -> Bool[Tensor, "batch seq"]:
        """[B,T] bool: action positions of rows that count."""
        return self.action_mask & self.sample_mask[:, None]

    @property
    def trajectory_ids(self) -> list[int]:
        """The identity of the prompt of each trajectory, however many rows it has."""
        ids = self.group_ids if self.continues is None else self.group_ids[~self.continues]
        numbers: list[int] = ids.tolist()
        return numbers

    @property
    def baseline_mask(self) -> Bool[Tensor, "batch seq"]:
        """[B,T] bool: action positions of rows in the statistics of a group."""
        return self.mask if self.compared is None else self.action_mask & self.compared[:, None]

    @property
    def value_positions(self) -> Bool[Tensor, "batch seq"]:
        """[B,T] bool: positions of rewards, values and returns, in rows that count."""
        return self.mask if self.value_mask is None else self.value_mask & self.sample_mask[:, None]

    def select(self, rows: Int[Tensor, " selected"]) -> RolloutBatch:
        """Returns the given rows (int64 indices) of every field, in that order."""
        return self._map(lambda tensor: tensor.index_select(0, rows))

    def empty_like(self) -> RolloutBatch:
        """Returns a batch of the same fields with uninitialised numbers."""
        return self._map(torch.empty_like)

    def split(self, size: int) -> list[RolloutBatch]:
        """Returns the rows in their order, in parts of `size`; the tensors are views."""
        parts = (slice(first, first + size) for first in range(0, len(self), size))
        return [self._map(lambda tensor, part=part: tensor[part]) for part in parts]  # type: ignore[misc]

    def to(self, device: torch.device) -> RolloutBatch:
        """Returns the batch on `device`, after one copy from main memory; the batch itself if it is there already.

        `host` of the result is this batch, so that computing indices from it does not wait for the device.
        """
        if self.action_mask.device == device:
            return self
        copies = iter(on_device(self.tensors(), device))
        return dataclasses.replace(self._map(lambda _: next(copies)), host=self)

    def flatten(self) -> RolloutBatch:
        """Returns one row per choice of the policy, or per sequence of a recurrent one: B*C rows of T/C positions,
        row-major, without the fields that only the estimator reads."""
        choices = self.inputs.get("hidden_states", self.inputs["observations"]).shape[1]
        kept = dataclasses.replace(self, ends=None, bootstrapped=None, end_observations=None, end_values=None)
        return kept.cut(choices)

    def cut(self, parts: int) -> RolloutBatch:
        """Returns the rows, each cut into equal parts: B*parts rows of T/parts positions, row-major."""
        return self._map(lambda tensor: _cut(tensor, parts))

    def tensors(self) -> list[Tensor]:
        """Returns all tensors, in the order of the fields."""
        fields = (getattr(self, name) for name in _TENSOR_FIELDS)
        return [*self.inputs.values(), *(tensor for tensor in fields if tensor is not None)]

    def _map(self, function: Callable[[Tensor], Tensor]) -> RolloutBatch:
        inputs = {name: function(tensor) for name, tensor in self.inputs.items()}
        fields = {name: getattr(self, name) for name in _TENSOR_FIELDS}
        changed: dict[str, Any] = {
            name: None if tensor is None else function(tensor) for name, tensor in fields.items()
        }
        return RolloutBatch(inputs=inputs, **changed)


_TENSOR_FIELDS = [field.name for field in dataclasses.fields(RolloutBatch) if field.name not in ("inputs", "host")]


def _cut(tensor: Tensor, parts: int) -> Tensor:
    if tensor.dim() == 1:  # per-row fields are repeated for each part
        return tensor.repeat_interleave(parts)
    rows, length, *rest = tensor.shape
    return tensor.reshape(rows * parts, length // parts, *rest)


@dataclass(frozen=True)
class Weights:
    """Published parameters. `state` maps names to tensors, which components of the same process share.

    version: number of updates. delta: other processes receive only the buckets that changed (`rollout.sync`). offered:
    a process group may transfer the weights (`rollout.weight_transfer`), with `types` in place of the tensors' own.
    bytes, buckets: received from another process; 0 for weights of this process. gathered: for sharded parameters, in
    place of `state`: yields (names, tensor), which all ranks gather at the same time. stores: this rank publishes the
    gathered tensors. readable: number of a rank's newest publications that stay readable. overwrites: no rollout
    generates during the publication, so gathered tensors may overwrite those of an older one. on_request: parameters do
    not change while a receiver may request them, so ranks without a rollout in their process gather for each request
    and keep nothing.
    """

    version: int
    state: dict[str, torch.Tensor]
    delta: bool = False
    offered: bool = False
    bytes: int = 0
    buckets: int = 0
    gathered: Callable[[], Iterator[tuple[Sequence[str], torch.Tensor]]] | None = None
    stores: bool = True
    readable: int = 1
    overwrites: bool = False
    on_request: bool = False
    types: Mapping[str, torch.dtype] = field(default_factory=dict)


@dataclass(frozen=True)
class WeightsReceived:
    """Receipt of a rollout rank for weights: their version, bytes and buckets from another process."""

    version: int
    bytes: int
    buckets: int
