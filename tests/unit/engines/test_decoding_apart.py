"""Generation whose sequences decode apart from prompts, a step ahead of the host: the loop around accel/cuda_decode.

`PlainDecoding` computes its steps by the plain forward pass. tests/gpu/test_decode.py has the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from decoding_scenarios import Arriving, answers, causal_lm, check_equal, engine_for, prompts
from torch import Tensor

from rl_platform.engines.rollout import kv_cache
from rl_platform.engines.rollout.base import Request
from rl_platform.engines.rollout.kv_cache import KVCache, Page
from rl_platform.engines.rollout.paged_attention import DecodeAttention, PrefillAttention, PrefillChunk, Readers
from rl_platform.engines.rollout.sampling import sample
from rl_platform.engines.rollout.torch import TorchRolloutEngine
from rl_platform.records import SamplingParams

CPU = torch.device("cpu")


@dataclass
class Row:
    pages: list[Page]
    stored: int


class Flight:
    def __init__(self, rows: Sequence[Any], results: Tensor) -> None:
        self.of = {id(row): column for row, column in zip(rows, results.T.tolist(), strict=True)}
        self.rows = list(rows)

    def results(self, rows: Sequence[Any]) -> list[list[float]]:
        columns = [self.of[id(row)] for row in rows]
        return [[column[0] for column in columns], [column[1] for column in columns]]


class PlainDecoding:
    """As `CudaDecoding`. Its GPU must be the current one when kernels are launched, as Triton requires."""

    prompt_tokens = None

    def __init__(self, decoder: Any) -> None:
        self.decoder, self.launches, self.ahead, self.current = decoder, 0, 0, False

    def begin(self, cache: KVCache, sampling: SamplingParams, longest: int) -> None:
        self.cache, self.sampling, self.flight = cache, sampling, None

    def end(self) -> None:
        del self.cache
        self.flight = None

    @property
    def in_flight(self) -> bool:
        return self.flight is not None

    @contextmanager
    def on_device(self) -> Iterator[None]:
        self.current = True
        yield
        self.current = False

    def prompt_attention(self, chunks: Sequence[PrefillChunk]) -> PrefillAttention:
        assert self.current
        return PrefillAttention(chunks)

    def launch(self, rows: Sequence[Any], after: Flight | None = None) -> None:
        assert self.current
        more = int(after is not None)
        self.launches, self.ahead = self.launches + 1, self.ahead + more
        tokens = [row.tokens[-1] for row in rows] if after is None else after.results(rows)[0]
        known = [Row(row.pages, row.stored + more) for row in rows]
        attention = DecodeAttention(self.cache, known, Readers(self.cache, known))
        positions = torch.tensor([row.stored for row in known])
        states = self.decoder.hidden(torch.tensor(tokens).long(), positions, attention)
        places = [min(len(row.tokens) + more, len(row.random) - 1) for row in rows]
        uniform = torch.tensor(np.array([row.random[place] for row, place in zip(rows, places, strict=True)]))
        drawn, log_probs = sample(self.decoder.logits(states), uniform, self.sampling)
        self.flight = Flight(rows, torch.stack([drawn.double(), log_probs.double()]))

    def take(self) -> Flight:
        flight, self.flight = self.flight, None
        assert flight is not None
        return flight


def engines() -> tuple[TorchRolloutEngine, TorchRolloutEngine, PlainDecoding]:
    network = causal_lm()
    apart, plain = (engine_for(network, CPU, fast=False, max_running=4) for _ in range(2))
    decoding: Any = PlainDecoding(apart._decoder)
    apart._decoding = decoding
    return apart, plain, decoding


@pytest.mark.parametrize("page", [4, 64])
@pytest.mark.parametrize(
    "requests",
    [
        lambda: prompts((3, 30, 1, 16, 15, 5, 9, 40)),
        lambda: prompts((3, 30, 1, 16, 15), shared=20, samples=3),  # some join without a forward pass
        lambda: prompts((5,), samples=9),
    ],
    ids=["single", "samples", "one prompt"],
)
def test_tokens_are_those_of_the_plain_step(
    requests: Callable[[], list[Request]], page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache, "PAGE", page)
    apart, plain, decoding = engines()
    found, expected = (answers(engine, requests(), SamplingParams(40)) for engine in (apart, plain))
    tokens = check_equal(found, expected)
    assert {completion.finish_reason for completion in found.values()} == {"stop", "length"}
    assert decoding.ahead > decoding.launches / 2
    assert decoding.launches < tokens
    assert not hasattr(decoding, "cache"), "training has its memory"


def test_arrivals_limits_and_an_abort() -> None:
    apart, plain, _ = engines()
    few, sampling = prompts((3, 30, 1, 16, 15)), SamplingParams(40)
    check_equal(*(answers(engine, [], sampling, Arriving(few, 80)) for engine in (apart, plain)))
    short = [Request(one.index, one.token_ids, one.seed, 5 * one.index + 1) for one in few]
    check_equal(*(answers(engine, short, sampling) for engine in (apart, plain)))
    cut = answers(apart, short, sampling, on_finished=lambda completion: apart.abort())
    assert {completion.finish_reason for completion in cut.values()} == {"length", "abort"}
    check_equal(*(answers(engine, few, sampling) for engine in (apart, plain)))
