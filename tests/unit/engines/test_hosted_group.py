"""Hosted engines with a small program in their place: a weight group whose one side fails, the folder of an engine."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from waiting import until

from rl_platform.engines.rollout.hosted.hosted_engine import HostedEngine
from rl_platform.engines.rollout.sglang import sglang_client as hosted
from rl_platform.engines.rollout.sglang.program import EngineHost, SGLangSetup
from rl_platform.engines.rollout.sglang.sglang_client import SGLangEngine
from rl_platform.engines.rollout.vllm import client
from rl_platform.engines.rollout.vllm.client import VLLMEngine, VLLMSetup
from rl_platform.errors import WorkerError
from rl_platform.records import Weights
from rl_platform.runtime.weights.group import JoinRequest, WeightGroup, WeightsOffer, offer_fields

STATE = {"backbone.norm.weight": torch.ones(3), "head.weight": torch.zeros(2, 3)}
# Answers to everything and writes down what was asked; in its first life it dies when weights are to come.
PROGRAM = """
import json, os, sys
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[1]))
connection.recv_bytes()
def answer(number, value):
    connection.send_bytes(json.dumps((number, "answer", value)).encode())
lives = {folder!r} + "/lives"
first = not os.path.exists(lives)
open(lives, "a").close()
answer(0, os.getpid())
while True:
    number, operation, arguments = json.loads(connection.recv_bytes())
    print(operation, *arguments, flush=True)
    if operation == "load_from_group" and first and {dies!r}:
        os._exit(1)
    answer(number, None)
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closes) -> Any:
    """start(dies=True): an engine, closed at the end, and the file with what it was asked."""

    def run(*, dies: bool) -> tuple[SGLangEngine, Path]:
        monkeypatch.setattr(hosted, "PROGRAM", PROGRAM.format(folder=str(tmp_path), dies=dies))
        monkeypatch.setattr(hosted, "DEATH_S", 1.0)
        setup = SGLangSetup({}, "cpu", 2, "float32", 4, 64, 0.1, seed=0)
        return closes(SGLangEngine("rollout[0]", setup, (), {}, tmp_path / "log")), tmp_path / "log"

    return run


class Sender:
    """Opens groups for the engine and `others`, sends by `send`. requests: for groups; groups: that were sent to."""

    def __init__(self, send: Callable[[WeightGroup], None], others: Sequence[str] = ()) -> None:
        self._send, self._others = send, others
        self.requests: list[JoinRequest] = []
        self.groups: list[WeightGroup] = []

    def offer(self) -> WeightsOffer:
        tensors = offer_fields(STATE, {})["tensors"]
        return WeightsOffer(7, tensors, "cpu", lambda: pytest.fail("fetched"), self._join, self._sent)

    def _join(self, request: JoinRequest) -> WeightGroup:
        self.requests.append(request)
        others = () if request.alone else self._others
        ranks = (request.receiver, 1), *((other, 3 + number) for number, other in enumerate(others))
        name = request.group or f"weights-{len(self.requests)}"
        return WeightGroup(name, "127.0.0.1", 4000, 3 + len(others), "gloo", ranks, False, 2**20, len(self.requests))

    def _sent(self, group: WeightGroup) -> list[bytes]:
        self.groups.append(group)
        self._send(group)
        return []


def test_it_wakes_in_stages_around_new_weights(start: Any) -> None:
    """The memory of keys and values is allocated after the weights are loaded."""
    engine, log = start(dies=False)
    engine.receive(Weights(0, STATE))
    engine.offload()
    engine.receive(Weights(1, STATE))
    told = [line.split()[:2] for line in log.read_text().splitlines()]
    assert [operation for operation, *_ in told] == ["load", "sleep", "wake", "load", "wake"]
    assert [stage for operation, *stage in told if operation == "wake"] == [["weights"], ["cache"]]


