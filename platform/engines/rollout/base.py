"""The interface of rollout engines: token ids in, sampled token ids and their log-probabilities out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from rl_platform.records import SamplingParams, Weights, WeightsReceived
from rl_platform.user_code import Extension

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from rl_platform.runtime.weights.group import WeightsOffer


FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Request:
    """One response to generate. Its random numbers depend on `seed` only, not on other requests.

    max_new_tokens: a lower limit than that of the call; None: the call's. sampled: number of the last `token_ids` that
    belong to the response, if it continues after a cut.
    """

    index: int
    token_ids: tuple[int, ...]
    seed: int
    max_new_tokens: int | None = None
    sampled: int = 0

    def limit(self, sampling: SamplingParams) -> int:
        """Returns the largest number of tokens to sample."""
        longest = sampling.max_new_tokens
        return longest if self.max_new_tokens is None else min(longest, self.max_new_tokens)


@dataclass(frozen=True)
class Completion:
    """A response: token ids including a sampled EOS, and the log-prob of each. "abort": `abort` ended it early.

    routes: experts of all tokens of prompt and response but the last, int16 [tokens,layers,K], of engines that were
    configured to return them. segments: (version of the weights, tokens) in order, of engines that record them; empty:
    all tokens are of the engine's version.
    """

    index: int
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: FinishReason
    routes: Tensor | None = None
    segments: tuple[tuple[int, int], ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class EngineSetup:
    """The arguments of a user's engine.

    eos: token ids that end a response; a sampled one is part of the response. max_running:
    `rollout.max_running_requests`. longest: tokens of prompt and response together.
    """

    label: str
    model_config: PretrainedConfig
    eos: tuple[int, ...]
    device: torch.device
    dtype: torch.dtype
    max_running: int
    longest: int


class Arrivals(Protocol):
    """Requests that arrive while others are generated, for engines with `accepts_arrivals`.

    longest: most tokens of prompt and response together.
    """

    longest: int

    def take(self, idle: bool) -> list[Request]:
        """Returns the new requests. `idle`: nothing is generated, so it waits for one; none: no more will come."""


class RolloutEngine(Protocol):
    """One rank's generator."""

    @property
    def version(self) -> int:
        """The version of the current weights; -1 before the first `receive`."""

    def receive(self, weights: Weights | WeightsOffer) -> WeightsReceived:
        """Loads weights; an offer that does not reach the engine's devices is fetched.

        Unfinished responses start again, so that no response mixes two versions; the torch engine may also continue
        them (`rollout.on_update`).
        """

    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, on_finished: Callable[[Completion], None]
    ) -> None:
        """Generates each response exactly once and calls `on_finished` as soon as it is done."""

    def abort(self) -> None:
        """Ends `generate` early. Unfinished responses are returned with their tokens so far and reason "abort".

        Called from another thread or in `on_finished`. An aborted response may be complete.
        """

    def offload(self) -> None:
        """Frees the accelerator's memory until the next `receive` or `generate`."""

    def close(self) -> None:
        """Frees all resources. May be called twice."""


class UserEngine(RolloutEngine, Protocol):
    """A `RolloutEngine` of the user. It receives `Weights`, never offers; their names are those of `LanguageModel`.

    The reported log-probs are those of the temperature-scaled distribution, before top-k and top-p.
    """

    def __init__(self, setup: EngineSetup, **options: object) -> None:
        """options: `rollout.engine_args`. May raise."""


ENGINE = Extension(
    "rollout engine",
    "rollout.backend",
    UserEngine,
    "class(setup, **engine_args) with receive, generate, abort, offload, close and version",
)
