"""A judge behind chat completions: what it is asked, how its reply is read, and every way it can fail."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from reward_parts import post_server
from waiting import HANG_S

from rl_platform.config.schema.reward import Judge
from rl_platform.envs.reasoning.score import DIED, RAISED, TIMEOUT, Score
from rl_platform.envs.reasoning.servers import http_scorer
from rl_platform.envs.reasoning.servers.http_scorer import HttpScorer
from rl_platform.envs.reasoning.servers.judge import JudgeServer
from rl_platform.envs.reasoning.verifiers import ScoreItem
from rl_platform.errors import ConfigError, Unreachable

SECRET = "sk-very-secret"
PAGE = (Path(__file__).parents[3] / "docs" / "reasoning.md").read_text(encoding="utf-8")
OF_THE_DOCS = re.findall(r"^ +verdict: '(.+)' +#", PAGE, re.MULTILINE)[0]
ITEM = ScoreItem("it is {answer}", "1+1?", "2")
Reply = Callable[[dict[str, Any]], tuple[int, str] | None]


def completion(text: object, finish_reason: str = "stop") -> tuple[int, str]:
    message = {"role": "assistant", "content": text}
    return 200, json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": finish_reason}]})


class Chat:
    """Chat completions; `reply` makes status and body of a request."""

    url: str

    def __init__(self) -> None:
        self.reply: Reply = lambda request: completion("1")
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []

    def answer(self, request: dict[str, Any], key: str | None) -> tuple[int, str] | None:
        self.asked.append(request)
        self.keys.append(key)
        return self.reply(request)


@pytest.fixture
def chat() -> Iterator[Chat]:
    made = Chat()
    with post_server(made.answer, path="v1/chat/completions") as made.url:
        yield made


@pytest.fixture
def judge(chat: Chat, monkeypatch: pytest.MonkeyPatch, closes) -> Callable[..., HttpScorer]:
    """judge(verdict=...): a scorer by that server."""
    monkeypatch.setattr(http_scorer, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setenv("JUDGE_KEY", f" {SECRET}\n")

    def build(timeout_s: float = HANG_S, retries: int = 1, **options: Any) -> HttpScorer:
        section = {"url": chat.url, "model": "m", "template": "{question} | {response} | {answer}"} | options
        server = JudgeServer(Judge(**section), timeout_s)
        return closes(HttpScorer(server, batch_size=1, num_workers=2, retries=retries))

    return build


def score(scorer: HttpScorer) -> Score:
    return scorer.submit([ITEM])[0].result(HANG_S)


def test_what_the_judge_is_asked(chat: Chat, judge) -> None:
    scorer = judge(api_key_env="JUDGE_KEY", system_prompt="Be strict.", max_tokens=7, temperature=0.5)
    assert score(scorer) == Score(1.0)
    greeting, asked = chat.asked
    assert greeting["max_tokens"] == 1
    assert asked == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be strict."},
            {"role": "user", "content": "1+1? | it is {answer} | 2"},
        ],
        "temperature": 0.5,
        "max_tokens": 7,
    }
    assert chat.keys == [f"Bearer {SECRET}"] * 2


@pytest.mark.parametrize(
    ("verdict", "reply", "value"),
    [
        (None, " 0.5\n", 0.5),
        (None, "-3", -3.0),
        (r"Score: ([-0-9.]+)", "Score: 2? No.\nScore: 7.5", 7.5),
        (OF_THE_DOCS, "It is right. Score: 7.5.", 7.5),
        (OF_THE_DOCS, "Score: 8/10.", 8.0),
        (r"\[\[(\d+)\]\]", "Reasons.\n[[10]]", 10.0),
    ],
)
def test_numbers_in_replies(chat: Chat, judge, verdict: str | None, reply: str, value: float) -> None:
    chat.reply = lambda request: completion(reply)
    assert score(judge(verdict=verdict)) == Score(value)


@pytest.mark.parametrize(
    ("verdict", "answer", "detail"),
    [
        (None, completion("good"), "could not convert string to float: 'good': 'good'"),
        (None, completion("7 of 10"), "could not convert string to float: '7 of 10'"),
        (None, completion(""), "no verdict in it"),
        (None, completion(None), "no verdict in it"),
        (None, completion("nan"), "a reward must be a finite number"),
        (None, completion("1e9"), "at most 1e+06"),
        (r"Score: (\S+)", completion("I think", "length"), "cut at judge.max_tokens: no verdict in it: 'I think'"),
        (r"Score: (\S+)", completion("Score: high"), "could not convert"),
        (None, (200, "[]"), "something else than a chat completion: []"),
        (None, (200, '{"choices": []}'), "something else than a chat completion"),
        (None, (400, "no such model"), "status 400: no such model"),
        (None, (500, f"broken, {SECRET}"), "status 500: broken, ***"),
    ],
)
def test_replies_without_a_score_are_none(chat: Chat, judge, verdict, answer, detail: str) -> None:
    scorer = judge(verdict=verdict, api_key_env="JUDGE_KEY")
    chat.reply = lambda request: answer
    found = score(scorer)
    assert (found.valid, found.reason) == (False, RAISED)
    assert detail in found.detail
    assert SECRET not in found.detail


def test_what_passes_is_asked_again(chat: Chat, judge) -> None:
    scorer = judge()
    answers = iter([(503, "starting"), completion("0.25")])
    chat.reply = lambda request: next(answers)
    assert score(scorer) == Score(0.25)


def test_a_judge_that_falls_silent(chat: Chat, judge) -> None:
    scorer = judge(retries=0)
    scorer._server._timeout_s = 0.3  # once it has greeted the server
    gate = threading.Event()
    chat.reply = lambda request: gate.wait(HANG_S) and None
    assert score(scorer).reason == TIMEOUT
    gate.set()
    assert score(scorer).reason == DIED


def test_the_start_checks_key_and_server(chat: Chat, judge, monkeypatch: pytest.MonkeyPatch) -> None:
    chat.reply = lambda request: (401, f"wrong key {SECRET}")
    with pytest.raises(ConfigError, match=r"reward\.judge\.url: .* status 401: wrong key \*\*\*"):
        judge(api_key_env="JUDGE_KEY")
    with pytest.raises(ConfigError, match=r"reward\.judge\.api_key_env: this environment variable holds no key"):
        judge(api_key_env="NO_SUCH_KEY")
    monkeypatch.setenv("JUDGE_KEY", "a\nb")
    with pytest.raises(ConfigError, match="not printable ASCII") as caught:
        judge(api_key_env="JUDGE_KEY")
    assert "a\nb" not in str(caught.value)
    with pytest.raises(Unreachable, match="does not answer"):
        judge(url="http://127.0.0.1:9/v1/chat/completions", retries=0)
