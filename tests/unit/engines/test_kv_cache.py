"""Pages of keys and values: who has them, what they take, and when others go on while a prompt is computed."""

from __future__ import annotations

import gc
import random
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_platform.engines.rollout import kv_cache, prefill
from rl_platform.engines.rollout.base import Request
from rl_platform.engines.rollout.batch import ContinuousBatch
from rl_platform.engines.rollout.kv_cache import KVCache, Page
from rl_platform.records import SamplingParams

PAGE = 4
TOKEN = 2 * 2 * 2 * 8 * 4  # bytes: layers, keys and values, heads, head_dim, float32


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "PAGE", PAGE)


def allocated() -> int:
    """Bytes of all living tensors of a cache's shapes, whoever holds them."""
    storages = {}
    for tensor in gc.get_objects():
        if issubclass(type(tensor), Tensor) and tensor.dim() >= 5:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def held(batch: ContinuousBatch) -> int:
    """Tokens in the cache, those of a shared page once."""
    size, pages, rest = batch.cache.page, set(), 0
    for owner in (*batch.running, *batch.prefill.prompts, batch.prefill.shared):
        pages |= {id(page) for page in owner.pages}
        rest += max(owner.stored - size * len(owner.pages), 0)
    return size * len(pages) + rest


def watched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(bytes allocated, tokens held) after every forward pass from now on."""
    gc.collect()  # tensors of earlier tests
    seen: list[tuple[int, int]] = []
    plain = ContinuousBatch.step

    def recorded(batch: ContinuousBatch) -> None:
        plain(batch)
        seen.append((allocated(), held(batch)))

    monkeypatch.setattr(ContinuousBatch, "step", recorded)
    return seen


def test_memory_follows_the_tokens_held(shared: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = (40, 3, 5, 2, 9, 1, 4, 6) * 2
    requests = [
        Request(one.index, one.token_ids, one.seed, 24 if one.index == 8 else 1 + one.index)
        for one in shared.prompts(lengths)
    ]
    slots = 8
    engine = shared.engine_for(shared.causal_lm(), max_running=slots)
    seen = watched(monkeypatch)
    shared.answers(engine, requests, SamplingParams(24))
    tokens = [count for _, count in seen]
    assert max(tokens) > 1.5 * min(tokens), "there is something to follow"
    for size, count in seen:
        assert TOKEN * count <= size <= TOKEN * (count + 3 * PAGE * slots)
    longest = max(len(request.token_ids) for request in requests) + 24
    assert max(size for size, _ in seen) < TOKEN * slots * longest / 2
    gc.collect()
    assert allocated() == 0, "nothing is left when it is over"


def test_samples_of_a_prompt_store_its_pages_once(shared: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = shared.prompts((42,))[0].token_ids
    engine = shared.engine_for(shared.causal_lm(), max_running=8)
    seen = watched(monkeypatch)
    shared.answers(engine, [Request(number, prompt, number) for number in range(16)], SamplingParams(6))
    assert max(count for _, count in seen) <= 42 + 8 * (2 + 6) + 2, "2: of the copy that is kept for those that come"
    assert max(size for size, _ in seen) <= TOKEN * (42 + 8 * 3 * PAGE + PAGE)


def test_others_go_on_while_a_long_prompt_is_computed(shared: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "PREFILL_TOKENS", 8)
    requests = shared.prompts((5, 40, 3))
    engine = shared.engine_for(shared.causal_lm())
    passes: list[tuple[int, int]] = []
    plain = engine._decoder.hidden

    def recorded(tokens: Tensor, positions: Tensor, attention: Any) -> Tensor:
        passes.append((attention.count, len(tokens) - attention.count))
        return plain(tokens, positions, attention)

    monkeypatch.setattr(engine._decoder, "hidden", recorded)
    shared.answers(engine, requests, SamplingParams(12))
    # the first prompt and 3 tokens of the second; then 8 at a time beside the first sequence, the last pass with the
    # third prompt; 12 tokens take 11 passes after the one that completes the prompt
    assert passes[:6] == [(8, 0), (8, 1), (8, 1), (8, 1), (8, 1), (8, 1)]
    assert passes[6:] == [(0, 3)] * 6 + [(0, 2)] * 5


def test_pages_keep_their_content_while_others_come_and_go() -> None:
    cache = KVCache(2, 4, 1, 2, dtype=torch.float32, device=torch.device("cpu"))
    draw, pages = random.Random(0), dict[Page, float]()
    for number in range(300):
        if draw.random() < 0.3 + 0.4 * (number < 150):
            page = cache.take(draw.choice((1, 2, 4)))
            page.data.fill_(number)
            pages[page] = number
        elif pages:
            page = draw.choice(list(pages))
            cache.release([page])
            del pages[page]
        assert all((page.data == number).all() for page, number in pages.items())
        for pool in cache.pools.values():
            assert len(pool.segments) == -(-len(pool.pages) // pool.segment_pages)
    assert len(cache.pools) == 3


def test_a_page_lives_as_long_as_somebody_holds_it() -> None:
    cache = KVCache(2, 4, 1, 2, dtype=torch.float32, device=torch.device("cpu"))
    page = cache.take()
    cache.release(cache.hold([page]))
    assert page in page.pool.pages
    cache.release([page])
    assert not page.pool.segments
