"""Reward servers that hang, die, or answer nonsense: they cost the samples they were asked for, and bounded time."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import date
from typing import Any

import pytest
from reward_parts import reward_server, scores
from waiting import HANG_S

from rl_platform.envs.reasoning.score import DIED, RAISED, TIMEOUT, Score
from rl_platform.envs.reasoning.servers import http_scorer
from rl_platform.envs.reasoning.servers.http_scorer import HttpScorer
from rl_platform.envs.reasoning.servers.reward_server import RewardServer
from rl_platform.envs.reasoning.verifiers import ScoreItem
from rl_platform.errors import ConfigError, Unreachable, WorkerDied

LIMIT = {"batch_size": 2, "num_workers": 1, "timeout_s": HANG_S, "retries": 2}
SHORT_S = 0.5  # where the server does not answer in time


def connected(url: str, timeout_s: float, **options: Any) -> HttpScorer:
    return HttpScorer(RewardServer(url, timeout_s), **options)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_scorer, "FIRST_PAUSE_S", 0.02)


@pytest.fixture
def connect(closes) -> Callable[..., HttpScorer]:
    return lambda url, **options: closes(connected(url, **(LIMIT | options)))


@pytest.fixture
def silent() -> Iterator[str]:
    """Takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/"


def items(*responses: str) -> list[ScoreItem]:
    return [ScoreItem(response, "question", "answer", {"level": 3}) for response in responses]


def ask(scorer: HttpScorer, *responses: str) -> list[Score]:
    return [future.result(HANG_S) for future in scorer.submit(items(*responses))]


def lengths(asked: list[dict[str, Any]]) -> tuple[int, str]:
    return scores(*(len(item["response"]) for item in asked))


def test_what_is_sent_and_what_comes_back(connect) -> None:
    seen: list[list[dict[str, Any]]] = []
    with reward_server(lambda asked: seen.append(asked) or lengths(asked)) as url:
        scorer = connect(url)
        assert [score.value for score in ask(scorer, "one", "seven", "\ud83dü")] == [3.0, 5.0, 2.0]
    assert seen[0] == []  # asked at the start, to see whether it is there
    sent = [item for request in seen[1:] for item in request]
    assert sent[0] == {"prompt": "question", "response": "one", "answer": "answer", "metadata": {"level": 3}}
    assert len(sent) == 3
    assert max(map(len, seen)) <= LIMIT["batch_size"]


def test_numbers_that_json_lacks_are_sent_as_null(connect) -> None:
    """Tables have NaN in their gaps, which servers refuse with all responses of the request."""
    seen: list[Any] = []
    with reward_server(lambda asked: seen.extend(asked) or lengths(asked)) as url:
        metadata = {"level": float("nan"), "bounds": [float("-inf"), 1.5], "when": date(2026, 1, 2)}
        [future] = connect(url).submit([ScoreItem("one", "question", "answer", metadata)])
        assert future.result(HANG_S).value == 3.0
    assert seen[0]["metadata"] == {"level": None, "bounds": [None, 1.5], "when": "2026-01-02"}


def test_no_more_requests_at_once_than_asked_for_and_no_fewer(connect) -> None:
    busy, most, both = 0, 0, threading.Barrier(2)
    lock = threading.Lock()

    def answer(asked: list[dict[str, Any]]) -> tuple[int, str]:
        nonlocal busy, most
        with lock:
            busy += 1
            most = max(most, busy)
        if asked:
            both.wait(HANG_S)
        with lock:
            busy -= 1
        return lengths(asked)

    with reward_server(answer) as url:
        assert all(score.valid for score in ask(connect(url, num_workers=2), *"abcdefgh"))
    assert most == 2


def test_the_queue_is_bounded(connect) -> None:
    gate = threading.Event()

    def answer(asked: list[dict[str, Any]]) -> tuple[int, str]:
        if asked:
            gate.wait(HANG_S)
        return lengths(asked)

    with reward_server(answer) as url:
        scorer = connect(url)
        room = LIMIT["batch_size"] * (http_scorer.WAITING_REQUESTS + 1)
        scorer.submit(items(*"x" * room))
        held = threading.Thread(target=scorer.submit, args=[items("late")])
        held.start()
        held.join(0.2)
        assert held.is_alive()
        gate.set()
        held.join(HANG_S)
        assert not held.is_alive()


@pytest.mark.parametrize(
    "wrong",
    [
        (500, "out of memory"),
        (503, "loading"),
        (429, "slower"),
        (200, "<html>"),
        (200, "[" * 100_000),
        (200, "[0.5, 0.5]"),
        scores(0.5),
        (200, json.dumps({"scores": "ab"})),
        (200, b"\xff\xfe{".decode("latin-1")),
        None,
    ],
)
def test_a_request_that_fails_is_made_again(connect, wrong) -> None:
    answers = [scores(), wrong, wrong, scores(1.0, 2.0), wrong, wrong, wrong]
    with reward_server(lambda asked: answers.pop(0)) as url:
        scorer = connect(url)
        assert [score.value for score in ask(scorer, "a", "b")] == [1.0, 2.0]
        lost = ask(scorer, "c", "d")
    assert answers == []
    assert [score.valid for score in lost] == [False, False]
    assert {score.reason for score in lost} == {DIED if wrong is None or wrong[0] == 503 else RAISED}


