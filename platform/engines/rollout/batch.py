"""Continuous batching: the requests of one call of `generate` with one set of weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_platform.engines.rollout.base import Completion, Request
from rl_platform.engines.rollout.decoder import FusedDecoder, TransformersDecoder
from rl_platform.engines.rollout.kv_cache import KVCache, Page
from rl_platform.engines.rollout.paged_attention import (
    PaddedHeads,
    PrefillAttention,
    PrefillChunk,
    StepAttention,
    decode_attention,
)
from rl_platform.engines.rollout.prefill import PartialPrompt, Prefill
from rl_platform.engines.rollout.sampling import sampler, uniforms
from rl_platform.models.packed import Attention
from rl_platform.records import SamplingParams

if TYPE_CHECKING:
    from rl_platform.accel.cuda_decode import CudaDecoding
    from rl_platform.engines.rollout.stopping.stop_texts import StopTexts
    from rl_platform.models.experts.routers import RecordedRouters


@dataclass
class _Sequence:
    request: Request
    random: NDArray[np.float64]
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    pages: list[Page] = field(default_factory=list)
    routes: list[Tensor] = field(default_factory=list)  # [n,layers,K] of the cached tokens, in their order

    @property
    def stored(self) -> int:
        """Number of cached tokens: all but the last sampled one."""
        return len(self.request.token_ids) + len(self.tokens) - 1

    def completion(self, reason: Literal["stop", "length", "abort"]) -> Completion:
        """Returns the response with its tokens so far."""
        routes = torch.cat(self.routes) if self.routes else None
        return Completion(self.request.index, tuple(self.tokens), tuple(self.log_probs), reason, routes)


class ContinuousBatch:
    """Runs requests in an empty `cache`, whose number of slots is the number of sequences that run together.

    plain: as of `decode_attention`. padded: the model's heads are narrower than those of the cache. recorder: of the
    routes of the decoder's model; None: completions have none. decoding: decodes the running sequences when no prompt
    enters, so that as many as possible share the reading of the weights (accel/cuda_decode.py); None: one forward pass
    computes both.
    """

    def __init__(
        self,
        decoder: FusedDecoder | TransformersDecoder,
        cache: KVCache,
        requests: Sequence[Request],
        sampling: SamplingParams,
        *,
        plain: bool = True,
        padded: bool = False,
        recorder: RecordedRouters | None = None,
        decoding: CudaDecoding | None = None,
    ) -> None:
        self.recorder, self.decoding = recorder, decoding
        self.decoder, self.cache, self.sampling, self.padded = decoder, cache, sampling, padded
        self.waiting = deque(requests)
        self.running: list[_Sequence] = []  # in the order of their slots
        self._readers_class, self._decode_attention_class = decode_attention(cache, plain=plain)
        self._sample = sampler(cache.tails.device, cache.tails.dtype, sampling)
        self._readers: Any = None  # a `_readers_class`; None if pages or running sequences have changed
        self._prompt_attention = PrefillAttention if decoding is None else decoding.prompt_attention
        most_tokens = None if decoding is None else decoding.prompt_tokens
        self.prefill = Prefill[_Sequence](cache, [request.token_ids for request in requests], most_tokens)

    @property
    def over(self) -> bool:
        """Whether every request is finished."""
        return not (self.waiting or self.running or self.prefill.entering)

    @property
    def left(self) -> list[Request]:
        """Unfinished requests, those that started first at the front."""
        return [entry.request for entry in (*self.running, *self.prefill.entering)] + list(self.waiting)

    def add(self, requests: Sequence[Request]) -> None:
        """Adds requests, which start after all others."""
        self.waiting += requests
        self.prefill.expect([request.token_ids for request in requests])

    def step(self) -> None:
        """Samples a token for each sequence that runs, or whose prompt is complete, after this pass.

        With `decoding`, running sequences wait while prompts enter.
        """
        self._admit()
        planned, decoded = self.prefill.plan(), 0
        if self.decoding is None:
            self._begin_pages()
        else:
            decoded = len(self.running)  # these have their token without the forward pass below
            self._decode(self.decoding, entering=bool(self.prefill.entering))
        states = self._forward(planned, self.running[decoded:])
        for prompt in self.prefill.complete():
            assert prompt.state is not None
            assert prompt.tail is not None
            for entry in prompt.members:
                self.cache.begin(len(self.running), prompt.tail)
                entry.pages, entry.routes = self.cache.hold(prompt.pages), [*prompt.routes]
                self.running.append(entry)
                self._readers = None
                states.append(prompt.state[None])
        self.prefill.leave(self.waiting[0].token_ids if self.waiting else None)
        if states:
            entries = self.running[decoded:]
            uniform = torch.tensor([entry.random[len(entry.tokens)] for entry in entries], dtype=torch.float64)
            tokens, log_probs = self._sample(self.decoder.logits(torch.cat(states)), uniform, self.sampling)
            _append(entries, tokens.tolist(), log_probs.tolist())

    def finished(self, eos: Collection[int], stop_texts: StopTexts | None = None) -> Iterator[Completion]:
        """Yields and removes complete sequences; the last running sequence moves into the free slot."""
        for slot in range(len(self.running) - 1, -1, -1):
            entry = self.running[slot]
            stopped = entry.tokens[-1] in eos
            if stop_texts is not None and not stopped:
                stopped = stop_texts.completed(entry.request, entry.tokens)
            if not stopped and len(entry.tokens) < entry.request.limit(self.sampling):
                continue
            last = self.running.pop()
            if slot < len(self.running):
                self.running[slot] = last
                self.cache.move(len(self.running), slot)
            self.cache.release(entry.pages)
            self._readers = None
            yield entry.completion("stop" if stopped else "length")

    def cut(self) -> Iterator[Completion]:
        """Yields the unfinished responses with their tokens so far."""
        for entry in (*self.running, *self.prefill.entering):
            yield entry.completion("abort")
        for request in self.waiting:
            yield Completion(request.index, (), (), "abort")

    def _decode(self, decoding: CudaDecoding, *, entering: bool) -> None:
        """Decodes a token of each running sequence, and launches the next step before it waits for this one.

        entering: other sequences will run after this pass, so only the results of a launched step are read.
        """
        if self.running and not (entering or decoding.in_flight):
            self._begin_pages()
            decoding.launch(self.running)
        if not decoding.in_flight:
            return
        flight = decoding.take()
        if not entering and any(len(entry.tokens) + 1 < entry.request.limit(self.sampling) for entry in self.running):
            self._begin_pages(1)
            decoding.launch(self.running, after=flight)
        _append(self.running, *flight.results(self.running))

    def _begin_pages(self, more: int = 0) -> None:
        """Begins a page for each running sequence whose last page is full after `more` further tokens."""
        for slot, entry in enumerate(self.running):
            if entry.stored + more == self.cache.page * (1 + len(entry.pages)):
                entry.pages.append(self.cache.full_tail(slot))
                self._readers = None

    def _admit(self) -> None:
        """Moves waiting requests into free slots: their prompts enter the cache."""
        for _ in range(min(len(self.waiting), self.cache.slots - len(self.running) - len(self.prefill.entering))):
            request = self.waiting.popleft()
            entry = _Sequence(request, uniforms(request.seed, self.sampling.max_new_tokens).numpy())
            self.prefill.add(request.token_ids, entry)

    def _forward(
        self, planned: Sequence[tuple[PartialPrompt[_Sequence], PrefillChunk]], running: Sequence[_Sequence]
    ) -> list[Tensor]:
        """Returns the last hidden states [n,H] of `running`, if any; stores those of prompts that end in this pass."""
        tokens: list[int] = []
        positions: list[int] = []
        for prompt, span in planned:
            tokens += prompt.tokens[span.start : span.stop]
            positions += range(span.start, span.stop)
        count = len(tokens)
        tokens += [entry.tokens[-1] for entry in running]
        positions += [entry.stored for entry in running]
        if not tokens:
            return []
        if running and self._readers is None:
            self._readers = self._readers_class(self.cache, running)
        device = self.cache.tails.device
        attention: Attention = StepAttention(
            self._prompt_attention([chunk for _, chunk in planned]) if planned else None,
            self._decode_attention_class(self.cache, running, self._readers) if running else None,
        )
        if self.padded:
            attention = PaddedHeads(attention, self.cache.tails.shape[-1])
        states = self.decoder.hidden(
            torch.tensor(tokens, device=device), torch.tensor(positions, device=device), attention
        )
        routes = None if self.recorder is None else self.recorder.take()
        end = 0
        for prompt, chunk in planned:
            if routes is not None:
                prompt.routes.append(routes[end : end + chunk.stop - chunk.start])
            end += chunk.stop - chunk.start
            if chunk.stop == len(prompt.tokens):
                prompt.state = states[end - 1].clone()
        if routes is not None:
            for number, entry in enumerate(running, count):
                entry.routes.append(routes[number : number + 1])
        return [states[count:]] if running else []


def _append(entries: Sequence[_Sequence], tokens: Sequence[float], log_probs: Sequence[float]) -> None:
    for entry, token, log_prob in zip(entries, tokens, log_probs, strict=True):
        entry.tokens.append(int(token))
        entry.log_probs.append(log_prob)
