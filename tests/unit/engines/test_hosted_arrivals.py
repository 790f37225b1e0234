"""Requests that arrive while others are generated. A small program stands in for a hosted engine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from rl_platform.engines.rollout.base import Completion, Request
from rl_platform.engines.rollout.hosted.hosted_engine import EngineProcess, HostedEngine
from rl_platform.errors import Problem
from rl_platform.records import SamplingParams, Weights

# The start of an engine's program: `send` answers, and `first` says whether this is the engine's first process.
START = """
import json, os, sys
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[1]))
connection.recv_bytes()
def send(number, kind, value):
    connection.send_bytes(json.dumps((number, kind, value)).encode())
first = not os.path.exists({folder!r} + "/lives")
open({folder!r} + "/lives", "a").close()
send(0, "answer", os.getpid())
"""

# Answers two requests, the last one first. With `dies`, its first process ends at the second call.
PROGRAM = (
    START
    + """
calls = []
while True:
    number, operation, arguments = json.loads(connection.recv_bytes())
    if operation != "generate":
        send(number, "answer", None)
        continue
    calls.append((number, arguments[0]))
    print(*(request["index"] for request in arguments[0]), flush=True)
    if first and {dies!r} and len(calls) == 2:
        os._exit(1)
    if sum(len(requests) for _, requests in calls) < 2:
        continue
    for number, requests in reversed(calls):
        for request in reversed(requests):
            send(number, "item", (request["index"], request["token_ids"], [0.0], "stop", None))
        send(number, "answer", None)
"""
)


class StandIn(HostedEngine):
    """An engine whose process is `program`."""

    engine = "stand-in"

    def __init__(self, program: str, log: Path) -> None:
        self.program, self.log = program, log
        super().__init__("rollout[0]", {}, ())

    def _new_process(self) -> EngineProcess:
        return EngineProcess(self.program, None, {}, self.log)

    def _load(self) -> None: ...

    def _recognised(self, log: str) -> Problem | None:
        return None

    def _reachable(self, weights: Weights) -> Weights:  # type: ignore[override]
        return weights


class Arriving:
    """Returns a first request, and a second one while the first is generated."""

    longest = 8

    def __init__(self) -> None:
        self.left = [Request(0, (10,), 0), Request(1, (11,), 0)]
        self.idle: list[bool] = []

    def take(self, idle: bool) -> list[Request]:
        self.idle.append(idle)
        return [self.left.pop(0)] if self.left else []


@pytest.mark.parametrize("dies", [False, True])
def test_a_request_that_arrives_waits_for_no_earlier_one(tmp_path: Path, dies: bool) -> None:
    program = PROGRAM.format(folder=str(tmp_path), dies=dies)
    arrivals, found = Arriving(), list[Completion]()
    with closing(StandIn(program, tmp_path / "log")) as engine:
        engine.generate((), SamplingParams(1), found.append, arrivals)
    assert [(completion.index, completion.token_ids) for completion in found] == [(1, (11,)), (0, (10,))]
    assert arrivals.idle[:2] == [True, False]
    assert arrivals.idle[-1], "at the end it asks for more while nothing is generated"
    assert engine.restarts == dies
    asked = (tmp_path / "log").read_text().split("\n")[:-1]
    assert asked == (["0", "1", "0 1"] if dies else ["0", "1"]), "after a death, all that have no answer"


# Its first process answers one request of two and dies at `abort`. The next one answers all.
ABORTED = (
    START
    + """
while True:
    number, operation, arguments = json.loads(connection.recv_bytes())
    if operation == "abort" and first:
        os._exit(1)
    if operation != "generate":
        send(number, "answer", None)
        continue
    for request in arguments[0][: 1 if first else None]:
        send(number, "item", (request["index"], request["token_ids"], [0.0], "stop", None))
    if not first:
        send(number, "answer", None)
"""
)


def test_an_engine_that_dies_while_it_is_told_to_abort_is_started_again(tmp_path: Path, closes) -> None:
    engine, found = closes(StandIn(ABORTED.format(folder=str(tmp_path)), tmp_path / "log")), list[int]()

    def finished(completion: Completion) -> None:
        found.append(completion.index)
        if len(found) == 1:
            engine.abort()

    engine.generate([Request(0, (10,), 0), Request(1, (11,), 0)], SamplingParams(1), finished)
    assert (found, engine.restarts) == ([0, 1], 1)


def test_two_threads_that_hear_of_one_death_start_one_engine(tmp_path: Path, closes) -> None:
    engine = closes(StandIn(PROGRAM.format(folder=str(tmp_path), dies=False), tmp_path / "log"))
    dead = engine._process
    dead.kill()
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda _: engine._restart(dead, "it died"), range(2)))
    assert engine.restarts == 1
    assert engine._process is not dead


# It answers the first request of a call, and the others at `abort`.
SLOW = (
    START
    + """
generating = None
while True:
    number, operation, arguments = json.loads(connection.recv_bytes())
    print(operation, *([] if operation == "generate" else arguments), flush=True)
    if operation == "generate":
        request, generating = arguments[0][0], number
        send(number, "item", (request["index"], request["token_ids"], [0.0], "stop", None))
    else:
        if generating is not None:
            send(generating, "answer", None)
        generating = None
        send(number, "answer", None)
"""
)


def test_a_call_that_fails_is_ended_in_the_engine(tmp_path: Path) -> None:
    def fails(completion: Completion) -> None:
        raise OSError(f"no place for {completion.index}")

    requests = [Request(0, (10,), 0), Request(1, (11,), 0)]
    with closing(StandIn(SLOW.format(folder=str(tmp_path)), tmp_path / "log")) as engine:
        with pytest.raises(OSError, match="no place for 0"):
            engine.generate(requests, SamplingParams(1), fails)
        engine.abort()  # waits for the answer
    assert (tmp_path / "log").read_text().split("\n")[:2] == ["generate", "abort 1"]
