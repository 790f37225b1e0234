"""Compares the Triton kernels of generation with plain torch on the GPU that will run them.

An engine does this once, with the shapes of its model, before it uses the kernels. If they raise an error or differ,
the engine logs a warning and generates by plain torch.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_platform.accel.cuda_decode_kernels import PagedAttention, current
from rl_platform.accel.cuda_prefill import CudaRows, PagedPrefill, place_of
from rl_platform.accel.cuda_sampling import CHUNK, draw
from rl_platform.engines.rollout.decoder import PLAIN_ROWS, FusedDecoder
from rl_platform.engines.rollout.kv_cache import KVCache, Page
from rl_platform.engines.rollout.paged_attention import DecodeAttention, PrefillAttention, PrefillChunk, Readers
from rl_platform.engines.rollout.sampling import sample
from rl_platform.models.decoder_layers import RMSNormModule
from rl_platform.records import SamplingParams

logger = logging.getLogger(__name__)
PASSES = ((70, 5), (140, 9))  # tokens of two prompts after each pass: the second one fills a page begun by the first
TOLERANCE = {torch.float32: 5e-3}  # relative norm of a difference; TF32 rounds to three digits
HALF_TOLERANCE = 0.02


class Differs(Exception):
    """The results of the kernels differ from those of plain torch."""


@dataclass
class _Row:
    stored: int
    pages: list[Page]


@dataclass
class _Prompt:
    pages: list[Page]
    tail: Tensor

    def chunk(self, cache: KVCache, start: int, stop: int) -> PrefillChunk:
        self.pages += [cache.take() for _ in range(stop // cache.page - len(self.pages))]
        return PrefillChunk(self.pages, self.tail, start, stop)

    def stored(self) -> Tensor:
        return torch.cat([*(page.data for page in self.pages), self.tail], dim=3)


def agrees(decoder: FusedDecoder, device: torch.device, dtype: torch.dtype, *, flash: bool) -> bool:
    """Returns whether the kernels agree with plain torch on `device`; warns if not. flash: as `PagedPrefill`."""
    try:
        with torch.inference_mode(), current(device):
            _KernelComparison(decoder, device, dtype).run(flash)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        logger.warning("the Triton kernels of generation do not work here (%s): generation uses plain torch", reason)
        return False
    return True


@dataclass
class _Norm:
    weight: Tensor
    variance_epsilon: float


class _KernelComparison:
    def __init__(self, decoder: FusedDecoder, device: torch.device, dtype: torch.dtype) -> None:
        layer = decoder.layers[0]
        self.layer, self.device, self.dtype = layer, device, dtype
        self.heads, self.key_heads, self.width = layer.query_heads, layer.key_heads, layer.head_dim
        self.draws = torch.Generator(device).manual_seed(0)
        self.hidden, self.inner = decoder.backbone.config.hidden_size, decoder.backbone.config.intermediate_size

    def run(self, flash: bool) -> None:
        self._row_operations()
        prompts = len(PASSES[0])
        caches = [KVCache(1, prompts, self.key_heads, self.width, dtype=self.dtype, device=self.device) for _ in "ab"]
        states = [
            [_Prompt([], cache.tails.new_zeros(cache.tails[:, :, 0].shape)) for _ in range(prompts)] for cache in caches
        ]
        kinds = PrefillAttention, PagedPrefill if flash else PrefillAttention
        for starts, stops in zip(((0,) * prompts, *PASSES), PASSES, strict=False):
            tokens = self._heads(sum(stops) - sum(starts))
            outputs = []
            for cache, own, kind in zip(caches, states, kinds, strict=True):
                chunks = [
                    one.chunk(cache, *span) for one, span in zip(own, zip(starts, stops, strict=True), strict=True)
                ]
                outputs.append(kind(chunks)(0, *tokens, 0.1))
            self._compare("attention of prompts", *outputs)
        self._compare("stored prompts", *(torch.cat([one.stored() for one in own], dim=3) for own in states))
        self._decoding_step(caches, states)
        self._sampling()

    def _decoding_step(self, caches: list[KVCache], states: list[list[_Prompt]]) -> None:
        rows = [_Row(length, one.pages) for length, one in zip(PASSES[-1], states[0], strict=True)]
        for cache, own in zip(caches, states, strict=True):
            for slot, one in enumerate(own):
                cache.begin(slot, one.tail)
        count, sizes = len(rows), (self.heads, self.key_heads, self.key_heads)
        together = self._numbers(count, sum(sizes) * self.width)  # side by side, as of one product
        given = together.split([heads * self.width for heads in sizes], dim=1)
        angles = torch.rand(count, self.width // 2, generator=self.draws, device=self.device).repeat(1, 2)
        cos, sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        norms = [self._norm(self.width, norm) for norm in self.layer.head_norms]
        parts = [part.reshape(count, -1, self.width) for part in given]
        for place, norm in enumerate(norms):
            parts[place] = PLAIN_ROWS.norm(parts[place], norm)
        negated = torch.cat([-sin[:, : self.width // 2], sin[:, self.width // 2 :]], dim=1)
        for place in (0, 1):
            parts[place] = PLAIN_ROWS.rotate(parts[place], sizes[place], cos[:, None], negated[:, None])
        new = [part.transpose(0, 1)[None] for part in parts]
        plain = DecodeAttention(caches[0], rows, Readers(caches[0], rows))(0, *new, 0.1)
        lengths = torch.tensor([row.stored + 1 for row in rows], device=self.device)
        attention = PagedAttention(lengths, self._table(caches[1], states[1]), caches[1].page, cos, sin)
        self._compare("attention of a decoding step", plain.flatten(1), attention(0, *given, 0.1, norms))
        self._compare("stored tokens", *(cache.tails for cache in caches))

    def _row_operations(self) -> None:
        states, more, gates = (self._numbers(3, size) for size in (self.hidden, self.hidden, 2 * self.inner))
        norm, kinds = self._norm(self.hidden, self.layer.norm), (PLAIN_ROWS, CudaRows())
        self._compare("norm", *(rows.norm(states.clone(), norm, more) for rows in kinds))
        self._compare("gate", *(rows.gated(gates) for rows in kinds))
        heads, cos, sin = (self._numbers(3, count, self.width) for count in (self.heads + self.key_heads, 1, 1))
        self._compare("rotation", *(rows.rotate(heads, self.heads, cos, sin) for rows in kinds))

    def _sampling(self) -> None:
        logits = 4 * self._numbers(5, 2 * CHUNK + 300)
        uniform = torch.rand(5, generator=self.draws, device=self.device, dtype=torch.float64)
        for sampling in (SamplingParams(1, temperature=1.3), SamplingParams(1, temperature=0.0)):
            tokens, log_probs = zip(*(kind(logits, uniform, sampling) for kind in (sample, draw)), strict=True)
            self._compare("sampled tokens", *tokens)
            self._compare("log-probs of sampled tokens", *log_probs)  # far smaller numbers than tokens

    def _heads(self, tokens: int) -> list[Tensor]:
        return [self._numbers(1, heads, tokens, self.width) for heads in (self.heads, self.key_heads, self.key_heads)]

    def _numbers(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.draws, device=self.device, dtype=self.dtype)

    def _norm(self, width: int, like: RMSNormModule) -> RMSNormModule:
        """Returns a norm with random weights; those of the model are not loaded yet."""
        return _Norm(self._numbers(width), like.variance_epsilon)

    def _table(self, cache: KVCache, own: list[_Prompt]) -> Tensor:
        size = cache.tails[0, 0, 0].nbytes
        table = torch.zeros(max(len(one.pages) for one in own) + 1, len(own), 2, dtype=torch.int64)
        for row, one in enumerate(own):
            tail = cache.tails.data_ptr() + row * size, 2 * cache.slots * size
            for place, entry in enumerate([*(place_of(page) for page in one.pages), tail]):
                table[place, row] = torch.tensor(entry)
        return table.to(self.device)

    def _compare(self, what: str, expected: Tensor, actual: Tensor) -> None:
        difference = (actual.float() - expected.float()).norm() / expected.float().norm()
        if not difference <= TOLERANCE.get(self.dtype, HALF_TOLERANCE):  # NaN too
            raise Differs(f"{what}: relative difference {float(difference):.2g}")
