"""The token log holds the numbers of the update, of response tokens only."""

from __future__ import annotations

from dataclasses import replace

import torch
from neutral_batches import neutral_batch

from rl_platform.records import RolloutBatch
from rl_platform.reporter import Token
from rl_platform.runners.ppo import _rows_of
from rl_platform.runners.watching import token_log

# prompt, then a response of three tokens, whose second one a tool wrote; then padding
MASK = torch.tensor([[False, True, False, True, False], [False, False, False, False, False]])


def batch() -> RolloutBatch:
    numbers = torch.arange(10.0).view(2, 5)
    return neutral_batch(
        MASK,
        inputs={"tokens": torch.arange(10).view(2, 5), "lengths": torch.tensor([4, 2])},
        rewards=numbers,
        rollout_log_probs=-numbers,
        log_probs=-numbers - 0.5,
        advantages=numbers * 2,
        returns=numbers * 3,
    )


def test_tokens_have_the_numbers_of_the_update() -> None:
    found = list(token_log.tokens_of(batch(), batch().log_probs + 1, "<{}>".format))
    known = {"rollout_log_prob": -1.0, "log_prob": -1.5, "new_log_prob": -0.5, "reward": 1.0, "advantage": 2.0}
    assert found[0] == Token(0, "<1>", **known, return_=3.0)
    assert found[1] == Token(0, "<2>")  # of a tool
    assert [token.text for token in found] == ["<1>", "<2>", "<3>"]  # the second row has no sampled token


def test_each_token_has_the_version_of_the_weights_that_sampled_it() -> None:
    of_rows = replace(batch(), versions=torch.tensor([4, 5]))
    assert [token.version for token in token_log.tokens_of(of_rows, None, str)] == [4, None, 4]
    mixed = replace(of_rows, token_versions=torch.tensor([[-1, 4, 4, 6, -1], [-1] * 5]))
    assert [token.version for token in token_log.tokens_of(mixed, None, str)] == [4, None, 6]


def test_all_rows_of_an_agent_belong_to_its_sample() -> None:
    """An agent that rewrites its context has several rows, and masked rows fill the mini-batch."""
    rows = batch().select(torch.tensor([0, 0, 0, 0]))
    rows = replace(rows, continues=torch.tensor([False, True, False, True]))
    rows = replace(rows, sample_mask=torch.tensor([True, True, True, False]))
    assert _rows_of(rows, 1).tolist() == [0, 1]
    assert _rows_of(rows, 9).tolist() == [0, 1, 2]
    found = token_log.tokens_of(rows.select(_rows_of(rows, 9)), None, str)
    assert [token.sample for token in found] == [0] * 6 + [1] * 3
    assert _rows_of(batch(), 1).tolist() == [0]


def test_a_long_response_is_cut(monkeypatch) -> None:
    monkeypatch.setattr(token_log, "LONGEST", 2)
    found = list(token_log.tokens_of(batch(), None, str))
    assert [token.text for token in found] == ["1", "2"]
    assert found[0].new_log_prob is None
