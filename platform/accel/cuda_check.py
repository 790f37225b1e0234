"""Compares the Triton kernels of generation with plain torch on the GPU that will run them.

An engine does this once, with the shapes of its model, before it uses the kernels. If they raise an error or differ,
the engine logs a warning and generates by plain torch.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rl_platform.accel.cuda_decode_kernels import PagedAttention
from rl_platform.accel.cuda_prefill import CudaRows, PagedPrefill, place_of
from rl_platform.engines.rollout.decoder import PLAIN_ROWS, FusedDecoder
from rl_platform.engines.rollout.kv_cache import KVCache, Page
from rl_platform.engines.rollout.paged_attention import DecodeAttention, PrefillAttention, PrefillChunk, Readers

logger = logging.getLogger(__name__)
PROMPTS = (70, 5)  # tokens: a page and more, and less than a page
TOLERANCE = {torch.float32: 5e-3}  # relative norm of a difference; TF32 rounds to three digits
HALF_TOLERANCE = 0.02


class Differs(Exception):
    """The results of the kernels differ from those of plain torch."""


@dataclass
class _Row:
    stored: int
    pages: list[Page] = field(default_factory=list)


def agrees(decoder: FusedDecoder, device: torch.device, dtype: torch.dtype, *, flash: bool) -> bool:
    """Returns whether the kernels agree with plain torch on `device`; warns if not. flash: as `PagedPrefill`."""
    try:
        with torch.inference_mode():
            _Comparison(decoder, device, dtype).run(flash)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        logger.warning("the Triton kernels of generation do not work here (%s): generation uses plain torch", reason)
        return False
    return True


class _Comparison:
    def __init__(self, decoder: FusedDecoder, device: torch.device, dtype: torch.dtype) -> None:
        layer = decoder.layers[0]
        self.layer, self.device, self.dtype = layer, device, dtype
        self.heads, self.key_heads, self.width = layer.query_heads, layer.key_heads, layer.head_dim
        self.draws = torch.Generator(device).manual_seed(0)
        self.hidden, self.inner = decoder.backbone.config.hidden_size, decoder.backbone.config.intermediate_size

    def run(self, flash: bool) -> None:
        self._rows()
        caches = [
            KVCache(1, len(PROMPTS), self.key_heads, self.width, dtype=self.dtype, device=self.device) for _ in "ab"
        ]
        chunks = [self._chunks(cache) for cache in caches]
        tokens = [self._numbers(1, heads, sum(PROMPTS), self.width) for heads in self._counts()]
        attentions = PrefillAttention(chunks[0]), (PagedPrefill if flash else PrefillAttention)(chunks[1])
        self._compare("attention of prompts", *(attention(0, *tokens, 0.1) for attention in attentions))
        stored = [
            torch.cat([*(page.data for page in chunks_of[0].pages), chunks_of[0].tail], dim=3) for chunks_of in chunks
        ]
        self._compare("stored prompts", *stored)

        rows = [_Row(chunk.stop, [*chunk.pages]) for chunk in chunks[0]]
        for cache, chunks_of in zip(caches, chunks, strict=True):
            for slot, chunk in enumerate(chunks_of):
                cache.begin(slot, chunk.tail)
        new = [self._numbers(1, heads, len(rows), self.width) for heads in self._counts()]
        plain = DecodeAttention(caches[0], rows, Readers(caches[0], rows))(0, *new, 0.1)
        flat = [part[0].transpose(0, 1).reshape(len(rows), -1) for part in new]
        one, zero = (torch.full((len(rows), self.width), value, device=self.device) for value in (1.0, 0.0))
        lengths = torch.tensor([row.stored + 1 for row in rows], device=self.device)
        table = self._table(caches[1], chunks[1])
        found = PagedAttention(lengths, table, caches[1].page, one.to(self.dtype), zero.to(self.dtype))(0, *flat, 0.1)
        self._compare("attention of a decoding step", plain.flatten(1), found)
        self._compare("stored tokens", *(cache.tails for cache in caches))

    def _counts(self) -> tuple[int, int, int]:
        return self.heads, self.key_heads, self.key_heads

    def _numbers(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.draws, device=self.device, dtype=self.dtype)

    def _rows(self) -> None:
        states, more, gates = (
            self._numbers(3, self.hidden),
            self._numbers(3, self.hidden),
            self._numbers(3, 2 * self.inner),
        )
        weight = torch.nn.Module()
        weight.weight = torch.nn.Parameter(self._numbers(self.hidden), requires_grad=False)
        weight.variance_epsilon = self.layer.norm.variance_epsilon  # type: ignore[assignment]
        kinds = PLAIN_ROWS, CudaRows()
        self._compare("norm", *(rows.norm(states.clone(), weight, more) for rows in kinds))
        self._compare("gate", *(rows.gated(gates) for rows in kinds))

    def _chunks(self, cache: KVCache) -> list[PrefillChunk]:
        tails = [cache.tails.new_zeros(cache.tails[:, :, 0].shape) for _ in PROMPTS]
        pages = [[cache.take() for _ in range(length // cache.page)] for length in PROMPTS]
        return [PrefillChunk(own, tail, 0, length) for own, tail, length in zip(pages, tails, PROMPTS, strict=True)]

    def _table(self, cache: KVCache, chunks: list[PrefillChunk]) -> Tensor:
        size, slots = cache.tails[0, 0, 0].nbytes, cache.slots
        table = torch.zeros(2, len(chunks), 2, dtype=torch.int64)
        for row, chunk in enumerate(chunks):
            tail = cache.tails.data_ptr() + row * size, 2 * slots * size
            for place, entry in enumerate([*(place_of(page) for page in chunk.pages), tail]):
                table[place, row] = torch.tensor(entry)
        return table.to(self.device)

    def _compare(self, what: str, expected: Tensor, found: Tensor) -> None:
        difference = (found.float() - expected.float()).norm() / expected.float().norm()
        if not difference <= TOLERANCE.get(self.dtype, HALF_TOLERANCE):  # NaN too
            raise Differs(f"{what}: relative difference {float(difference):.2g}")
