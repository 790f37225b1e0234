"""A user's rollout engine (`rollout.backend: module:Class`), with every result checked against the interface.

A result that does not fit would otherwise train on shifted log-probs, or leave the run waiting for a response.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, get_args

from rl_platform.config.schema import Config
from rl_platform.engines.rollout.base import ENGINE, Completion, EngineSetup, FinishReason, Request, RolloutEngine
from rl_platform.errors import ConfigError
from rl_platform.records import SamplingParams, Weights, WeightsReceived

if TYPE_CHECKING:
    from rl_platform.runtime.weights.group import WeightsOffer

REASONS = get_args(FinishReason)
ROUNDING = 1e-3  # a log-prob may be above 0 by it
EACH_ONCE = "generate calls on_finished once for each request, also for those that abort ends"


def user_engine(config: Config, setup: EngineSetup) -> RolloutEngine:
    """Builds the engine that the config names. Raises ConfigError if it cannot be imported, WorkerError if it fails."""
    name = config.rollout.backend
    kind = ENGINE.load(name)
    with ENGINE.running(name):
        engine: RolloutEngine = kind(setup, **config.rollout.engine_args)
    return CheckedEngine(engine, name, setup.model_config.get_text_config().vocab_size)


class CheckedEngine:
    """Calls `engine`. Raises ConfigError for a result that does not fit, and WorkerError for an exception in it.

    Token ids and log-probs may also be lists, arrays or tensors. Requests that arrive during a call wait for the next
    one: a user's engine has no `Arrivals`.
    """

    def __init__(self, engine: RolloutEngine, name: str, vocab_size: int) -> None:
        self.engine, self.name, self.vocab_size = engine, name, vocab_size

    @property
    def version(self) -> int:
        return self.engine.version

    def receive(self, weights: Weights | WeightsOffer) -> WeightsReceived:
        with ENGINE.running(self.name):
            received = self.engine.receive(weights)
        if not isinstance(received, WeightsReceived):
            hint = "return WeightsReceived(weights.version, weights.bytes, weights.buckets)"
            raise self._misfit(f"receive returned {type(received).__name__}", hint)
        for what, version in (("receive returned", received.version), ("its attribute version is", self.version)):
            if version != weights.version:
                raise self._misfit(f"{what} {version!r} after weights of version {weights.version}")
        return received

    def generate(
        self, requests: Sequence[Request], sampling: SamplingParams, on_finished: Callable[[Completion], None]
    ) -> None:
        waiting = {request.index: request for request in requests}
        misfits: list[ConfigError] = []  # the engine may call on_finished in a thread of its own

        def deliver(completion: Completion) -> None:
            try:
                checked = self._checked(completion, waiting, sampling)
            except ConfigError as error:
                misfits.append(error)
                raise
            on_finished(checked)

        with ENGINE.running(self.name):
            self.engine.generate(requests, sampling, deliver)
        if misfits:
            raise misfits[0]
        if waiting:
            missing = f"generate returned without {len(waiting)} of {len(requests)} responses, first {min(waiting)}"
            raise self._misfit(missing, EACH_ONCE)

    def abort(self) -> None:
        with ENGINE.running(self.name):
            self.engine.abort()

    def offload(self) -> None:
        with ENGINE.running(self.name):
            self.engine.offload()

    def close(self) -> None:
        with ENGINE.running(self.name):
            self.engine.close()

    def _checked(self, completion: object, waiting: dict[int, Request], sampling: SamplingParams) -> Completion:
        """Returns the completion with tuples, and takes its request from `waiting`."""
        if not isinstance(completion, Completion):
            raise self._misfit(f"on_finished got {type(completion).__name__}, not a Completion")
        if (request := waiting.pop(completion.index, None)) is None:
            message = f"on_finished got a response to request {completion.index!r}, which is none or had one already"
            raise self._misfit(message, EACH_ONCE)
        response, limit = f"the response to request {request.index}", request.limit(sampling)
        try:
            tokens = tuple(map(operator.index, completion.token_ids))
            log_probs = tuple(map(float, completion.log_probs))
        except (TypeError, ValueError) as error:
            raise self._misfit(f"{response} has other token ids or log-probs than numbers: {error}") from error
        if len(log_probs) != len(tokens):
            raise self._misfit(f"{response} has {len(tokens)} token ids and {len(log_probs)} log-probs")
        if completion.finish_reason not in REASONS:
            allowed = ", ".join(REASONS)
            raise self._misfit(f"{response} ended by {completion.finish_reason!r}, not by one of {allowed}")
        if len(tokens) > limit:
            raise self._misfit(f"{response} has {len(tokens)} tokens", f"request.limit(sampling) is {limit}")
        if not tokens and completion.finish_reason != "abort":
            raise self._misfit(f"{response} has no tokens", "the token that ends a response belongs to it")
        if wrong := [token for token in tokens if not 0 <= token < self.vocab_size]:
            raise self._misfit(f"{response} has the token {wrong[0]}, the model has 0 to {self.vocab_size - 1}")
        if positive := [each for each in log_probs if each > ROUNDING]:
            raise self._misfit(f"{response} has the log-prob {positive[0]:g}, the logarithm of more than 1")
        return replace(completion, token_ids=tokens, log_probs=log_probs)

    def _misfit(self, message: str, hint: str = "") -> ConfigError:
        return ENGINE.misfit(self.name, message, hint)
