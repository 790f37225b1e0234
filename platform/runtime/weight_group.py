"""Weights from the process that learns straight into those that generate, by NCCL or gloo: one sends, others receive.

For rollouts on GPUs apart from the learner's, whose weights then never see main memory. The learner is rank 0. Nobody
keeps a copy on the way: a receiver that is started anew asks again. One that dies while it receives may leave the
sender waiting (NCCL) until the group's timeout. Not covered: several receivers at once, `rollout.sync: delta`.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_platform.errors import WorkerError
from rl_platform.records import Weights
from rl_platform.runtime.process_group import MEET_S, Meeting
from rl_platform.runtime.weights import TensorShape, shapes_of

SEND_S = 120.0  # longest time for one tensor


@dataclass(frozen=True)
class WeightGroup:
    """Where the processes of a group meet. `receiver`: whose group it is, of which there is one at a time."""

    receiver: str
    name: str
    address: str
    port: int
    world_size: int
    backend: str


@dataclass(frozen=True)
class WeightsOffer:
    """Published weights that are in another process, on `device` (cpu, cuda).

    address: of this process, for those who want to send something to it. fetch: a copy, through main memory. send:
    rank 0 joins the group, if it has not, and sends the tensors in order, one of those that share their memory; returns
    when all are sent.
    """

    version: int
    tensors: tuple[TensorShape, ...]
    device: str
    address: str
    fetch: Callable[[], Weights]
    send: Callable[[WeightGroup], None]

    @property
    def distinct(self) -> tuple[TensorShape, ...]:
        return tuple(tensor for tensor in self.tensors if tensor.same_as is None)

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.distinct)

    @property
    def buckets(self) -> int:
        return len(self.distinct)


def described(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """What a token says of weights that may be sent to a group."""
    return {"tensors": shapes_of(state), "device": next(iter(state.values())).device.type}


def call_together(receiver: str, address: str, world_size: int, backend: str) -> tuple[Meeting, WeightGroup]:
    """A new group, and the store at which its processes meet: it lives as long as the group does."""
    meeting = Meeting(address, world_size)
    return meeting, WeightGroup(receiver, f"weights-{uuid.uuid4().hex}", address, meeting.port, world_size, backend)


class WeightSender:
    """Rank 0 of the groups of all receivers."""

    def __init__(self) -> None:
        self._groups: dict[str, tuple[str, Any]] = {}

    def send(self, state: Mapping[str, Tensor], tensors: Sequence[TensorShape], group: WeightGroup) -> None:
        """Raises WorkerError if somebody does not receive."""
        try:
            joined = self._joined(group)
            for tensor in tensors:
                if tensor.same_as is None:
                    dist.broadcast(state[tensor.name].detach().contiguous(), 0, joined)
            if group.backend == "nccl":  # which sends after the call has returned
                torch.cuda.synchronize(state[tensors[0].name].device)
        except (RuntimeError, dist.DistError) as error:
            self._groups.pop(group.receiver, None)
            raise WorkerError(f"weights for {group.receiver} could not be sent: {error}") from error

    def _joined(self, group: WeightGroup) -> Any:
        name, joined = self._groups.get(group.receiver, ("", None))
        if name != group.name:
            if joined is not None:
                dist.destroy_process_group(joined)
            joined = join_as_sender(group)
            self._groups[group.receiver] = group.name, joined
        return joined


def join_as_sender(group: WeightGroup) -> Any:
    """torch has no public way to a group beside the default one; SGLang makes its end of it in this same way."""
    from torch.distributed import distributed_c10d as c10d

    wait = timedelta(seconds=MEET_S)
    store = dist.TCPStore(group.address, group.port, group.world_size, is_master=False, timeout=wait)
    joined, _ = c10d._new_process_group_helper(
        group.world_size,
        0,
        [],
        c10d.Backend(group.backend),
        dist.PrefixStore(group.name, store),
        group_name=group.name,
        timeout=timedelta(seconds=SEND_S),
    )
    c10d._world.pg_group_ranks[joined] = {rank: rank for rank in range(group.world_size)}
    return joined
