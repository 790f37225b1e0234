"""Agents of users, with the real engine, endpoint and agent process: recorded tokens, rows, failures, timing."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stand_ins import observed_text

from rl_platform.algorithms.shaping import ShapedRewards
from rl_platform.components.actor import LanguageActor
from rl_platform.components.agents.agent_runs import AgentRuns
from rl_platform.components.agents.chat_session import _assistant, _checked, _normal
from rl_platform.components.agents.tool_formats import ToolFormat
from rl_platform.components.reward import LanguageReward
from rl_platform.components.rollout import LanguageRollout
from rl_platform.config.schema.reward import Reward
from rl_platform.errors import WorkerError
from rl_platform.records import Prompt, Trajectory
from rl_platform.runners.trajectories import check_any_scored, rollout_batch, training_rows

PROMPTS = [Prompt(index, text, "", tuple(text.encode())) for index, text in enumerate(["12+3", "7", "100-1"])]
AGENTS = """
import json, os, time, threading, urllib.request

def ask(base_url, key, contents, **options):
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents)]
    body = json.dumps({"messages": messages, "max_tokens": 2} | options).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        return [choice["message"]["content"] for choice in json.load(answer)["choices"]]

def two_turns(question, base_url, key):
    [first] = ask(base_url, key, [question["text"]])
    ask(base_url, key, [question["text"], first, "<more>"])

def rewritten(question, base_url, key):
    [first] = ask(base_url, key, [question["text"]])
    ask(base_url, key, ["summary:"])
    return 0.5

def several(question, base_url, key):
    answers = ask(base_url, key, [question["text"]], n=3)
    ask(base_url, key, [question["text"], answers[1], "!"])
    ask(base_url, key, [question["text"], answers[1], "?"])

def parallel(question, base_url, key):
    def one(text):
        [first] = ask(base_url, key, [text])
        ask(base_url, key, [text, first, "."])
    threads = [threading.Thread(target=one, args=(text,)) for text in ("a", "b", "a")]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]

def slow_seven(question, base_url, key):
    if question["text"] == "7":
        time.sleep(1.0)
    two_turns(question, base_url, key)

def some(question, base_url, key):
    if question["text"] == "7":
        raise KeyError("my own mistake")
    if question["text"] == "12+3":
        time.sleep(600)
    two_turns(question, base_url, key)

def dies_once(question, base_url, key):
    two_turns(question, base_url, key)
    marker = os.path.join(os.path.dirname(__file__), "died")
    if not os.path.exists(marker):
        open(marker, "w").close()
        os._exit(3)

def none_works(question, base_url, key):
    raise KeyError("my own mistake")

def no_call(question, base_url, key):
    pass

def endless(question, base_url, key):
    contents = [question["text"]]
    while True:
        contents += [ask(base_url, key, contents)[0], "+"]

def slow_endpoint_user(question, base_url, key):
    with open(os.path.join(os.path.dirname(__file__), f"key-{question['text'][0]}"), "w") as file:
        file.write(f"{base_url} {key}")
    two_turns(question, base_url, key)
    time.sleep(600)
