"""The decoding step of the torch rollout engine as CUDA graphs, for the FAMILIES of `FusedDecoder`.

A step has few tokens and some thirty kernels per layer, whose launches from Python take longer than the kernels. A
graph has all of them: embedding, layers, logits and sampling. The host writes tokens, lengths, uniform numbers and the
addresses of pages into a pinned buffer, copies it, and replays a graph; the kernels of `cuda_decode_kernels` read the
pages in place. Each step is launched before the host has read the tokens of the last one, so that the GPU does not wait
for the host; a sequence that has ended is decoded once more. Prompts enter by a forward pass of their own, in half
precision with the attention of `cuda_prefill`.

There is a graph for each padded number of rows and kind of sampling. The first step of a kind runs without a graph,
because libraries allocate and kernels compile then; the second one is captured. Graphs contain the addresses of the
weights, so weights that moved need new graphs. Graphs share one memory pool, which holds the activations and
the logits of the largest step and stays allocated between generations. A graph larger than all others replaces them.

Not covered: windows shorter than a sequence, capped scores, sinks, and rotary frequencies that depend on the length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from rl_platform.accel.cuda_decode_kernels import PagedAttention, add_and_norm, current, gated
from rl_platform.accel.cuda_prefill import CudaRows, PagedPrefill, place_of
from rl_platform.accel.cuda_sampling import covers, draw
from rl_platform.engines.rollout.decoder import FusedDecoder, JoinedLinear
from rl_platform.engines.rollout.kv_cache import KVCache
from rl_platform.engines.rollout.paged_attention import PrefillAttention, PrefillChunk, RunningRow
from rl_platform.engines.rollout.prefill import GPU_PREFILL_TOKENS
from rl_platform.engines.rollout.sampling import sample
from rl_platform.models.varlen import HALF, has_kernel
from rl_platform.records import SamplingParams

WIDEST = 512  # bytes of a head: three pages of keys and values fit into 100 KB of shared memory
BY_LENGTH = ("dynamic", "longrope")  # rotary embeddings that read the largest position on the host


class DecodedRow(RunningRow, Protocol):
    """A running sequence: its tokens so far, the last of which is not cached, and its random numbers."""

    tokens: list[int]
    random: NDArray[np.float64]


def decodes(decoder: object, dtype: torch.dtype) -> bool:
    """Returns whether `CudaDecoding` covers a decoder with weights of this type."""
    if not isinstance(decoder, FusedDecoder) or not isinstance(decoder.head, JoinedLinear):
        return False
    widths = {layer.head_dim for layer in decoder.layers}
    fits = all(width * dtype.itemsize <= WIDEST and width >= 16 and width % 8 == 0 for width in widths)
    return fits and getattr(decoder.backbone.rotary_emb, "rope_type", "default") not in BY_LENGTH


def flashes(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Returns whether flash attention computes prompts whose heads have this type and width."""
    return device.type == "cuda" and dtype in HALF and has_kernel(device, width)


