"""Prompts on their way into the cache: what they share is computed once, and never more than a bounded piece at a time.

What all prompts of a call begin with (a chat template's system turn) is kept and put in front of each. Samples of one
prompt that follow each other share all of it. Does not cover beginnings that only some prompts share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rl_platform.engines.rollout.decoder import FusedDecoder, TransformersDecoder
from rl_platform.engines.rollout.kv_cache import KVCache, PrefillAttention, Span

PREFILL_TOKENS = 4096  # of one forward pass; a longer prompt takes several
WORTH_A_PASS = 64  # tokens: fewer cost no more than one forward pass more
Prompt = tuple[int, ...]


class Prefill:
    """`prompts`: all that will enter this cache with the present weights."""

    def __init__(self, decoder: FusedDecoder | TransformersDecoder, cache: KVCache, prompts: Sequence[Prompt]) -> None:
        self.decoder, self.cache = decoder, cache
        common = _common(prompts) if prompts else 0
        self.shared = common if common * (len(prompts) - 1) >= WORTH_A_PASS else 0
        self._beginning: Tensor | None = None
        self._kept: tuple[Prompt, Tensor, Tensor] | None = None  # with its keys and values and last hidden state

    def enter(self, first: int, prompts: Sequence[Prompt], following: Prompt | None) -> Tensor:
        """Fill the slots from `first` on. Returns the last hidden state of each, [n,H].

        following: the prompt that will enter next; kept if it is one of these.
        """
        new: dict[int, Prompt] = {}
        copies: list[tuple[int, int]] = []
        sources: dict[Prompt, int] = {}
        for slot, prompt in enumerate(prompts, start=first):
            if self._kept is not None and self._kept[0] == prompt:
                self.cache.begin(slot, self._kept[1])
            elif prompt in sources:
                copies.append((sources[prompt], slot))
            else:
                sources[prompt], new[slot] = slot, prompt
        states = {new[slot]: state for slot, state in self._compute(new).items()}
        for source, slot in copies:
            self.cache.copy(source, slot, len(new[source]))
        if self._kept is not None:
            states[self._kept[0]] = self._kept[2]
        found = torch.stack([states[prompt] for prompt in prompts])
        if following in sources:
            kept = self.cache.beginning(sources[following], len(following))
            self._kept = (following, kept, states[following])
        elif self._kept is not None and self._kept[0] != following:
            self._kept = None
        return found

    def _compute(self, prompts: dict[int, Prompt]) -> dict[int, Tensor]:
        """By slot: last hidden state [H]."""
        if not prompts:
            return {}
        if self.shared and self._beginning is None:
            slot, prompt = next(iter(prompts.items()))
            self._forward({slot: prompt}, [Span(slot, 0, self.shared)])
            self._beginning = self.cache.beginning(slot, self.shared)
        if self._beginning is not None:
            for slot in prompts:
                self.cache.begin(slot, self._beginning)
        return self._forward(prompts, [Span(slot, self.shared, len(prompt)) for slot, prompt in prompts.items()])

    def _forward(self, prompts: dict[int, Prompt], spans: Sequence[Span]) -> dict[int, Tensor]:
        """In pieces; the last hidden state [H] of those that get to their end."""
        device = self.cache.data.device
        found = {}
        for piece in _pieces(spans, PREFILL_TOKENS):
            tokens = [token for span in piece for token in prompts[span.slot][span.start : span.stop]]
            positions = [position for span in piece for position in range(span.start, span.stop)]
            states = self.decoder.hidden(
                torch.tensor(tokens, device=device),
                torch.tensor(positions, device=device),
                PrefillAttention(self.cache, piece),
            )
            end = 0
            for span in piece:
                end += span.stop - span.start
                if span.stop == len(prompts[span.slot]):
                    found[span.slot] = states[end - 1]
        return found


def _common(prompts: Sequence[Prompt]) -> int:
    """Number of leading tokens that all share, at most one less than the shortest has."""
    first, last = min(prompts), max(prompts)  # in their order all others lie between these two
    limit = min(map(len, prompts)) - 1
    return next((place for place in range(limit) if first[place] != last[place]), limit)


def _pieces(spans: Sequence[Span], limit: int) -> Iterator[list[Span]]:
    """The spans in order, cut so that a piece has `limit` tokens, the last one fewer."""
    piece: list[Span] = []
    room = limit
    for span in spans:
        start = span.start
        while start < span.stop:
            stop = min(span.stop, start + room)
            piece.append(Span(span.slot, start, stop))
            room, start = room - (stop - start), stop
            if not room:
                yield piece
                piece, room = [], limit
    if piece:
        yield piece
