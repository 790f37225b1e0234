"""Texts of several tokens that end a response (`rollout.stop`), for every engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rl_platform.engines.rollout.base import Completion, Request

MARGIN = 3  # tokens: the first ones of a part may be half a character, or lose a blank when they are decoded


class StopTexts:
    """A response ends with the token that completes one of `texts`. `decode` makes text of tokens."""

    def __init__(self, texts: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self.texts, self._decode = tuple(texts), decode
        self._window = max(len(text.encode()) for text in texts) + MARGIN  # a token has at least one byte

    def completed(self, request: Request, tokens: Sequence[int]) -> bool:
        """Returns whether the last of a response's `tokens` completes a text."""
        recent = list(tokens[-self._window :])
        if (missing := self._window - len(recent)) > 0 and request.sampled:
            recent[:0] = request.token_ids[-min(request.sampled, missing) :]
        text = self._decode(recent)
        return any(stop in text for stop in self.texts)

    def cut(self, request: Request, completion: Completion) -> Completion:
        """Returns the completion up to the token that completes the first text."""
        tokens = completion.token_ids
        whole = self._decode([*request.token_ids[len(request.token_ids) - request.sampled :], *tokens])
        if any(stop in whole for stop in self.texts):
            for count in range(1, len(tokens) + 1):
                if self.completed(request, tokens[:count]):
                    log_probs, routes = completion.log_probs[:count], completion.routes
                    if routes is not None:
                        routes = routes[: len(request.token_ids) + count - 1]
                    cut = replace(completion, token_ids=tokens[:count], log_probs=log_probs, routes=routes)
                    return replace(cut, finish_reason="stop")
        return completion
