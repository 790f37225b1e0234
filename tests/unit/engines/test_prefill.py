"""Prompts into the cache: what is computed, how often, and that the answers do not depend on it."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch

from rl_platform.accel.packed_linear import PackedLinear
from rl_platform.engines.rollout import kv_cache, prefill
from rl_platform.engines.rollout.base import Completion, Request
from rl_platform.engines.rollout.decoder import FusedDecoder, TransformersDecoder
from rl_platform.engines.rollout.paged_attention import StepAttention
from rl_platform.engines.rollout.torch import TorchRolloutEngine
from rl_platform.models.language import LanguageModel
from rl_platform.models.packed import pack
from rl_platform.records import SamplingParams

SAMPLING = SamplingParams(8, temperature=1.3)


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the few tokens here fill several."""
    monkeypatch.setattr(kv_cache, "PAGE", 4)


def prefilled(engine: TorchRolloutEngine) -> list[list[int]]:
    """Tokens of every prefill's forward pass from now on."""
    seen: list[list[int]] = []
    plain = engine._decoder.hidden

    def recorded(tokens: torch.Tensor, positions: torch.Tensor, attention: Any) -> torch.Tensor:
        assert isinstance(attention, StepAttention)
        if attention.count:
            seen.append(tokens[: attention.count].tolist())
        return plain(tokens, positions, attention)

    engine._decoder.hidden = recorded
    return seen


def check(shared: ModuleType, completions: dict[int, Completion], requests: Sequence[Request]) -> None:
    """Every answer is what its request gets alone, in an engine of its own."""
    alone = shared.engine_for(shared.causal_lm())
    for request in requests:
        expected = shared.answers(alone, [request], SAMPLING)[request.index]
        assert completions[request.index].token_ids == expected.token_ids
        assert completions[request.index].log_probs == pytest.approx(expected.log_probs, abs=1e-4)


def test_what_all_prompts_begin_with_is_computed_once_per_call(shared: ModuleType) -> None:
    requests = shared.prompts(shared=6)
    engine = shared.engine_for(shared.causal_lm(), max_running=3)
    seen = prefilled(engine)
    completions = shared.answers(engine, requests, SAMPLING)
    assert 6 * (len(requests) - 1) >= prefill.WORTH_A_PASS
    assert seen[0] == list(requests[0].token_ids[:6])
    assert sum(map(len, seen)) == 6 + sum(len(request.token_ids) - 6 for request in requests)
    assert len(seen) > 3, "some entered later"
    check(shared, completions, requests)


@pytest.mark.parametrize("max_running", [64, 8, 3, 1])
def test_samples_of_one_prompt_that_follow_each_other_are_prefilled_once(max_running: int, shared: ModuleType) -> None:
    prompts = [request.token_ids for request in shared.prompts((9, 4, 12))]
    requests = [Request(number, prompts[number // 5], 50 + number) for number in range(15)]
    engine = shared.engine_for(shared.causal_lm(), max_running=max_running)
    seen = prefilled(engine)
    completions = shared.answers(engine, requests, SAMPLING)
    assert sum(map(len, seen)) == sum(map(len, prompts))
    check(shared, completions, requests)


def test_samples_of_a_single_prompt(shared: ModuleType) -> None:
    requests = [Request(number, (5, 6, 7, 8), number) for number in range(4)]
    engine = shared.engine_for(shared.causal_lm())
    seen = prefilled(engine)
    completions = shared.answers(engine, requests, SAMPLING)
    assert seen == [[5, 6, 7, 8]]
    check(shared, completions, requests)


@pytest.mark.parametrize("limit", [1, 4, 7])
def test_a_forward_pass_is_bounded_and_long_prompts_take_several(
    limit: int, shared: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "PREFILL_TOKENS", limit)
    requests = shared.prompts(shared=5)
    engine = shared.engine_for(shared.causal_lm())
    seen = prefilled(engine)
    completions = shared.answers(engine, requests, SAMPLING)
    assert max(map(len, seen)) == limit
    check(shared, completions, requests)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_fused_layers_compute_what_transformers_computes(kind: str, packed: bool, shared: ModuleType) -> None:
    model = LanguageModel(shared.causal_lm(kind))
    tokens = pack([torch.tensor(request.token_ids) for request in shared.prompts()])
    arguments = (tokens.tokens, tokens.positions, tokens.attention)
    with torch.inference_mode():
        fused = FusedDecoder(model)
        if packed and torch.backends.mkldnn.is_available():
            for linear in fused.linears:
                linear.pack(PackedLinear, torch.float32)
        logits = fused.logits(fused.hidden(*arguments))
        plain = TransformersDecoder(model)
        expected = plain.logits(plain.hidden(*arguments))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
