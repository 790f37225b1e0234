"""Responses that continue under new weights: their tokens so far, and which version made which token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from rl_platform.engines.rollout.base import Completion, Request
from rl_platform.records import SamplingParams
from rl_platform.rng import derive_seed


class UnfinishedResponses:
    """The responses of one call of `generate`, by the index of their request."""

    def __init__(self, requests: Sequence[Request], sampling: SamplingParams) -> None:
        self._requests = {request.index: request for request in requests}
        self._sampling = sampling
        self._parts: dict[int, Completion] = {}  # with at least one token

    def add(self, requests: Iterable[Request]) -> None:
        """Adds requests that arrived after the call began."""
        self._requests |= {request.index: request for request in requests}

    def continued(self, cut: Iterable[Completion], version: int) -> list[Request]:
        """Returns requests for the rest of `cut` responses of weights `version`. They draw new random numbers."""
        return [self._rest(self.whole(completion, version)) for completion in cut]

    def whole(self, completion: Completion, version: int) -> Completion:
        """Returns the response up to and with this completion of weights `version`."""
        count = len(completion.token_ids)
        segments = ((version, count),) if count else ()
        if (before := self._parts.get(completion.index)) is None:
            return replace(completion, segments=segments)
        return replace(
            completion,
            token_ids=before.token_ids + completion.token_ids,
            log_probs=before.log_probs + completion.log_probs,
            segments=before.segments + segments,
        )

    def _rest(self, response: Completion) -> Request:
        """Stores the tokens so far, and returns a request whose prompt ends with them."""
        request, count = self._requests[response.index], len(response.token_ids)
        if not count:
            return request
        self._parts[response.index] = response
        return Request(
            request.index,
            request.token_ids + response.token_ids,
            derive_seed(request.seed, "continued", count),
            request.limit(self._sampling) - count,
            request.sampled + count,
        )
