"""Chunked prefill: prompts enter the cache a bounded number of tokens per forward pass, beside running sequences.

The common prefix of all prompts of a call (such as the system turn of a chat template) is computed once. So is a prompt
with several consecutive samples; their full pages are stored once. Not covered: prefixes that only some prompts share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import Tensor

from rl_platform.engines.rollout.kv_cache import KVCache, Page
from rl_platform.engines.rollout.paged_attention import PrefillChunk

PREFILL_TOKENS = 1024  # of one forward pass; a longer prompt takes several
GPU_PREFILL_TOKENS = 8192  # of a forward pass with the kernels of accel/cuda_prefill; fewer leave a GPU idle
WORTH_A_PASS = 64  # tokens; computing fewer again costs less than another forward pass
Tokens = tuple[int, ...]
T = TypeVar("T")


@dataclass(eq=False)
class PartialPrompt(Generic[T]):
    """A prompt of which `stored` tokens are cached.

    members: the sequences that will run with it; state: the last hidden state [H] once all tokens are cached.
    """

    tokens: Tokens
    readers: int  # sequences that may run with it at the same time
    members: list[T] = field(default_factory=list)
    stored: int = 0
    pages: list[Page] = field(default_factory=list)
    tail: Tensor | None = None  # [layers, 2, heads, page, head_dim]
    state: Tensor | None = None
    routes: list[Tensor] = field(default_factory=list)  # of the cached tokens, see `ContinuousBatch`


class Prefill(Generic[T]):
    """The prompts that enter a cache with the current weights.

    prompts: all that will enter, in order. most_tokens: of a forward pass.
    """

    def __init__(self, cache: KVCache, prompts: Sequence[Tokens], most_tokens: int | None = None) -> None:
        self.cache, self.most_tokens = cache, most_tokens or PREFILL_TOKENS
        self._counts = Counter(prompts)
        common = _common(prompts) if prompts else 0
        self.shared = PartialPrompt[T]((), len(prompts))
        if common * (len(prompts) - 1) >= WORTH_A_PASS:
            self.shared = PartialPrompt[T](prompts[0][:common], len(prompts))
        self.prompts: list[PartialPrompt[T]] = []

    @property
    def entering(self) -> list[T]:
        """Members of prompts that are not complete."""
        return [member for prompt in self.prompts for member in prompt.members]

    def expect(self, prompts: Sequence[Tokens]) -> None:
        """Announces prompts that will enter later. They share the prefix of the first ones if they begin with it."""
        self._counts.update(prompts)

    def add(self, tokens: Tokens, member: T) -> None:
        """Adds a sequence with this prompt. Consecutive sequences with equal prompts share one `PartialPrompt`."""
        if not self.prompts or self.prompts[-1].tokens != tokens:
            self.prompts.append(PartialPrompt(tokens, self._counts[tokens]))
        self.prompts[-1].members.append(member)

    def plan(self) -> list[tuple[PartialPrompt[T], PrefillChunk]]:
        """Allocates and returns the chunks of the next forward pass, at most `most_tokens` in all."""
        if self.shared.stored < len(self.shared.tokens):
            return [self._begun(self.shared, self.most_tokens)]
        room, chunks = self.most_tokens, []
        for prompt in self.prompts:
            if room and prompt.stored < len(prompt.tokens):
                chunks.append(self._begun(prompt, room))
                room -= chunks[-1][1].stop - chunks[-1][1].start
        return chunks

    def _begun(self, prompt: PartialPrompt[T], room: int) -> tuple[PartialPrompt[T], PrefillChunk]:
        """Returns the prompt and its next chunk of at most `room` tokens. A new prompt starts after a shared prefix."""
        if prompt.tail is None:
            prompt.tail = self.cache.tails.new_zeros(self.cache.tails[:, :, 0].shape)
            shared = self.shared.stored
            if prompt is not self.shared and shared and prompt.tokens[:shared] == self.shared.tokens != prompt.tokens:
                assert self.shared.tail is not None
                prompt.pages = self.cache.hold(self.shared.pages)
                prompt.tail.copy_(self.shared.tail)
                prompt.stored, prompt.routes = self.shared.stored, [*self.shared.routes]
        start = prompt.stored
        prompt.stored = min(start + room, len(prompt.tokens))
        readers = min(prompt.readers, self.cache.slots)
        prompt.pages += [self.cache.take(readers) for _ in range(prompt.stored // self.cache.page - len(prompt.pages))]
        return prompt, PrefillChunk(prompt.pages, prompt.tail, start, prompt.stored)

    def complete(self) -> list[PartialPrompt[T]]:
        """Returns the prompts whose tokens are all cached, with their last hidden state."""
        return [prompt for prompt in self.prompts if prompt.state is not None]

    def leave(self, following: Tokens | None) -> None:
        """Removes complete prompts, whose members run now.

        A complete prompt stays if it equals `following`, the prompt that will enter next.
        """
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
    """Returns the number of leading tokens that all share, at most one less than the shortest length."""
    first, last = min(prompts), max(prompts)  # all others lie between these two in lexicographic order
    limit = min(map(len, prompts)) - 1
    return next((place for place in range(limit) if first[place] != last[place]), limit)
