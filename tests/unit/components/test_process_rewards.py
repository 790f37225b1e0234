"""Rewards of single steps: from the verifier's characters to tokens, and from tokens to positions of the batch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rl_platform.algorithms.rewards import place_process_rewards
from rl_platform.records import Prompt, Trajectory
from rl_platform.runners.trajectories import process_rewards

VERIFIER = """
def lines(response, answer, metadata):
    ends = [place + 1 for place, character in enumerate(response) if character == "\\n"]
    return float(len(ends)), [(end, 0.5) for end in ends]

def beyond(response, answer, metadata):
    return (1.0, [(len(response) + 1, 0.5)]) if response == "short" else 1.0

def infinite(response, answer, metadata):
    return (1.0, [(1, float("inf"))]) if response == "short" else 1.0
"""


@pytest.fixture
def reward(language_reward):
    return lambda function: language_reward(
        "step_verifiers", VERIFIER, type=f"step_verifiers:{function}", num_workers=1
    )


def trajectory(text: str, tokens: tuple[int, ...] | None = None) -> Trajectory:
    ids = (*text.encode(), 256) if tokens is None else tokens
    return Trajectory(Prompt(0, "?", "!", (63,)), 0, ids, (0.0,) * len(ids), "stop", 0, text=text)


def test_characters_become_tokens(reward) -> None:
    plain, accents = reward("lines").score([trajectory("ab\nc\nd"), trajectory("äö\nü")])
    assert plain.reward == 2.0
    assert plain.step_rewards == ((2, 0.5), (4, 0.5))
    assert accents.step_rewards == ((4, 0.5),)  # two bytes, so two tokens, per letter


def test_a_token_of_several_characters_gets_what_ends_in_it(reward) -> None:
    component = reward("lines")
    component._tokenizer = SimpleNamespace(decode=lambda ids: "".join(["ab\nc", "\n", "d"][token] for token in ids))
    assert component.score([trajectory("ab\nc\nd", (0, 1, 2))])[0].step_rewards == ((0, 0.5), (1, 0.5))


@pytest.mark.parametrize("function", ["beyond", "infinite"])
def test_a_step_that_cannot_be_costs_its_response_only(reward, function: str) -> None:
    wrong, right = reward(function).score([trajectory("short"), trajectory("right")])
    assert (wrong.valid, wrong.step_rewards, wrong.reward) == (False, (), 0.0)
    assert (right.valid, right.reward) == (True, 1.0)


def test_rewards_of_other_positions_move_to_the_action_before_and_are_counted() -> None:
    mask = torch.tensor([[0, 1, 1, 0, 0, 1, 0], [0] * 7], dtype=torch.bool)
    addressed = torch.tensor([[1.0, 2, 0, 4, 8, 16, 32], [1.0] * 7])
    placed, moved = place_process_rewards(addressed, mask)
    assert placed.tolist() == [[0, 3, 12, 0, 0, 48, 0], [0] * 7]
    assert moved == 4


def test_they_stand_behind_the_prompt_and_add_up() -> None:
    one = trajectory("abc")
    one = Trajectory(**{**vars(one), "step_rewards": ((0, 1.0), (2, 0.5), (2, 0.25))})
    mask = torch.tensor([[False, True, True, True, True, False]])
    placed, metrics = process_rewards([one], mask)
    assert placed.tolist() == [[0, 1, 0, 0.75, 0, 0]]
    assert metrics == {"reward/process_mean": 1.75, "reward/process_moved": 0.0}
