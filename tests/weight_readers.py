"""What processes do that read weights, for tests of those who send them; in a module that a new process can import."""

from __future__ import annotations

import pickle
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from rl_platform.runtime.weight_group import WeightGroup


def read_shared_weights(line: Connection) -> None:
    """Takes copies of the tensors behind the handles that come, and says what it has; until it gets nothing."""
    while parts := line.recv():
        line.send({name: tensor.clone().numpy() for handles in parts for name, tensor in pickle.loads(handles)})


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
