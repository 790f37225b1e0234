"""A process that has weights and sends them to process groups, for tests of those who receive."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import pytest
from torch import Tensor

from rl_platform.errors import WorkerError
from rl_platform.runtime.weights.group import WeightGroup, WeightSender, WeightsOffer, offer_fields


class SendingProcess:
    """Ends with the test process, or by `kill`."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._line, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self.groups: list[WeightGroup] = []  # that were sent to

    def offer(self, state: Mapping[str, Tensor], version: int) -> WeightsOffer:
        """The weights as those of another process; that they are not fetched through main memory is part of it."""
        tensors = offer_fields(state)["tensors"]

        def send(group: WeightGroup) -> Sequence[bytes]:
            self.groups.append(group)
            self._line.send_bytes(pickle.dumps((dict(state), tensors, group)))
            found = self._line.recv()
            if isinstance(found, WorkerError):
                raise found
            return list(found)

        return WeightsOffer(version, tensors, "cpu", "127.0.0.1", fetch=lambda: pytest.fail("fetched"), send=send)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def _serve(line: Connection) -> None:
    sender = WeightSender()
    found: Any
    while True:
        try:
            state, tensors, group = pickle.loads(line.recv_bytes())
        except EOFError:
            return
        try:
            found = sender.send(state, tensors, group)
        except WorkerError as error:
            found = error
        line.send(found)
