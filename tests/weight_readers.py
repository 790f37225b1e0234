"""What processes do that read weights, for tests of those who send them; in a module that a new process can import."""

from __future__ import annotations

import pickle
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from rl_platform.engines.rollout.sglang.shared_weights import load
from rl_platform.runtime.weights.group import WeightGroup


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
    """Rank 1, as SGLang's processes are: for each list of (shape, type) the tensors that arrive; None: dies."""
    wait = timedelta(seconds=60)
    store = dist.TCPStore(group.address, group.port, group.world_size, is_master=False, timeout=wait)
    meeting = dist.PrefixStore(group.name, store)
    backend = c10d.Backend(group.backend)
    joined, _ = c10d._new_process_group_helper(2, 1, [], backend, meeting, group_name=group.name, timeout=wait)
    c10d._world.pg_group_ranks[joined] = {0: 0, 1: 1}
    line.send("joined")
    while (wanted := line.recv()) is not None:
        found = [torch.empty(shape, dtype=dtype) for shape, dtype in wanted]
        for tensor in found:
            dist.broadcast(tensor, 0, joined)
        line.send([tensor.float().tolist() for tensor in found])
