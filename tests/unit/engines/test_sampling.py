"""Drawing tokens: which may be drawn, how often, and with which log-probability."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl_platform.engines.rollout import sampling as sampling_module
from rl_platform.engines.rollout.sampling import sample, uniforms
from rl_platform.records import SamplingParams

ALMOST_ONE = 1.0 - 2.0**-53  # the largest number that `uniforms` can hold


def params(temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> SamplingParams:
    return SamplingParams(1, temperature, top_p, top_k)


def draw(logits: Tensor, sampling: SamplingParams, count: int) -> Tensor:
    """How often each token is drawn by `count` equally spaced random numbers."""
    uniform = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    tokens, _ = sample(logits.expand(count, -1), uniform, sampling)
    return torch.bincount(tokens, minlength=len(logits)) / count


def filtered(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """The distribution after temperature, then top-k, then top-p, one token at a time."""
    probs = (logits.double() / sampling.temperature).softmax(-1)
    order = sorted(range(len(probs)), key=lambda token: -float(probs[token]))
    kept = order[: sampling.top_k or None]
    total, mass, nucleus = float(probs[kept].sum()), 0.0, []
    for token in kept:
        if mass < sampling.top_p * total:
            nucleus.append(token)
        mass += float(probs[token])
    result = torch.zeros_like(probs)
    result[nucleus] = probs[nucleus]
    return result / result.sum()


FILTERS = [
    params(),
    params(temperature=0.5),
    params(temperature=2.0),
    params(top_k=5),
    params(top_p=0.8),
    params(temperature=1.5, top_p=0.6, top_k=7),
    params(top_p=1e-6),
    params(top_k=1),
    params(top_k=1000),
]


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
def test_sums_of_integers_draw_the_same_tokens(sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs use them with `runner.deterministic`."""
    logits = torch.randn(300, generator=torch.Generator().manual_seed(1)) * 2
    expected = draw(logits, sampling, 500)
    monkeypatch.setattr(sampling_module, "_cumulative", sampling_module._fixed_point_sums)
    assert torch.equal(draw(logits, sampling, 500), expected)


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
def test_frequencies(sampling: SamplingParams) -> None:
    logits = torch.randn(20, generator=torch.Generator().manual_seed(1)) * 2
    expected, actual = filtered(logits, sampling), draw(logits, sampling, 20_000)
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1.5 / 20_000)  # rounded at both of its borders
    assert not actual[expected == 0].any()


def test_frequencies_of_seeded_numbers() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    tokens, _ = sample(logits.expand(4000, -1), uniforms(7, 4000), params())
    counts = torch.bincount(tokens, minlength=4)
    expected = torch.tensor([400.0, 800.0, 1200.0, 1600.0])
    chi_square = float(((counts - expected).square() / expected).sum())
    assert chi_square < 11.3  # 1 % of honest samplers of 4 tokens would be above


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
def test_log_probs_are_those_of_the_unfiltered_distribution(sampling: SamplingParams) -> None:
    logits = torch.randn(50, 20, generator=torch.Generator().manual_seed(2))
    tokens, log_probs = sample(logits, uniforms(3, 50), sampling)
    expected = (logits / sampling.temperature).log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    torch.testing.assert_close(log_probs, expected)


def test_greedy_takes_the_first_of_the_best_and_reports_temperature_one() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    tokens, log_probs = sample(logits, torch.tensor([0.99]), params(temperature=0.0, top_k=3))
    assert tokens.tolist() == [1]
    assert log_probs[0] == pytest.approx(logits[0].log_softmax(-1)[1].item())


@settings(max_examples=200)
@given(
    logits=st.lists(st.floats(-200, 200, width=32) | st.just(-math.inf), min_size=2, max_size=30),
    uniform=st.sampled_from([0.0, 5e-324, 0.5, ALMOST_ONE]) | st.floats(0, 1, exclude_max=True),
    top_k=st.integers(0, 4),
    top_p=st.sampled_from([1.0, 0.9, 0.3, 1e-9]),
)
def test_what_has_no_probability_is_never_drawn(logits, uniform, top_k, top_p) -> None:
    row = torch.tensor(logits)
    if not bool(torch.isfinite(row).any()):
        return
    sampling = params(top_p=top_p, top_k=top_k)
    tokens, log_probs = sample(row[None], torch.tensor([uniform], dtype=torch.float64), sampling)
    probs = row.softmax(-1)
    token = int(tokens)
    assert probs[token] > 0
    assert math.isfinite(log_probs.item())
    better = probs > probs[token]
    if top_k:
        assert int(better.sum()) < top_k
    assert float(probs[better].double().sum()) < top_p + 1e-5


@pytest.mark.parametrize(("uniform", "expected"), [(0.0, 2), (ALMOST_ONE, 4)])
def test_the_ends_of_the_unit_interval(uniform: float, expected: int) -> None:
    """Tokens 0, 1, 5 and 6 are filtered out: neither end may fall on them."""
    logits = torch.tensor([[0.0, 0.1, 3.0, 3.1, 3.2, 0.2, 0.3]])
    tokens, _ = sample(logits, torch.tensor([uniform], dtype=torch.float64), params(top_k=3))
    assert tokens.tolist() == [expected]


def test_random_numbers_depend_on_the_seed_alone() -> None:
    torch.manual_seed(0)
    first = uniforms(5, 100)
    torch.manual_seed(1)
    assert torch.equal(first, uniforms(5, 100))
    assert torch.equal(first[:3], uniforms(5, 3))  # a longer limit draws the same tokens
    assert not torch.equal(first, uniforms(6, 100))
    assert first.dtype == torch.float64
    assert 0 <= float(first.min()) < float(first.max()) < 1


@pytest.mark.parametrize("vocabulary", [5, 64, 130])
def test_logits_that_are_nan_give_some_token_and_a_log_prob_that_tells(vocabulary: int) -> None:
    logits = torch.full((3, vocabulary), float("nan"))
    tokens, log_probs = sample(logits, torch.tensor([0.0, 0.5, 0.999], dtype=torch.float64), SamplingParams(4))
    assert ((tokens >= 0) & (tokens < vocabulary)).all()
    assert log_probs.isnan().all()