@pytest.mark.parametrize("idle", [True, False])
def test_sglang_releases_its_memory_after_its_scheduler_is_idle(idle: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Manager:
        async def flush_cache(self, timeout_s: float) -> Any:
            calls.append(f"flush within {timeout_s:g} s")
            return SimpleNamespace(success=idle, message="2 requests run")

        async def release_memory_occupation(self, *_: object) -> None:
            calls.append("release")

    messages = ModuleType("sglang.srt.managers.io_struct")
    messages.ReleaseMemoryOccupationReqInput = object  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["sglang.srt.managers"].io_struct = messages  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, messages.__name__, messages)
    host = EngineHost.__new__(EngineHost)
    host.manager = Manager()
    if idle:
        asyncio.run(host.sleep(1))
    else:
        with pytest.raises(RuntimeError, match="not idle 60 s after its last answer: 2 requests run"):
            asyncio.run(host.sleep(1))
    assert calls == ["flush within 60 s", "release"][: 1 + idle]


def test_stacked_experts_are_fetched_because_sglang_reads_them_one_by_one(start: Any) -> None:
    engine, _ = start(dies=False)
    stacked = {"backbone.layers.0.mlp.experts.down_proj": torch.ones(2, 3, 4)}
    weights = Weights(7, stacked)
    fields = offer_fields(stacked, {})["tensors"]
    assert engine._reachable(WeightsOffer(7, fields, "cpu", lambda: weights, pytest.fail, pytest.fail)) is weights


def test_an_engine_that_dies_while_it_receives_is_started_again_with_a_group_of_its_own(start: Any) -> None:
    engine, log = start(dies=True)

    def send(group: WeightGroup) -> None:
        if len(sender.groups) == 1:
            raise WorkerError("connection closed by peer")

    sender = Sender(send, others=["rollout[1]"])
    engine.receive(sender.offer())
    assert (engine.version, engine.restarts) == (7, 1)
    assert [(one.receiver, one.ranks, one.device, one.alone) for one in sender.requests] == [
        ("rollout[0]", 2, "cpu", False),
        ("rollout[0]", 2, "cpu", True),
    ]
    asked = log.read_text().splitlines()
    assert [line.split()[0] for line in asked] == ["join", "load_from_group"] * 2
    assert "model.norm.weight" in asked[-1], "by the names of a Hugging Face folder"
    engine.receive(sender.offer())
    assert sender.requests[-1].group == sender.groups[1].name, "one group for all updates"
    assert [line.split()[0] for line in log.read_text().splitlines()[4:]] == ["load_from_group"]


def test_an_engine_whose_neighbour_dies_requests_the_weights_again_alone(start: Any) -> None:
    """It may have half of them, so it is started again."""
    engine, _ = start(dies=False)

    def send(group: WeightGroup) -> None:
        if len(group.receivers) > 1:
            raise WorkerError("connection closed by peer")

    sender = Sender(send, others=["rollout[1]"])
    engine.receive(sender.offer())
    assert (engine.version, engine.restarts) == (7, 1)
    assert [request.alone for request in sender.requests] == [False, True]


@pytest.mark.parametrize("failure", [WorkerError("weights were replaced"), ValueError("weights were replaced")])
def test_a_sender_that_fails_leaves_no_engine_with_half_of_its_weights(start: Any, failure: Exception) -> None:
    engine, _ = start(dies=False)

    def send(group: WeightGroup) -> None:
        raise failure

    with pytest.raises(type(failure), match="were replaced"):
        engine.receive(Sender(send).offer())
    assert engine._process.child.ended


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_the_folder_of_an_engine_goes_with_a_parent_that_is_killed(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closes, name: str
) -> None:
    if name == "sglang":
        engine: HostedEngine = start(dies=False)[0]
    else:
        monkeypatch.setattr(client, "PROGRAM", PROGRAM.format(folder=str(tmp_path), dies=False))
        setup = VLLMSetup(
            {"num_attention_heads": 2, "hidden_size": 8, "num_hidden_layers": 1}, 1, "float32", 4, 64, 0.1, 0
        )
        engine = closes(VLLMEngine("rollout[0]", setup, (), {}, tmp_path / "log"))
    folder = Path(engine._folder.name)
    assert (folder / "config.json").exists()
    guarded = engine._process.child._process.stdin
    assert guarded is not None
    guarded.close()  # as the kernel does when a process dies
    until(lambda: not folder.exists())
