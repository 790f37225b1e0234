"""Turns with a tool in between: what is generated, what is masked out, what ends a conversation, tools that fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reward_parts import SHORT_S, HungRewards
from stand_ins import Sink, observed_text

from rl_platform.algorithms.shaping import ShapedRewards
from rl_platform.components.actor import LanguageActor
from rl_platform.components.agents.conversation_metrics import conversation_metrics
from rl_platform.components.reward import LanguageReward
from rl_platform.components.rollout import LanguageRollout
from rl_platform.config.schema.reward import Reward
from rl_platform.errors import WorkerError
from rl_platform.records import Prompt, Trajectory
from rl_platform.runners.trajectories import check_any_scored, rollout_batch, unscored_notes

PROMPTS = [Prompt(index, text, "", tuple(text.encode())) for index, text in enumerate(["12+3", "7", "100-1"])]
TOOL = """
import os, time
from pathlib import Path

def always(conversation, metadata):
    return f"<{len(conversation)}>"

def long(conversation, metadata):
    return "abcdefgh"

def never(conversation, metadata):
    return None

def some(conversation, metadata):
    if conversation[0] == "7":
        raise KeyError("my own mistake")
    if conversation[0] == "12+3":
        Path(__file__).with_name(str(os.getpid())).touch()
        time.sleep(600)
    return None

def raises_for_7(conversation, metadata):
    if conversation[0] == "7":
        raise KeyError("my own mistake")

def none_works(conversation, metadata):
    raise KeyError("my own mistake")
"""


@pytest.fixture
def generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, context, reasoning, closes) -> Callable[..., Any]:
    """generated("always"): trajectories of `PROMPTS`, two of each; all options of `rollout` can be given."""
    (tmp_path / "my_tools.py").write_text(TOOL)
    monkeypatch.syspath_prepend(tmp_path)

    def build(tool: str, world_size: int = 1, longest: int = 20, turn: int = 2, **options: Any) -> list[Trajectory]:
        turns = {"tool": f"my_tools:{tool}", "max_turns": 3, "max_observation_tokens": 8, "num_workers": 1} | options
        section = {"multi_turn": turns, "sampling": {"max_new_tokens": turn}}
        data = {
            "mini_batch_size": 4,
            "max_prompt_length": 8,
            "max_response_length": longest,
            "use_chat_template": False,
        }
        config = reasoning(rollout=section, data=data)
        weights = LanguageActor(context(), config).publish(7)
        found: list[Trajectory] = []
        for number in range(world_size):
            rank = closes(LanguageRollout(context("rollout", number, world_size), config))
            rank.receive(weights)
            rank.generate(PROMPTS, 2, config.rollout.sampling, "train", 4, Sink(found))
        return sorted(found, key=lambda trajectory: (trajectory.prompt.index, trajectory.sample))

    return build


def test_observations_stand_between_the_turns(generated) -> None:
    found = generated("always")
    assert [(one.prompt.index, one.sample) for one in found] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    for one in found:
        assert len(one.conversation.turns) == 3
        assert one.conversation.observations == 2
        assert observed_text(one) == "<2><4>"
        assert one.sampled[0]
        assert one.sampled[-1]
        assert len(one.log_probs) == len(one.token_ids)
        assert one.weights_version == 7
    assert len({one.token_ids for one in found}) == 6
    metrics = conversation_metrics(found)
    assert metrics["turns/mean"] == metrics["turns/max"] == 3
    assert (metrics["tool/calls"], metrics["tool/errors"], metrics["len/observation_mean"]) == (2, 0, 6)


def test_ranks_change_no_token(generated) -> None:
    alone, together = generated("always"), generated("always", world_size=4)
    assert [one.token_ids for one in alone] == [one.token_ids for one in together]


def test_log_probs_are_those_of_the_whole_conversation_and_observations_are_masked(
    generated, context, reasoning
) -> None:
    """The training side computes log-probs from all tokens in one go: every turn must have seen what went before."""
    found = generated("always")
    rewards = torch.arange(1.0, 1 + len(found))
    counted = torch.ones(len(found), dtype=torch.bool)
    batch = rollout_batch(found, ShapedRewards(rewards, counted, counted, {}), pad_token_id=256)
    data = {"mini_batch_size": 4, "max_prompt_length": 8, "max_response_length": 20}
    trained = LanguageActor(context(), reasoning(data=data)).evaluate(batch)["log_probs"]
    mask = batch.action_mask
    assert torch.allclose(trained[mask], batch.rollout_log_probs[mask], atol=1e-4)
    for row, one in zip(range(len(found)), found, strict=True):
        prompt, sampled = len(one.prompt.token_ids), torch.tensor(one.sampled)
        assert torch.equal(mask[row, prompt : prompt + len(sampled)], sampled)
        assert mask[row].sum() == len(sampled) - 6
        assert batch.rewards[row].nonzero().item() == prompt + len(sampled) - 1


def test_a_tool_with_nothing_to_say_ends_the_conversation(generated) -> None:
    for one in generated("never"):
        assert one.conversation.turns == (one.text,)
        assert all(one.sampled)


def test_the_response_is_cut_at_its_length_observations_included(generated) -> None:
    found = generated("always", longest=11, turn=4, max_turns=9)
    assert all(len(one.token_ids) <= 11 for one in found)
    assert {one.finish_reason for one in found} == {"length"}
    assert all(one.sampled[-1] for one in found)  # an observation that nobody could answer is left out


def test_long_observations_are_cut(generated) -> None:
    for one in generated("long", max_turns=2, max_observation_tokens=3):
        assert observed_text(one) == "abc"


def test_a_tool_that_raises_or_hangs_costs_its_response(generated, context, reasoning, tmp_path, monkeypatch) -> None:
    HungRewards(lambda pid: (tmp_path / str(pid)).exists(), monkeypatch)
    found = generated("some", timeout_s=SHORT_S)
    assert [one.valid for one in found] == [False] * 4 + [True] * 2
    assert conversation_metrics(found)["tool/errors"] == 4
    reward = LanguageReward(context("reward"), reasoning(reward={"type": "exact_match", "num_workers": 1}))
    submitted, submit = [], reward._scorer.submit
    monkeypatch.setattr(reward._scorer, "submit", lambda items: submitted.extend(items) or submit(items))
    scored = reward.score(found)
    reward.close()
    assert len(submitted) == 2, "a request of a judge costs money"
    assert [one.valid for one in scored] == [False] * 4 + [True] * 2


def test_a_tool_that_never_works_ends_the_run_with_its_traceback(generated) -> None:
    found = generated("none_works", world_size=3)
    with pytest.raises(WorkerError, match="my own mistake") as caught:
        check_any_scored(found, Reward())
    assert "rollout.multi_turn.tool my_tools:none_works failed for all of 6" in str(caught.value)
    check_any_scored([*found, *generated("never")], Reward())


def test_a_tool_that_fails_for_all_responses_of_one_rank_costs_these(generated) -> None:
    """With six ranks each has one response."""
    found = generated("raises_for_7", world_size=6)
    assert sorted(one.prompt.text for one in found if not one.valid) == ["7", "7"]
    check_any_scored(found, Reward())
    ((cause, note),) = unscored_notes(found).items()
    assert cause == "rollout.multi_turn.tool my_tools:raises_for_7 failed"
    assert "The first: KeyError: 'my own mistake' (" in note
    assert "my_tools.py:" in note
