"""What processes do that read weights, for tests of those who send them; in a module that a new process can import."""

from __future__ import annotations

import itertools
import os
import pickle
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from weight_senders import Learner

from rl_platform.engines.rollout.sglang.shared_weights import load
from rl_platform.errors import WorkerError
from rl_platform.runtime.weights import group as weight_group
from rl_platform.runtime.weights.group import WeightGroup, WeightReceiver, join
from rl_platform.runtime.weights.weight_transfer import checksum


class Copies:
    """A model that takes copies of what it is to load."""

    def __init__(self) -> None:
        self.state: dict[str, np.ndarray] = {}

    def load_weights(self, named: list[tuple[str, torch.Tensor]]) -> None:
        self.state |= {name: tensor.clone().numpy() for name, tensor in named}


def read_shared_weights(line: Connection) -> None:
    """Loads the tensors behind the handles that come; says what it has, and how many pieces of shared memory it still
    has mapped. Until it gets nothing."""
    while handles := line.recv():
        model = Copies()
        load(model, pickle.loads(handles))
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
        line.send((model.state, maps.count("/dev/shm/torch_")))


def read_from_group(group: WeightGroup, line: Connection) -> None:
    """Rank 1, as SGLang's processes are: for each list of sizes the buckets that arrive, as bytes; None: dies."""
    joined = join(group, 1)
    line.send("joined")
    while (sizes := line.recv()) is not None:
        found = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        for bucket in found:
            dist.broadcast(bucket, 0, joined)
        line.send([bucket.numpy().tobytes() for bucket in found])


def receive_in_turn(learner: Learner, label: str, line: Connection) -> None:
    """A rollout: for each (state, version, receivers, dies) what it received, or the text of a failure.

    dies: it ends itself when so many buckets have arrived; None: it does not.
    """
    receiver = WeightReceiver(label, torch.device("cpu"))
    while (asked := line.recv()) is not None:
        state, version, receivers, dies = pickle.loads(asked)
        weight_group.checksum = checksum if dies is None else partial(_dying, itertools.count(1), dies)
        own = {name: torch.full_like(tensor, -1) for name, tensor in state.items()}
        try:
            receiver.receive(learner.offer(state, version, receivers), own)
        except WorkerError as error:
            line.send_bytes(pickle.dumps(str(error)))
        else:
            line.send_bytes(pickle.dumps((own, [group.receivers for group in learner.groups])))


def _dying(count: Iterator[int], dies: int, bucket: torch.Tensor) -> bytes:
    if next(count) == dies:
        os._exit(1)
    return checksum(bucket)
