"""A process that has weights and sends them to process groups, for tests of those who receive."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import pytest
from torch import Tensor

from rl_platform.errors import WorkerError
from rl_platform.records import Weights
from rl_platform.runtime.ray.publications import Publications
from rl_platform.runtime.weights import group as weight_group
from rl_platform.runtime.weights.group import JoinRequest, WeightGroup, WeightsOffer, offer_fields
from rl_platform.runtime.weights_token import WeightsToken

State = Mapping[str, Tensor]


def forks() -> Any:
    """Returns a context whose processes are forks of one that has imported what they call."""
    context = multiprocessing.get_context("forkserver")
    # modules of tests are not on that process's path
    modules = "runtime.ray.publications", "runtime.weights.group", "engines.rollout.sglang.shared_weights"
    context.set_forkserver_preload(["pytest", *(f"rl_platform.{name}" for name in modules)])
    return context


@dataclass
class Learner:
    """The address of a process that sends. Every process that has it makes offers. groups: that were sent to."""

    address: Any
    groups: list[WeightGroup] = field(default_factory=list)

    def offer(self, state: State, version: int, receivers: int = 1) -> WeightsOffer:
        """The weights as those of another process; that they are not fetched through main memory is part of it."""
        state = {name: tensor.clone() for name, tensor in state.items()}  # a pickle forgets which share their memory
        ask = partial(self._ask, state, version, receivers)
        fields = offer_fields(state, {})
        return WeightsOffer(version, fields["tensors"], "cpu", lambda: pytest.fail("fetched"), ask, ask)

    def _ask(self, state: State, version: int, receivers: int, request: JoinRequest | WeightGroup) -> Any:
        if isinstance(request, WeightGroup):
            self.groups.append(request)
        with Client(self.address) as line:
            line.send_bytes(pickle.dumps((state, version, receivers, request)))
            found = pickle.loads(line.recv_bytes())
        if isinstance(found, WorkerError):
            raise found
        return found


class SendingProcess(Learner):
    """Ends with the test process, or by `kill`."""

    def __init__(self, bucket: int = weight_group.BUCKET) -> None:
        context = forks()
        line, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, bucket), daemon=True)
        self._process.start()
        theirs.close()
        super().__init__(line.recv())

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


class _Transport:
    def address(self) -> str:
        return "127.0.0.1"


class _Sender:
    """The publications of a host with one rank, whose calls run one after the other."""

    def __init__(self) -> None:
        self._publications: Any = Publications("host0", _Transport())  # type: ignore[arg-type]
        self._tokens: dict[int, WeightsToken] = {}
        self._publishing = threading.Lock()
        self._rank = ThreadPoolExecutor(1)

    def answer(self, state: State, version: int, receivers: int, request: JoinRequest | WeightGroup) -> object:
        with self._publishing:
            if version not in self._tokens:
                self._tokens[version] = self._publications.publish(Weights(version, dict(state), offered=True))
        token = replace(self._tokens[version], receivers=receivers)
        try:
            return self._publications.export(token, "group", request, self._in_turn)
        except WorkerError as error:
            return error

    def _in_turn(self, _: str, function: Callable[[], object]) -> Future[object]:
        return self._rank.submit(function)


def _serve(line: Connection, bucket: int) -> None:
    weight_group.BUCKET = bucket
    sender = _Sender()
    with Listener(("127.0.0.1", 0)) as listener:
        line.send(listener.address)
        while True:
            threading.Thread(target=_answer, args=(sender, listener.accept()), daemon=True).start()


def _answer(sender: _Sender, line: Connection) -> None:
    with line:
        line.send_bytes(pickle.dumps(sender.answer(*pickle.loads(line.recv_bytes()))))
