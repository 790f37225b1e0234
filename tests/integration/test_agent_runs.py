"""Agents of users through the real command: rows of rewritten contexts, kill and resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_platform.metrics import read_metrics

pytest.importorskip("openai")
AGENT = """
import asyncio
from functools import cache
from openai import AsyncOpenAI

@cache
def client(base_url):
    return AsyncOpenAI(base_url=base_url, api_key="-", max_retries=0)

async def solve(question, base_url, api_key):
    policy = client(base_url).with_options(api_key=api_key)
    messages = [{"role": "user", "content": question["text"]}]
    first = await policy.chat.completions.create(model="policy", messages=messages, max_tokens=1, logprobs=True)
    [token] = first.choices[0].logprobs.content
    assert token.logprob < 0
    text = first.choices[0].message.content
    if question["text"][0] in "13579":  # rewrites its context
        messages = [{"role": "user", "content": "?"}]
    else:
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "!"}]
        await asyncio.sleep(0.02)
    stream = await policy.chat.completions.create(model="policy", messages=messages, stream=True)
    answer = ""
    async for chunk in stream:
        answer += chunk.choices[0].delta.content or "" if chunk.choices else ""
    return (question["answer"] in text) + 0.1 * len(answer)
"""
KEYS = ("reasoning.yaml", "rollout.agent.function=my_agent.py:solve", "data.max_response_length=4")


@pytest.fixture(autouse=True)
def agent(folder: Path) -> None:
    (folder / "my_agent.py").write_text(AGENT)


def test_a_run_and_one_that_was_killed_are_the_same(command, killed, final_state, differences, logged) -> None:
    arguments = (*KEYS, "runner.save_interval=1")
    ended = command(*arguments, "runner.output_dir=whole")
    assert ended.code == 0, ended.err
    rows = read_metrics(Path("whole"))[1:]
    assert all(row["turns/mean"] == 2 for row in rows)  # also if the context was rewritten: one turn a row
    assert any(1 < row["turns/rows"] < 2 for row in rows)
    assert all(row["reward/unscored"] == row["tool/errors"] == 0 for row in rows)
    assert any(row["reward/mean"] > 0 for row in rows)
    killed(*arguments, folder="killed", at="step-00000002")
    assert command(*arguments, "runner.output_dir=killed").code == 0
    assert differences(final_state("whole", 4), final_state("killed", 4)) == []
    assert differences(logged("whole"), logged("killed")) == []


def test_agents_ahead_of_training(command) -> None:
    ended = command(*KEYS, "runner.max_staleness=2", "algorithm.rollout_is={}")
    assert ended.code == 0, ended.err
    assert [row["staleness/max"] for row in read_metrics(Path("out"))[1:]] == [0, 1, 2, 2]


def test_a_wrong_function_is_told_before_anything_starts(command) -> None:
    ended = command(*KEYS, "rollout.agent.function=my_agent.py:client")
    assert ended.code == 2
    assert "called with (question, base_url, api_key)" in ended.err
    assert "rollout.agent.function" in ended.err


def test_an_agent_that_always_raises_ends_the_run_with_its_traceback(command, folder: Path) -> None:
    (folder / "my_agent.py").write_text("async def solve(question, base_url, api_key):\n    return 1 / 0\n")
    ended = command(*KEYS)
    assert ended.code == 70
    assert "ZeroDivisionError" in ended.err
    assert "rollout.agent.function my_agent.py:solve failed for all" in ended.err