"""


class Sink:
    """The part of a channel that a component uses that only puts. `times`: of every put, in seconds."""

    def __init__(self) -> None:
        self.found: list[Trajectory] = []
        self.times: list[float] = []

    def put(self, trajectory: Trajectory) -> None:
        self.found.append(trajectory)
        self.times.append(time.monotonic())


@pytest.fixture
def generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, context, reasoning, closes) -> Callable[..., Any]:
    """generated("two_turns"): trajectories of `PROMPTS`, two of each, in the order of prompts and samples."""
    (tmp_path / "my_agents.py").write_text(AGENTS)
    monkeypatch.syspath_prepend(tmp_path)

    def build(
        agent: str, sink: Sink | None = None, longest: int = 20, deterministic: bool = False, **options: Any
    ) -> list[Trajectory]:
        section = {"agent": {"function": f"my_agents:{agent}"} | options}
        data = {
            "mini_batch_size": 4,
            "max_prompt_length": 12,
            "max_response_length": longest,
            "use_chat_template": False,
        }
        config = reasoning(rollout=section, data=data, runner={"deterministic": deterministic})
        weights = LanguageActor(context(), config).publish(7)
        rank = closes(LanguageRollout(context("rollout", 0, 1), config))
        rank.receive(weights)
        sink = sink or Sink()
        rank.generate(PROMPTS, 2, config.rollout.sampling, "train", 4, sink)
        return sorted(sink.found, key=lambda trajectory: (trajectory.prompt.index, trajectory.sample))

    return build


def check_log_probs(rows: list[Trajectory], context, reasoning) -> None:
    """The training side computes log-probs from all tokens of a row at once."""
    rewards, counted = torch.ones(len(rows)), torch.ones(len(rows), dtype=torch.bool)
    batch = rollout_batch(rows, ShapedRewards(rewards, counted, counted, {}), pad_token_id=256)
    data = {"mini_batch_size": len(rows), "max_prompt_length": 12, "max_response_length": 20}
    trained = LanguageActor(context(), reasoning(data=data)).evaluate(batch)["log_probs"]
    assert torch.allclose(trained[batch.action_mask], batch.rollout_log_probs[batch.action_mask], atol=1e-4)


def test_the_second_call_goes_on_with_the_recorded_tokens(generated, context, reasoning) -> None:
    found = generated("two_turns")
    assert [(one.prompt.index, one.sample) for one in found] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    for one, prompt in zip(found[::2], PROMPTS, strict=True):
        assert one.prompt.token_ids == prompt.token_ids
    for one in found:
        assert (len(one.conversation.turns), one.conversation.observations, one.rows) == (2, 1, ())
        assert observed_text(one) == "<more>"
        assert one.weights_version == 7
        assert one.sampled[-1]
    check_log_probs(found, context, reasoning)


def test_a_rewritten_context_is_a_row_of_its_own(generated, context, reasoning) -> None:
    found = generated("rewritten")
    for one in found:
        [first] = one.rows
        assert first.prompt.token_ids == PROMPTS[one.prompt.index].token_ids
        assert bytes(one.prompt.token_ids) == b"summary:"
        assert all(one.sampled)
        assert all(first.sampled)
    rows = training_rows(found, 8)
    assert len(rows) == 16
    assert [row.continues for row in rows] == [False, True] * 6 + [True] * 4
    assert [row.valid for row in rows] == [True] * 12 + [False] * 4
    check_log_probs(rows[:12], context, reasoning)
    reward = LanguageReward(context("reward"), reasoning(reward={"type": "exact_match", "num_workers": 1}))
    scored = reward.score(found)
    reward.close()
    assert [one.reward for one in scored] == [0.5] * 6
    assert {row.reward for row in training_rows(scored, 4)} == {0.5}


def test_answers_that_share_tokens_train_them_once(generated, context, reasoning) -> None:
    for one in generated("several"):
        rows = [*one.rows, one]
        assert len(rows) == 4  # two answers without a sequel, and two sequels of the third
        assert sum(sum(row.sampled) for row in rows) <= 5 * 2  # five answers of at most two tokens
        starts = [row.token_ids[:2] for row in rows if row.conversation.observations or not row.sampled[0]]
        assert len(starts) <= 2
        check_log_probs(rows, context, reasoning)


@pytest.mark.parametrize("deterministic", [False, True])
def test_results_do_not_depend_on_the_order_of_parallel_calls(generated, deterministic: bool) -> None:
    first, second = (generated("parallel", deterministic=deterministic) for _ in range(2))
    numbers = [
        [
            (row.prompt.token_ids, row.token_ids, row.log_probs, row.sampled, row.continues)
            for row in training_rows(found, 4)
        ]
        for found in (first, second)
    ]
    assert numbers[0] == numbers[1]
    assert all(len(one.rows) == 2 for one in first)


def test_timing_changes_no_number(generated) -> None:
    assert generated("slow_seven") == generated("two_turns") == generated("two_turns", max_running=1)


def test_a_slow_agent_delays_no_other(generated) -> None:
    sink = Sink()
    generated("slow_seven", sink)
    assert [one.prompt.index for one in sink.found[-2:]] == [1, 1]
    assert sink.times[-1] - sink.times[3] > 0.5


def test_an_agent_that_raises_or_hangs_costs_its_trajectory(generated) -> None:
    found = generated("some", timeout_s=3.0)
    assert [one.valid for one in found] == [False] * 4 + [True] * 2
    assert all(one.conversation.failed for one in found[:4])


def test_a_process_that_dies_is_started_again(generated) -> None:
    found = generated("dies_once", retries=1)
    assert all(one.valid for one in found)
    assert sum(one.conversation.retries for one in found) >= 1
    again = generated("two_turns")
    assert [one.token_ids for one in found] == [one.token_ids for one in again]  # the same random numbers


@pytest.mark.parametrize(("agent", "why"), [("none_works", "my own mistake"), ("no_call", "without a call")])
def test_agents_that_all_fail_end_the_run(generated, agent: str, why: str) -> None:
    found = generated(agent)
    with pytest.raises(WorkerError, match=why) as caught:
        check_any_scored(found, Reward())
    assert f"rollout.agent.function my_agents:{agent} failed for all of 6" in str(caught.value)
    check_any_scored([*found, *generated("two_turns")], Reward())


def test_a_response_at_its_limit_is_cut_and_counts(generated) -> None:
    for one in generated("endless", longest=10):
        assert one.valid
        assert one.finish_reason == "length"
        assert len(one.token_ids) <= 10


WRONG_REQUESTS = [
    (b"{", "not JSON"),
    (b"[]", "not a JSON object"),
    (b"{}", "at least one message"),
    (b'{"messages": [{"content": "?"}]}', "has a role"),
    (b'{"messages": [{"role": "user", "content": ""}]}', "empty"),
    (b'{"messages": [{"role": "user", "content": "1"}], "n": 0.5}', "n must be a positive"),
    (b'{"messages": [{"role": "user", "content": "1"}], "stop": "x"}', "stop is not supported"),
    (b'{"messages": [{"role": "user", "content": "1"}], "tools": [{}]}', "use_chat_template"),
    (b'{"messages": [{"role": "user", "content": "' + b"1" * 40 + b'"}]}', "maximum context length is exceeded"),
    (b'{"messages": [{"role": "user", "content": "1"}], "n": 99}', "max_calls"),
    (b'{"messages": [{"role": "user", "content": 5}]}', "the content of a message must be text"),
    (b'{"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}', "a call of a tool has a function"),
    (b'{"messages": [{"role": "assistant", "tool_calls": 5}]}', "tool_calls must be a list"),
]


def test_wrong_requests(generated, tmp_path: Path, monkeypatch) -> None:
    answers: dict[bytes, tuple[int, str]] = {}
    strangers: list[int] = []
    original = AgentRuns._run

    async def asking(self, place, prompt, sample, attempt, seed, generations):
        import asyncio

        running = asyncio.ensure_future(original(self, place, prompt, sample, attempt, seed, generations))
        while not (file := tmp_path / f"key-{prompt.text[0]}").exists() or " " not in file.read_text():
            await asyncio.sleep(0.05)
        url, key = file.read_text().split()
        strangers.append((await asyncio.to_thread(post, url, "wrong", b"{}"))[0])
        for body, _ in WRONG_REQUESTS:
            answers[body] = await asyncio.to_thread(post, url, key, body)
        return await running

    monkeypatch.setattr(AgentRuns, "_run", asking)
    found = generated("slow_endpoint_user", timeout_s=4.0)
    assert all(not one.valid and "not finished within" in one.verdict for one in found)
    assert set(strangers) == {401}
    for body, message in WRONG_REQUESTS:
        assert answers[body][0] == 400
        assert message in answers[body][1]


def test_half_a_character_in_a_message_is_replaced() -> None:
    contents = ["a\ud83d", [{"type": "text", "text": "b"}, {"type": "text", "text": "\udc00"}], None]
    messages, _, _ = _checked({"messages": [{"role": "user", "content": content} for content in contents]})
    assert [message["content"] for message in messages] == ["a?", "b?", ""]


def test_calls_of_tools_in_the_format_of_hermes() -> None:
    text = (
        'See: <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><tool_call>{broken}</tool_call>'
    )
    message = _assistant(text, ToolFormat("hermes"), "0")
    [call] = message["tool_calls"]
    assert (message["content"], call["function"]["name"]) == ("See: ", "add")
    assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}
    assert _assistant(text, None, "0") == {"role": "assistant", "content": text}
    function = {"name": "add", "arguments": '{"b":2, "a":1}'}
    returned = {"role": "assistant", "content": "See:", "tool_calls": [{"id": "other", "function": function}]}
    assert _normal(returned) == _normal(message)  # a client writes it in its own way


def post(url: str, key: str, body: bytes) -> tuple[int, str]:
    request = urllib.request.Request(f"{url}/chat/completions", body, {"Authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["error"]["message"]
