"""What every rollout engine offers: token ids in, sampled token ids and their log-probabilities out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from rl_platform.records import SamplingParams, Weights, WeightsReceived
from rl_platform.runtime.weights.group import WeightsOffer


@dataclass(frozen=True)
class Request:
    """One response to generate. `seed` alone decides its random numbers, whatever else is generated beside it.

    max_new_tokens: a lower limit than the call's; None: the call's.
    """

    index: int
    token_ids: tuple[int, ...]
    seed: int
    max_new_tokens: int | None = None

    def limit(self, sampling: SamplingParams) -> int:
        """Tokens to sample at most."""
        longest = sampling.max_new_tokens
        return longest if self.max_new_tokens is None else min(longest, self.max_new_tokens)


@dataclass(frozen=True)
class Completion:
    """A response: token ids including a sampled EOS, the log-probability of each; "abort": `abort` has cut it."""

    index: int
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: Literal["stop", "length", "abort"]


class RolloutEngine(Protocol):
    """One rank's generator."""

    @property
    def version(self) -> int:
        """Of the weights that it generates with; -1 before the first `receive`."""

    def receive(self, weights: Weights | WeightsOffer) -> WeightsReceived:
        """Generates with these weights from now on; an offer that does not reach the engine's devices is fetched.

        Responses in work begin again, so none mixes two sets of weights.
        """

    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, on_finished: Callable[[Completion], None]
    ) -> None:
        """Answer every request exactly once, calling `on_finished` as soon as each is done."""

    def abort(self) -> None:
        """From another thread or in `on_finished`: `generate` answers what is left at once, with the tokens there are,
        as "abort". Of one that was about to end these may be all."""

    def offload(self) -> None:
        """Give the accelerator's memory to others until the next `receive` or `generate`."""

    def close(self) -> None:
        """The end; again is fine."""
