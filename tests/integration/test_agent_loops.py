"""Tools and text environments through the real command: metrics, kill and resume, wrong names."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_configs import GAME

from rl_platform.metrics import read_metrics

WIDE = "actor.model.random_init.max_positions=512"


def test_an_environment_killed_and_resumed(command, killed, final_state, differences, logged, folder) -> None:
    (folder / "my_tools.py").write_text(GAME)
    agent = "rollout.agent={environment: {type: 'my_tools.py:Game'}, num_workers: 1}"
    keys = ("reasoning.yaml", agent, "rollout.sampling={max_new_tokens: 2}", "data.max_response_length=12", WIDE)
    arguments = (*keys, "runner.save_interval=1")
    ended = command(*arguments, "runner.output_dir=whole")
    assert ended.code == 0, ended.err
    rows = read_metrics(Path("whole"))[1:]
    assert all(row["turns/mean"] == 2 and row["tool/errors"] == 0 for row in rows)
    assert all(row["reward/mean"] > 0 for row in rows)
    killed(*arguments, folder="killed", at="step-00000002")
    assert command(*arguments, "runner.output_dir=killed").code == 0
    assert differences(final_state("whole", 4), final_state("killed", 4)) == []
    assert differences(logged("whole"), logged("killed")) == []


@pytest.mark.parametrize(("more", "turns"), [("", 1), (", environment: {type: 'my_tools.py:Game'}", 2)])
def test_tools_that_the_policy_does_not_call(command, folder, more: str, turns: int) -> None:
    (folder / "my_tools.py").write_text(GAME)
    agent = f"rollout.agent={{tools: [{{type: 'my_tools.py:Echo'}}], tool_format: hermes{more}}}"
    lengths = ("data.max_prompt_length=400", "data.max_response_length=16", "rollout.sampling={max_new_tokens: 2}")
    ended = command("reasoning.yaml", agent, WIDE, *lengths, "runner.max_steps=1")
    assert ended.code == 0, ended.err
    row = read_metrics(Path("out"))[1]
    assert (row["tool/echo/calls"], row["tool/malformed"], row["turns/mean"]) == (0, 0, turns)


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ("{tools: [{type: 'my_tools.py:Game'}]}", "has no method call"),
        ("{tools: [{type: 'my_tools.py:Echo'}]}", "there is no chat template"),
        ("{tools: [{type: 'my_tools.py:Echo'}, {type: 'my_tools.py:Echo'}]}", "several tools have this name"),
        ("{environment: {type: 'my_tools.py:Echo'}}", "has no method reset, step"),
    ],
)
def test_wrong_tools_and_environments_are_told_before_anything_starts(command, folder, agent, message) -> None:
    (folder / "my_tools.py").write_text(GAME)
    ended = command("reasoning.yaml", f"rollout.agent={agent}")
    assert ended.code == 2
    assert message in ended.err
    assert "rollout.agent." in ended.err
