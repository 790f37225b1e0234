"""Distributions of lengths, and the batches of decoding."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from rl_platform.planner.basis import Basis
from rl_platform.planner.lengths import Lengths, decoding, expected, limits, of_metrics, sampled, spread


@pytest.mark.parametrize(("least", "mean", "most"), [(1, 40, 512), (10, 20, 30), (5, 100, 128)])
def test_a_spread_keeps_mean_and_range(least: float, mean: float, most: float) -> None:
    lengths = spread(least, mean, most)
    assert statistics.mean(lengths) == pytest.approx(mean, rel=0.05)
    assert least <= lengths[0] <= lengths[-1] <= most
    assert list(lengths) == sorted(lengths)


def test_equal_lengths_are_one_value() -> None:
    assert spread(7, 7, 7) == (7,)
    assert spread(0, 0.2, 0.2) == (1,)


def test_a_sample_keeps_the_quantiles() -> None:
    assert sampled([5]) == (5,)
    assert sampled(range(1, 641))[::31] == (11, 631)


def test_means_and_attention_of_a_distribution() -> None:
    lengths = Lengths((2, 4), (10,), inserted=2.0)
    assert lengths.sequence == 3 + 10 + 2
    # E[L^2] / E[L] with L = 14 or 16
    assert lengths.context == pytest.approx((14**2 + 16**2) / 2 / 15)


def test_a_key_gives_the_mean_of_the_responses(plans: Any) -> None:
    longest, shorter = plans.config("data.max_response_length=64"), "data.expected_response_length=20"
    config = plans.config("data.max_response_length=64", shorter)
    lengths = expected(config)
    assert lengths.response == pytest.approx(20, rel=0.03)
    assert lengths.responses[0] == 1
    assert 60 <= lengths.responses[-1] <= 64
    assert "responses 20" in str(lengths)
    assert "data.expected_response_length" in str(lengths)
    assert plans.report(config).works["generate"] < plans.report(longest).works["generate"]
    # a run is more than an expectation, and is cut at the limit only
    measured = of_metrics({"len/response_min": 2, "len/response_mean": 40, "len/response_max": 64}, config, "of a run")
    assert measured.responses[-1] > 60
    assert of_metrics({"len/prompt_mean": 9}, config, "of a run").responses == lengths.responses


@pytest.mark.parametrize(("share", "running"), [(1, 1), (7, 3), (64, 64), (1000, 16), (5000, 8)])
@pytest.mark.parametrize("responses", [(12,), (1, 2, 40), tuple(range(1, 33))])
def test_decoding_samples_every_token_once(responses: tuple[int, ...], share: int, running: int) -> None:
    batches = decoding(responses, share, running)
    tokens = sum(batch * steps for batch, steps in batches)
    detailed = min(share, 4 * running)
    wanted = [responses[int((index + 0.5) * len(responses) / detailed)] for index in range(detailed)]
    assert tokens == pytest.approx(sum(wanted) + (share - detailed) * statistics.mean(responses))
    assert all(0 < batch <= running for batch, _ in batches)


def test_the_longest_response_runs_alone_at_the_end() -> None:
    assert dict(decoding((1, 1, 1, 100), 4, 4)) == {4: 1, 1: 99}
    full, tail = decoding((12,), 70, 64)
    assert (full, tail) == ((64, 12), (6, 12))


def test_lengths_of_a_run_replace_the_limits_and_never_exceed_them(plans: Any) -> None:
    config = plans.config("data.max_prompt_length=32", "data.max_response_length=16")
    metrics = {"len/prompt_mean": 20.0, "len/prompt_max": 40.0, "len/response_mean": 6.0, "len/response_min": 1.0}
    lengths = of_metrics(metrics | {"len/response_max": 16.0, "len/observation_mean": 3.0}, config, "x")
    assert lengths.prompt < 21
    assert max(lengths.prompts) <= 32
    assert lengths.response == pytest.approx(6, rel=0.05)
    assert lengths.inserted == 3
    assert of_metrics({}, config, "x") == expected(config)


def test_shorter_sequences_are_faster_in_every_phase_and_a_tail_is_slower(plans: Any) -> None:
    config = plans.config("data.max_prompt_length=256", "data.max_response_length=256", "data.train_batch_size=256")

    def seconds(lengths: Lengths) -> dict[str, float]:
        return {span.phase: span.seconds for span in plans.report(config, Basis(lengths)).spans}

    longest, short = seconds(limits(config)), seconds(Lengths((64,), (64,)))
    slower = {phase for phase in longest if short[phase] < longest[phase]}
    assert slower == set(longest) - {"sync weights"}
    tail = seconds(Lengths((64,), (48,) * 31 + (256,)))
    assert tail["generate"] > short["generate"]


@pytest.mark.parametrize(
    ("turns", "longest"),
    [
        ("rollout.multi_turn={max_turns: 3}", 30),
        ("rollout.multi_turn={max_turns: 5, max_observation_tokens: 8}", 40),
        ("rollout.agent={function: 'my:agent', max_calls: 2}", 20),
        ("rollout.stop=[]", 10),
    ],
)
def test_the_limit_of_a_turn_is_none_of_the_response(plans: Any, turns: str, longest: int) -> None:
    config = plans.config("data.max_response_length=40", "rollout.sampling.max_new_tokens=10", turns)
    assert limits(config).responses == (longest,)
    measured = of_metrics({"len/response_mean": 35.0}, config, "x")
    assert measured.response == min(35, longest)


def test_before_a_measurement_prompts_have_half_of_their_limit(plans: Any) -> None:
    lengths = expected(plans.config("data.max_prompt_length=33", "data.max_response_length=16"))
    assert (lengths.prompts, lengths.responses) == ((17,), (16,))
    assert str(lengths) == "prompts 17 tokens (half of their limit), responses 16 (their limit)"
