"""Prompts on their way into the cache, a bounded number of tokens per forward pass, beside those that run already.

What all prompts of a call begin with (a chat template's system turn) is computed once, samples of one prompt that
follow each other share all of it; full pages are stored once too. Does not cover beginnings that only some prompts
share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import Tensor

from rl_platform.engines.rollout.attention import PrefillChunk
from rl_platform.engines.rollout.kv_cache import KVCache, Page

PREFILL_TOKENS = 1024  # of one forward pass; a longer prompt takes several
WORTH_A_PASS = 64  # tokens: fewer cost no more than one forward pass more
Tokens = tuple[int, ...]
T = TypeVar("T")


@dataclass(eq=False)
class Prompt(Generic[T]):
    """`stored` tokens are in the cache. members: who will run with it; state: its last hidden state, when all are."""

    tokens: Tokens
    readers: int  # sequences that may run with it at the same time
    members: list[T] = field(default_factory=list)
    stored: int = 0
    pages: list[Page] = field(default_factory=list)
    tail: Tensor | None = None  # [layers, 2, heads, page, head_dim]
    state: Tensor | None = None


class Prefill(Generic[T]):
    """`prompts`: of all that will enter this cache with the present weights, in order."""

    def __init__(self, cache: KVCache, prompts: Sequence[Tokens]) -> None:
        self.cache = cache
        self._counts = Counter(prompts)
        common = _common(prompts) if prompts else 0
        self.shared = Prompt[T]((), len(prompts))
        if common * (len(prompts) - 1) >= WORTH_A_PASS:
            self.shared = Prompt[T](prompts[0][:common], len(prompts))
        self.prompts: list[Prompt[T]] = []

    @property
    def entering(self) -> list[T]:
        """Those whose prompts are not complete."""
        return [member for prompt in self.prompts for member in prompt.members]

    def add(self, tokens: Tokens, member: T) -> None:
        if not self.prompts or self.prompts[-1].tokens != tokens:
            self.prompts.append(Prompt(tokens, self._counts[tokens]))
        self.prompts[-1].members.append(member)

    def plan(self) -> list[tuple[Prompt[T], PrefillChunk]]:
        """What to compute next, with room for it in the cache: at most PREFILL_TOKENS tokens."""
        if self.shared.stored < len(self.shared.tokens):
            return [self._begun(self.shared, PREFILL_TOKENS)]
        room, chunks = PREFILL_TOKENS, []
        for prompt in self.prompts:
            if room and prompt.stored < len(prompt.tokens):
                chunks.append(self._begun(prompt, room))
                room -= chunks[-1][1].stop - chunks[-1][1].start
        return chunks

    def _begun(self, prompt: Prompt[T], room: int) -> tuple[Prompt[T], PrefillChunk]:
        if prompt.tail is None:
            prompt.pages = self.cache.hold(self.shared.pages)
            prompt.tail = self.cache.tails.new_zeros(self.cache.tails[:, :, 0].shape)
            if prompt is not self.shared and self.shared.tail is not None:
                prompt.tail.copy_(self.shared.tail)
                prompt.stored = self.shared.stored
        start = prompt.stored
        prompt.stored = min(start + room, len(prompt.tokens))
        readers = min(prompt.readers, self.cache.slots)
        prompt.pages += [self.cache.take(readers) for _ in range(prompt.stored // self.cache.page - len(prompt.pages))]
        return prompt, PrefillChunk(prompt.pages, prompt.tail, start, prompt.stored)

    def complete(self) -> list[Prompt[T]]:
        return [prompt for prompt in self.prompts if prompt.state is not None]

    def leave(self, following: Tokens | None) -> None:
        """The members of complete prompts run. following: the prompt that will enter next; it is kept if it is here."""
        left = []
        for prompt in self.prompts:
            if prompt.state is None:
                left.append(prompt)
            elif prompt.tokens == following and prompt is self.prompts[-1]:
                prompt.members = []
                left.append(prompt)
            else:
                self.cache.release(prompt.pages)
        self.prompts = left


def _common(prompts: Sequence[Tokens]) -> int:
    """Number of leading tokens that all share, at most one less than the shortest has."""
    first, last = min(prompts), max(prompts)  # in their order all others lie between these two
    limit = min(map(len, prompts)) - 1
    return next((place for place in range(limit) if first[place] != last[place]), limit)
