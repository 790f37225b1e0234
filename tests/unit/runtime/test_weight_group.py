"""Weights by a process group: a real one, of two processes."""

from __future__ import annotations

import multiprocessing
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rl_platform.errors import WorkerError
from rl_platform.runtime.weight_group import WeightGroup, WeightSender, call_together, described

pytestmark = pytest.mark.timeout(120, method="thread")  # who waits in a collective hears no signal
HEAD = torch.arange(12.0).view(3, 4)
STATE = {"head": HEAD, "half": torch.ones(5, dtype=torch.bfloat16), "turned": HEAD.T.clone().T, "tied": HEAD}


def receiver(group: WeightGroup, line: Connection) -> None:
    """Rank 1, as SGLang's processes are: for each list of (shape, type) the tensors that arrive; None: dies."""
    from torch.distributed import distributed_c10d as c10d

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


@pytest.fixture
def other() -> Any:
    """The group, and the line to the process that is its other rank."""
    meeting, group = call_together("rollout[0]", "127.0.0.1", 2, "gloo")
    context = multiprocessing.get_context("spawn")
    line, theirs = context.Pipe()
    process = context.Process(target=receiver, args=(group, theirs))
    process.start()
    theirs.close()
    yield group, line, process
    process.kill()
    process.join()
    del meeting


def test_every_tensor_arrives_once_and_in_order(other: Any) -> None:
    group, line, _ = other
    sender, tensors = WeightSender(), described(STATE)["tensors"]
    wanted = [(tensor.shape, tensor.dtype) for tensor in tensors if tensor.same_as is None]
    assert len(wanted) == 3, "tied weights are sent once"
    for factor in (1, 2):  # the second time in the group that is there
        state = {name: tensor * factor for name, tensor in STATE.items()} | {"tied": None}
        line.send(wanted)
        sender.send(state, tensors, group)
        if factor == 1:
            assert line.recv() == "joined"
        assert line.recv() == [state[name].float().tolist() for name in ("head", "half", "turned")]


def test_a_receiver_that_dies_is_told(other: Any) -> None:
    group, line, process = other
    sender, tensors = WeightSender(), described(STATE)["tensors"]
    line.send([(tensor.shape, tensor.dtype) for tensor in tensors if tensor.same_as is None])
    sender.send(STATE, tensors, group)
    process.kill()
    process.join()
    large = {"head": torch.zeros(2**22)}  # more than the system keeps on the way
    with pytest.raises(WorkerError, match=r"weights for rollout\[0\] could not be sent"):
        sender.send(large, described(large)["tensors"], group)
