"""Sampling without filters on a GPU in two Triton kernels, which read the logits once.

The plain `sample` writes the probabilities of the whole vocabulary and reads them several times. Here the first kernel
reduces chunks of logits to their maximum and sum of exponentials. The second one draws a chunk by its share of the
total, and then a token of that chunk. Sums over chunks and within the drawn chunk are float64. All sums have a fixed
order, so equal logits give equal tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_platform.records import SamplingParams

CHUNK = 4096  # logits of a program


@triton.jit
def _reduce(logits, tops, sums, temperature, row_stride, V: tl.constexpr, CHUNK: tl.constexpr):
    """Writes the largest scaled logit of a chunk and the sum of exp(logit - largest)."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    places = chunk * CHUNK + tl.arange(0, CHUNK)
    numbers = tl.load(logits + row * row_stride + places, places < V, float("-inf")).to(tl.float32) / temperature
    top = tl.max(numbers, 0)
    sum = tl.sum(tl.exp(numbers - tl.where(top == float("-inf"), 0.0, top)), 0)
    tl.store(tops + row * tl.num_programs(1) + chunk, top)
    tl.store(sums + row * tl.num_programs(1) + chunk, sum)


@triton.jit
def _first_above(masses, threshold, places, SIZE: tl.constexpr):
    """Returns the first place whose cumulative mass exceeds the threshold; without one, the last with a mass.

    A place without a mass is never returned, unless there are only NaNs.
    """
    cumulative = tl.cumsum(masses, 0)
    above = (cumulative > threshold) & (masses > 0.0)
    first = tl.min(tl.where(above, places, SIZE), 0)
    last = tl.max(tl.where(masses > 0.0, places, 0), 0)
    return tl.where(first < SIZE, first, last)


@triton.jit
def _draw(
    logits, tops, sums, uniforms, tokens, log_probs, temperature, row_stride, GREEDY: tl.constexpr, V: tl.constexpr,
    CHUNKS: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Writes a token and its log-prob under the distribution without filters."""
    row, slots, inside = tl.program_id(0).to(tl.int64), tl.arange(0, SLOTS), tl.arange(0, CHUNK)
    own = tl.load(tops + row * CHUNKS + slots, slots < CHUNKS, float("-inf"))
    top = tl.max(own, 0)
    shares = tl.load(sums + row * CHUNKS + slots, slots < CHUNKS, 0.0) * tl.exp(own - top)
    masses = shares.to(tl.float64)
    total = tl.sum(masses, 0)
    threshold = tl.load(uniforms + row) * total
    if GREEDY:
        chunk = tl.min(tl.where(own == top, slots, CHUNKS - 1), 0)
    else:
        chunk = _first_above(masses, threshold, slots, SLOTS)
    places = chunk * CHUNK + inside
    line = logits + row * row_stride
    numbers = tl.load(line + places, places < V, float("-inf")).to(tl.float32) / temperature
    if GREEDY:
        place = tl.min(tl.where(numbers == top, inside, CHUNK - 1), 0)
    else:
        rest = threshold - tl.sum(tl.where(slots < chunk, masses, 0.0), 0)
        own_masses = tl.exp(numbers - top).to(tl.float64)
        # the chunk's mass is a float32 sum, which may exceed the sum of own_masses and would draw the last token
        rest *= tl.sum(own_masses, 0) / tl.sum(tl.where(slots == chunk, masses, 0.0), 0)
        place = _first_above(own_masses, rest, inside, CHUNK)
    token = tl.minimum(chunk * CHUNK + place, V - 1)
    drawn = tl.load(line + token).to(tl.float32) / temperature
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(log_probs + row, drawn - top - tl.log(total.to(tl.float32)))


def covers(sampling: SamplingParams, vocabulary: int) -> bool:
    """Returns whether the parameters filter nothing."""
    return sampling.top_p >= 1 and not 0 < sampling.top_k < vocabulary


def draw(logits: Tensor, uniform: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """Returns tokens [n] and log-probs [n] as `sampling.sample` does, for parameters that `covers` accepts.

    logits: [n,V]; each row is contiguous.
    """
    (rows, vocabulary), greedy = logits.shape, sampling.temperature == 0
    chunks = triton.cdiv(vocabulary, CHUNK)
    tops, sums = logits.new_empty(2, rows, chunks, dtype=torch.float32)
    tokens = logits.new_empty(rows, dtype=torch.int64)
    log_probs = logits.new_empty(rows, dtype=torch.float32)
    scale, stride = 1.0 if greedy else sampling.temperature, logits.stride(0)
    _reduce[rows, chunks](logits, tops, sums, scale, stride, V=vocabulary, CHUNK=CHUNK, num_warps=8)
    shape = {"V": vocabulary, "CHUNKS": chunks, "SLOTS": triton.next_power_of_2(chunks), "CHUNK": CHUNK}
    _draw[(rows,)](
        logits, tops, sums, uniform, tokens, log_probs, scale, stride, GREEDY=greedy, **shape, num_warps=8
    )  # fmt: skip
    return tokens, log_probs