def padded(rows: int) -> int:
    """Returns the number of rows of the graph that `rows` sequences use.

    >>> [padded(rows) for rows in (1, 3, 8, 9, 17, 33, 65, 200)]
    [1, 4, 8, 16, 24, 40, 80, 224]
    """
    power = 1 << (rows - 1).bit_length()
    step = power if rows <= 8 else max(8, power // 8)
    return -(-rows // step) * step


class StepInputs:
    """The inputs of a decoding step of `rows` sequences, of at most `pages` pages each, in main memory.

    numbers [rows (3 + 2 pages)] int64: tokens (-1 - i: that of slot i in the previous step), lengths, uniform random
    numbers as float64, and the table of `PagedAttention`.
    """

    def __init__(self, rows: int, pages: int, *, pinned: bool) -> None:
        self.rows = rows
        self.numbers = torch.zeros(rows * (3 + 2 * pages), dtype=torch.int64, pin_memory=pinned)
        array = self.numbers.numpy()
        self._tokens, self._lengths = array[:rows], array[rows : 2 * rows]
        self._uniforms = array[2 * rows : 3 * rows].view(np.float64)
        self._table = array[3 * rows :].reshape(pages, rows, 2)
        self.begin(None)

    def begin(self, cache: KVCache | None) -> None:
        """Begins steps whose rows are in `cache`; None: there are no next steps."""
        self._cache = cache
        self._written: list[tuple[DecodedRow, int]] = []
        self._moves = 0

    def write(self, rows: Sequence[DecodedRow], size: int, before: Mapping[int, int]) -> int:
        """Writes the changes since the last step; returns how many of the numbers this step reads.

        before: id of a row -> its slot in the previous step, whose token the row does not have yet.
        """
        assert self._cache is not None
        count, slots = len(rows), [before.get(id(row)) for row in rows]
        ahead = [slot is not None for slot in slots]
        self._tokens[:count] = [
            row.tokens[-1] if slot is None else -1 - slot for row, slot in zip(rows, slots, strict=True)
        ]
        self._lengths[:count] = [row.stored + 1 + more for row, more in zip(rows, ahead, strict=True)]
        drawn = [min(len(row.tokens) + more, len(row.random) - 1) for row, more in zip(rows, ahead, strict=True)]
        self._uniforms[:count] = [row.random[place] for row, place in zip(rows, drawn, strict=True)]
        self._tokens[count:size] = self._lengths[count:size] = 0
        moves = sum(pool.moves for pool in self._cache.pools.values())
        if moves != self._moves:
            self._written, self._moves = [], moves
        del self._written[count:]
        for slot, row in enumerate(rows):
            self._write_pages(slot, row, self._cache.tails)
        pages = max(len(row.pages) for row in rows) + 1
        return self.rows * (3 + 2 * pages)

    def _write_pages(self, slot: int, row: DecodedRow, tails: Tensor) -> None:
        known, count = 0, len(row.pages)
        if slot < len(self._written):
            former, written = self._written[slot]
            if former is row and written == count:
                return
            known = written if former is row else 0
            self._written[slot] = row, count
        else:
            self._written.append((row, count))
        if known < count:
            self._table[known:count, slot] = [place_of(page) for page in row.pages[known:]]
        size = tails[0, 0, 0].nbytes
        self._table[count, slot] = tails.data_ptr() + slot * size, 2 * tails.shape[2] * size


class Flight:
    """A decoding step that was launched for `rows`. results [2,>=n] float64 on the device: tokens and log-probs."""

    def __init__(self, rows: Sequence[DecodedRow], results: Tensor) -> None:
        self._rows = list(rows)  # keeps their ids
        self.slots = {id(row): slot for slot, row in enumerate(rows)}
        self._numbers = torch.empty(results.shape, dtype=results.dtype, pin_memory=results.is_cuda)
        self._numbers.copy_(results, non_blocking=True)
        self._copied = torch.cuda.Event() if results.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    def results(self, rows: Sequence[DecodedRow]) -> list[list[float]]:
        """Waits for the step; returns tokens and log-probs of the given rows."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._numbers[:, [self.slots[id(row)] for row in rows]].tolist()


class CudaDecoding:
    """Decoding steps with the weights of `decoder`, of at most `most_rows` sequences.

    graphs False: each step launches its kernels, because other threads of this process use the GPU meanwhile. Their
    synchronisations or freed memory would end the capture of a graph with an error.
    """

    def __init__(self, decoder: FusedDecoder, most_rows: int, device: torch.device, *, graphs: bool = True) -> None:
        self.graphs = graphs
        self.decoder, self.device, self.rows = decoder, device, padded(most_rows)
        decoder.use(CudaRows())  # for prompts
        self._weights: list[int] = []
        self._pages = 0  # of a row, for which the table has space
        self._inputs: list[StepInputs] = []
        self._cuda = device.type == "cuda"  # Triton's interpreter runs on CPUs
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._flight: Flight | None = None
        self.drop()

    def drop(self) -> None:
        """Frees the graphs and their memory."""
        if self._cuda:
            torch.cuda.current_stream(self.device).synchronize()  # a graph may still run
        self._graphs: dict[object, tuple[torch.cuda.CUDAGraph, Tensor] | None] = {}
        self._largest = 0
        self._pool = torch.cuda.graph_pool_handle() if self._cuda else None

    def join(self) -> None:
        """Places the weights of layers with the same input side by side, so that one product computes all of them.

        The weights must not be references to the trainer's.
        """
        for joined in self.decoder.linears:
            for kind in ("weight", "bias"):
                parts = [getattr(layer, kind) for layer in joined.layers]
                if len(parts) > 1 and parts[0] is not None:
                    whole = torch.cat([part.data for part in parts])
                    for part, place in zip(parts, whole.split([len(part) for part in parts]), strict=True):
                        part.data = place

    def begin(self, cache: KVCache, sampling: SamplingParams, longest: int) -> None:
        """Prepares for sequences of at most `longest` tokens in `cache`, which is empty."""
        self.end()  # an error may have ended the last generation
        self.page, self.sampling = cache.page, sampling
        flash = flashes(self.device, cache.tails.dtype, cache.tails.shape[-1])
        self.prompt_attention: Callable[[Sequence[PrefillChunk]], PrefillAttention | PagedPrefill]
        self.prompt_attention = PagedPrefill if flash else PrefillAttention
        self.prompt_tokens = GPU_PREFILL_TOKENS if flash else None  # of one forward pass; None: as on a CPU
        modules = (self.decoder.backbone, *self.decoder.head.layers)  # type: ignore[union-attr]
        weights = [tensor.data_ptr() for module in modules for tensor in (*module.parameters(), *module.buffers())]
        if weights != self._weights:
            self.drop()
            self._weights = weights
        for linear in self.decoder.linears:
            linear.packed = _together(linear)
        if longest >= self._pages * cache.page:
            self.drop()
            self._allocate(1 << (longest // cache.page).bit_length())
        for inputs in self._inputs:
            inputs.begin(cache)

    def end(self) -> None:
        """Waits for a step in flight, whose tokens are not needed, and releases the memory of the cache."""
        if self._flight is not None:
            self._flight.results(())
            self._flight = None
        for inputs in self._inputs:
            inputs.begin(None)

    def _allocate(self, pages: int) -> None:
        self._pages = pages
        self._inputs = [StepInputs(self.rows, pages, pinned=self._cuda) for _ in range(2)]  # one per step in flight
        self._there = torch.zeros_like(self._inputs[0].numbers, device=self.device)
        self._last = torch.zeros(self.rows, dtype=torch.int64, device=self.device)  # tokens of the last step

    @property
    def in_flight(self) -> bool:
        """Whether a step was launched and not taken."""
        return self._flight is not None

    def launch(self, rows: Sequence[DecodedRow], after: Flight | None = None) -> None:
        """Launches a step that decodes a token of each row; row i has the i-th slot of the cache.

        after: the previous step, of all these rows, whose results are not read yet.
        """
        size, inputs = padded(len(rows)), self._inputs[0]
        self._inputs.reverse()  # the last step's asynchronous copy may still read the other ones
        used = inputs.write(rows, size, {} if after is None else after.slots)
        self._there[:used].copy_(inputs.numbers[:used], non_blocking=True)
        self._flight = Flight(rows, self._run(size))

    def take(self) -> Flight:
        """Returns the step in flight and removes it."""
        flight, self._flight = self._flight, None
        assert flight is not None
        return flight

    def on_device(self) -> AbstractContextManager[object]:
        """Makes the engine's GPU the current one."""
        return current(self.device)

    def _run(self, size: int) -> Tensor:
        if self._stream is None or not self.graphs:
            return self._compute(size)
        kind = size, self.sampling.temperature, self.sampling.top_k, self.sampling.top_p
        if kind not in self._graphs:
            self._graphs[kind] = None
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                out = self._compute(size)
            torch.cuda.current_stream().wait_stream(self._stream)
            return out
        captured = self._graphs[kind]
        if captured is None:
            if size > self._largest:  # which would need memory beside that of smaller graphs
                self.drop()
                self._largest = size
            captured = self._graphs[kind] = self._captured(size)
        captured[0].replay()
        return captured[1]

    def _captured(self, size: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph = torch.cuda.CUDAGraph()
        # other threads of this process may allocate meanwhile
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            out = self._compute(size)
        return graph, out

    def _compute(self, size: int) -> Tensor:
        """Returns tokens and log-probs [2,size]; reads and writes memory whose addresses do not change."""
        rows, there = self.rows, self._there
        given, lengths = there[:size], there[rows : rows + size]
        tokens = torch.where(given < 0, self._last[(-1 - given).clamp(min=0)], given)
        uniform = there[2 * rows : 2 * rows + size].view(torch.float64)
        table = there[3 * rows :].view(-1, rows, 2)
        states = self._hidden(tokens, lengths, table)
        logits = self.decoder.logits(states)
        drawing = draw if covers(self.sampling, logits.shape[1]) else sample
        sampled, log_probs = drawing(logits, uniform, self.sampling)
        self._last[:size] = sampled
        return torch.stack([sampled.double(), log_probs.double()])

    def _hidden(self, tokens: Tensor, lengths: Tensor, table: Tensor) -> Tensor:
        """Returns the hidden states of `FusedDecoder.hidden` for one token per row."""
        backbone = self.decoder.backbone
        states, more = backbone.embed_tokens(tokens), None
        cos, sin = (part[0] for part in backbone.rotary_emb(states, (lengths - 1).clamp(min=0)[None]))
        attention = PagedAttention(lengths, table, self.page, cos, sin)
        for layer in self.decoder.layers:
            heads = _parts(layer.qkv, add_and_norm(states, more, layer.norm))
            seen = attention(layer.number, *heads, layer.scaling, layer.head_norms)
            normed = add_and_norm(states, layer.output(seen), layer.mlp_norm)
            more = layer.down(gated(*_parts(layer.gate_up, normed)))
        return add_and_norm(states, more, backbone.norm)


def _parts(joined: JoinedLinear, states: Tensor) -> Sequence[Tensor]:
    """Returns the results [n,outputs] of the layers of `joined` for states [n,inputs]."""
    if joined.packed is None:
        return [F.linear(states, layer.weight, layer.bias) for layer in joined.layers]
    return joined.packed(states).split([layer.out_features for layer in joined.layers], dim=1)


def _together(joined: JoinedLinear) -> Callable[[Tensor], Tensor] | None:
    """Returns one product for all layers, if there are several and `CudaDecoding.join` placed them side by side."""
    weights, biases = ([getattr(layer, kind) for layer in joined.layers] for kind in ("weight", "bias"))
    weight, bias = _side_by_side(weights), _side_by_side(biases)
    if len(weights) == 1 or weight is None or (bias is None) != (biases[0] is None):
        return None
    return lambda states: F.linear(states, weight, bias)


def _side_by_side(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Returns tensors that follow each other in memory as one tensor; None if they do not."""
    first, end, rows = parts[0], 0, 0
    if first is None:
        return None
    for part in parts:
        assert part is not None
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and part.is_contiguous()
        if not same or part.storage_offset() != first.storage_offset() + end:
            return None
        end, rows = end + part.numel(), rows + len(part)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())
