"""The compiled sampling, against the plain one on the same logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rl_platform import acceleration
from rl_platform.accel.openmp_team import has_team
from rl_platform.engines.rollout.sampling import sample, sampler
from rl_platform.records import SamplingParams

pytestmark = pytest.mark.skipif(not has_team(), reason="torch computes without libgomp here")
CPU = torch.device("cpu")
VOCABULARIES = (1, 5, 64, 200, 5000)


def compiled(logits: Tensor, uniform: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    sampling = SamplingParams(1, temperature)
    found = sampler(CPU, torch.bfloat16, sampling)
    assert found is not sample
    return found(logits, uniform, sampling)


def random_logits(rows: int, vocabulary: int) -> Tensor:
    return 4 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(vocabulary)).bfloat16()


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_draws_the_same_tokens(vocabulary: int, temperature: float, dtype: torch.dtype) -> None:
    logits = random_logits(200, vocabulary).to(dtype) * 1.1
    uniform = torch.rand(200, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    tokens, log_probs = compiled(logits, uniform, temperature)
    wanted, wanted_log_probs = sample(logits, uniform, SamplingParams(1, temperature))
    assert (tokens != wanted).sum() <= 1  # a random number within the rounding of a border
    same = tokens == wanted
    torch.testing.assert_close(log_probs[same], wanted_log_probs[same], rtol=1e-5, atol=2e-6)


def test_a_token_is_as_likely_as_its_probability() -> None:
    logits = random_logits(1, 100)
    uniform = (torch.arange(20000, dtype=torch.float64) + 0.5) / 20000
    tokens, _ = compiled(logits.expand(20000, -1).contiguous(), uniform)
    found = torch.bincount(tokens, minlength=100) / 20000
    torch.testing.assert_close(found, logits[0].float().softmax(-1), rtol=0, atol=6e-5)


@pytest.mark.parametrize("number", [0.0, 0.5, 1.0 - 2.0**-53])
def test_a_token_of_probability_0_is_never_drawn(number: float) -> None:
    logits = torch.full((1, 300), -torch.inf, dtype=torch.bfloat16)
    logits[0, [70, 71, 130]] = 1.0
    tokens, log_probs = compiled(logits, torch.tensor([number], dtype=torch.float64))
    assert tokens.tolist() == [{0.0: 70, 0.5: 71}.get(number, 130)]
    torch.testing.assert_close(log_probs.exp(), torch.tensor([1 / 3]))


@pytest.mark.parametrize("place", [0, 3, 299])
def test_logits_that_are_nan_give_some_token_and_a_log_prob_that_tells(place: int) -> None:
    logits = random_logits(2, 300)
    logits[0, place] = torch.nan
    tokens, log_probs = compiled(logits, torch.full((2,), 0.4, dtype=torch.float64))
    assert 0 <= int(tokens[0]) < 300
    assert log_probs.isnan().tolist() == [True, False]


def test_filters_and_other_types_have_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for sampling in (SamplingParams(1, top_k=5), SamplingParams(1, top_p=0.9)):
        assert sampler(CPU, torch.bfloat16, sampling) is sample
    assert sampler(CPU, torch.float32, SamplingParams(1)) is sample
    monkeypatch.setenv(acceleration.VARIABLE, "off")
    assert sampler(CPU, torch.bfloat16, SamplingParams(1)) is sample
