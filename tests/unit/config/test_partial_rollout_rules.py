"""Which configs may have partial rollouts."""

from __future__ import annotations

import pytest

PARTIAL = "rollout.partial_rollout"
ON = (f"{PARTIAL}={{}}", "algorithm.rollout_is={}")


def test_half_as_many_prompts_again_are_in_work(load) -> None:
    assert load("reasoning").config.prompts_in_flight == 64
    assert load("reasoning", *ON).config.prompts_in_flight == 96
    assert load("reasoning", *ON, "data.train_batch_size=3", "data.mini_batch_size=3").config.prompts_in_flight == 5
    assert load("reasoning", *ON, f"{PARTIAL}.prompts_in_flight=70").config.prompts_in_flight == 70
    assert not load("reasoning", f"{PARTIAL}={{}}", "algorithm.old_log_probs=rollout").notes


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        ((*ON, f"{PARTIAL}.prompts_in_flight=64"), f"{PARTIAL}.prompts_in_flight", "none is ever cut"),
        ((*ON, f"{PARTIAL}.prompts_in_flight=0"), f"{PARTIAL}.prompts_in_flight", "out of range"),
        ((*ON, "rollout.multi_turn={}"), PARTIAL, "conversations are not cut"),
        ((*ON, "algorithm.dynamic_sampling={}", "algorithm.group_size=2"), PARTIAL, "dynamic sampling judges"),
        ((f"{PARTIAL}={{}}",), PARTIAL, "without a correction they would count as new"),
        ((f"{PARTIAL}=true",), PARTIAL, "the wrong type"),
    ],
)
def test_what_makes_no_sense(overrides: tuple[str, ...], key: str, words: str, problems) -> None:
    reported = problems("reasoning", *overrides)
    assert list(reported) == [key]
    assert words in reported[key].message


def test_an_embodied_rollout_is_not_cut(problems) -> None:
    assert "equal lengths" in problems("embodied", f"{PARTIAL}={{}}")[PARTIAL].message