@pytest.mark.parametrize("status", [201, 302, 422])
def test_a_refusal_is_final(connect, status: int) -> None:
    answers = [scores(), (status, "no such field"), scores(1.0)]
    with reward_server(lambda asked: answers.pop(0)) as url:
        scorer = connect(url)
        (refused,) = ask(scorer, "a")
        assert (refused.valid, refused.reason) == (False, RAISED)
        assert f"status {status}: no such field" in refused.detail
        assert ask(scorer, "b")[0].value == 1.0


@pytest.mark.parametrize(
    "value", ["null", "NaN", "Infinity", "true", '"1.0"', "[1.0]", "1" + "0" * 400, "1e9", "-1e308"]
)
def test_a_score_that_is_no_finite_number_costs_its_own_response(connect, value: str) -> None:
    answers = [scores(), (200, f'{{"scores": [0.5, {value}]}}')]
    with reward_server(lambda asked: answers.pop(0)) as url:
        scorer = connect(url)
        good, bad = ask(scorer, "a", "b")
    assert (good.valid, good.value, bad.valid, bad.value) == (True, 0.5, False, 0.0)


def test_a_request_that_hangs_costs_its_own_responses(connect) -> None:
    hang = threading.Event()

    def answer(asked: list[dict[str, Any]]) -> tuple[int, str]:
        if any(item["response"] == "hang" for item in asked):
            hang.wait(HANG_S)
        return lengths(asked)

    with reward_server(answer) as url:
        scorer = connect(url, retries=0, batch_size=1, num_workers=2, timeout_s=4.0)
        stuck = scorer.submit(items("hang"))[0]
        assert all(score.valid for score in ask(scorer, "a", "b", "c"))
        assert not stuck.done()
        assert stuck.result(HANG_S).reason == TIMEOUT
        assert ask(scorer, "d")[0].valid  # others were answered meanwhile: the server is there
        hang.set()


def test_bytes_that_trickle_in_do_not_prolong_the_timeout() -> None:
    def trickle(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection, suppress(OSError):  # until the other side closes it
            while True:
                connection.sendall(b"H")
                time.sleep(0.1)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=trickle, args=[listening])
        thread.start()
        began = time.monotonic()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        with pytest.raises(Unreachable, match=r"did not answer within 0\.5 s \(reward\.timeout_s\)"):
            connected(url, **(LIMIT | {"timeout_s": SHORT_S, "retries": 0}))
        assert time.monotonic() - began > 0.4
        thread.join()


def test_a_server_that_dies_costs_the_retries_once_and_is_used_again_when_it_is_back(connect) -> None:
    with reward_server(lengths) as url:
        scorer = connect(url)
        port = int(url.split(":")[2].split("/")[0])
        assert ask(scorer, "a")[0].valid
    lost = ask(scorer, *"x" * 14)
    assert [score.reason for score in lost] == [DIED] * 14
    assert not ask(scorer, "y")[0].valid
    with reward_server(lengths, port):
        assert ask(scorer, "back")[0].value == 4.0


def test_a_server_that_hangs_does_not_hold_up_every_response(connect) -> None:
    """40 responses are 20 requests: with three tries each, 60 timeouts would pass."""
    hung, tries = threading.Event(), list[int]()

    def answer(asked: list[dict[str, Any]]) -> tuple[int, str]:
        if asked:
            tries.append(len(asked))
            hung.wait(HANG_S)
        return lengths(asked)

    with reward_server(answer) as url:
        scorer = connect(url)
        scorer._server._timeout_s = SHORT_S  # once it has greeted the server
        lost = ask(scorer, *"x" * 40)
        hung.set()
    assert {score.reason for score in lost} == {TIMEOUT}
    assert len(tries) < 20, "requests that wait are given up with one that was tried in vain"


def test_closing_waits_for_no_request(connect) -> None:
    asking, hung = threading.Event(), threading.Event()

    def answer(asked: list[dict[str, Any]]) -> tuple[int, str]:
        if asked:
            asking.set()
            hung.wait()
        return lengths(asked)

    with reward_server(answer) as url:
        scorer = connect(url)
        futures = scorer.submit(items(*"abcd"))
        asking.wait()
        scorer.close()  # the server answers after this
        hung.set()
    assert not futures[0].result(timeout=1).valid  # under way
    with pytest.raises(WorkerDied):
        futures[2].result(timeout=1)
    with pytest.raises(WorkerDied):
        scorer.submit(items("e"))


def test_no_server_at_the_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(Unreachable, match=r"ConnectionRefused.*\n.*start the server first"):
        connected(f"http://127.0.0.1:{port}/", **LIMIT)


def test_a_server_that_says_nothing_at_the_start(silent: str) -> None:
    with pytest.raises(Unreachable, match="did not answer within"):
        connected(silent, **(LIMIT | {"timeout_s": SHORT_S}))


@pytest.mark.parametrize("answer", [(404, "nothing here"), (200, "<html>"), scores(1.0)])
def test_something_else_at_the_address(answer) -> None:
    with reward_server(lambda asked: answer) as url, pytest.raises(ConfigError, match=r"reward\.url: http://127"):
        connected(url, **LIMIT)
