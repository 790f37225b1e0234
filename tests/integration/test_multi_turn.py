"""Turns with a tool, through the real command: from the config to the log, and a resumed run that is the same."""

from __future__ import annotations

import json
from pathlib import Path

from rl_platform.metrics import read_metrics

TOOLS = """
def answer(conversation, metadata):
    if conversation[-1] and conversation[-1][0] in "aeiou":
        raise KeyError("a tool that fails now and then")
    return "=7"

def score(response, answer, metadata):
    return float(response.count("=7") == 1) + float(response[-1:].isdigit())
"""
KEYS = (
    "rollout={multi_turn: {tool: 'my_tools:answer', max_turns: 2, max_observation_tokens: 2, num_workers: 1}}",
    "rollout.sampling={max_new_tokens: 2}",
    "reward.type=my_tools:score",
    "data.max_response_length=6",
    "runner.log_samples=8",
    "runner.max_steps=2",
)


def test_a_run(command, folder: Path) -> None:
    (folder / "my_tools.py").write_text(TOOLS)
    ended = command("reasoning.yaml", *KEYS)
    assert ended.code == 0, ended.err
    rows = read_metrics(folder / "out")
    for row in rows[1:]:
        called = 8 - row["tool/errors"]
        assert row["tool/calls"] == called / 8
        assert row["turns/mean"] == (8 + called) / 8
        assert row["len/observation_mean"] == 2 * called / 8
        assert row["reward/unscored"] == row["tool/errors"]
        # prompts of three bytes, then what was sampled and what was answered
        sampled = row["len/response_mean"] * called
        assert 2 * called <= sampled <= 4 * called
    samples = [json.loads(line) for line in (folder / "out" / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 16
    assert all("=7" in sample["response"] or sample["reward"] == 0 for sample in samples)  # the reward saw all turns
    assert any(sample["reward"] >= 1 for sample in samples)


def test_unknown_functions_are_told_together_before_anything_starts(command) -> None:
    unknown = ("rollout.multi_turn.tool=my_tols:answer", "reward.type=my_tols:score")
    ended = command("reasoning.yaml", *KEYS, *unknown)
    assert ended.code == 2
    assert "2 problems" in ended.err
    assert ended.err.count("cannot be imported") == 2
    assert "rollout.multi_turn.tool" in ended.err
