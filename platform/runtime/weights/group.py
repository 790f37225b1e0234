"""Published weights sent by a process group (NCCL or gloo) from the learner's process to those that generate.

For rollouts on GPUs apart from the learner's: the weights are never copied to main memory. The learner is rank 0. There
is no copy on the way, so a receiver that is started anew requests them again. If a receiver dies meanwhile, the sender
may wait (NCCL) until the group's timeout. Not covered: several receivers at once, `rollout.sync: delta`.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_platform.errors import WorkerError
from rl_platform.records import Weights
from rl_platform.runtime.process_group import RENDEZVOUS_S, Rendezvous
from rl_platform.runtime.weights.weight_transfer import Ask, TensorShape, WeightsToken, checksum, shapes_of

SEND_S = 120.0  # longest time for one tensor
CPU = "cpu"


@dataclass(frozen=True)
class WeightGroup:
    """The rendezvous of a group. `receiver`: its owner, which has one group at a time; `checked`: the sender returns a
    checksum of every tensor."""

    receiver: str
    name: str
    address: str
    port: int
    world_size: int
    backend: str
    checked: bool = False


@dataclass(frozen=True)
class WeightsOffer:
    """Published weights that are in another process, on `device` (as `place_of` names it).

    address: of this process, for the sender. fetch: a copy, through main memory. send:
    rank 0 joins the group, if it has not, and sends the tensors in order, one of those that share their memory; returns
    when all are sent, with their checksums if the group is checked.
    """

    version: int
    tensors: tuple[TensorShape, ...]
    device: str
    address: str
    fetch: Callable[[], Weights]
    send: Callable[[WeightGroup], Sequence[bytes]]

    @property
    def distinct(self) -> tuple[TensorShape, ...]:
        return tuple(tensor for tensor in self.tensors if tensor.same_as is None)

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.distinct)

    @property
    def buckets(self) -> int:
        return len(self.distinct)

    def reaches(self, devices: Iterable[torch.device]) -> bool:
        """Whether a group can bring them there: gloo's processes are on CPUs, NCCL's on a GPU of its own each."""
        places = {place_of(device) for device in devices}
        return places == {CPU} if self.device == CPU else not places & {CPU, self.device}


def reachable(weights: Weights | WeightsOffer, devices: Iterable[torch.device]) -> Weights | WeightsOffer:
    """Weights that are offered by a group which does not reach these devices are fetched; all others are returned."""
    if isinstance(weights, WeightsOffer) and not weights.reaches(devices):
        return weights.fetch()
    return weights


def place_of(device: torch.device) -> str:
    """`cpu`, or the UUID of a GPU: every process numbers those that it sees."""
    return CPU if device.type == CPU else str(torch.cuda.get_device_properties(device).uuid)


def offer_fields(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """The fields of a token for weights that may be sent by a group."""
    return {"tensors": shapes_of(state), "device": place_of(next(iter(state.values())).device)}


def open_group(
    receiver: str, address: str, world_size: int, device: torch.device | str, checked: bool = False
) -> tuple[Rendezvous, WeightGroup]:
    """A new group for tensors on a kind of `device`, and its rendezvous, which must live as long."""
    rendezvous = Rendezvous(address, world_size)
    backend = "gloo" if torch.device(device).type == CPU else "nccl"
    name = f"weights-{uuid.uuid4().hex}"
    return rendezvous, WeightGroup(receiver, name, address, rendezvous.port, world_size, backend, checked)


class WeightSender:
    """Rank 0 of the groups of all receivers."""

    def __init__(self) -> None:
        self._groups: dict[str, tuple[str, dist.ProcessGroup]] = {}

    def send(self, state: Mapping[str, Tensor], tensors: Sequence[TensorShape], group: WeightGroup) -> list[bytes]:
        """Sends the tensors; returns checksums if the group is checked. Raises WorkerError if a receiver fails."""
        checksums = []
        try:
            joined = self._joined(group)
            for tensor in tensors:
                if tensor.same_as is None:
                    whole = state[tensor.name].detach().contiguous()
                    dist.broadcast(whole, 0, joined)
                    checksums += [checksum(whole)] if group.checked else []
            if group.backend == "nccl":  # which sends after the call has returned
                torch.cuda.synchronize(state[tensors[0].name].device)
        except (RuntimeError, dist.DistError) as error:
            self._leave(group.receiver)
            raise WorkerError(f"weights for {group.receiver} could not be sent: {error}") from error
        return checksums

    def _joined(self, group: WeightGroup) -> dist.ProcessGroup:
        name, joined = self._groups.get(group.receiver, ("", None))
        if name != group.name:
            self._leave(group.receiver)
            joined = join(group, 0)
            self._groups[group.receiver] = group.name, joined
        return joined

    def _leave(self, receiver: str) -> None:
        _, joined = self._groups.pop(receiver, ("", None))
        if joined is not None:
            leave(joined)


class Membership:
    """Rank 1 of one group. If either rank leaves, collectives of the other one fail."""

    def __init__(self, label: str, address: str, device: torch.device) -> None:
        self._rendezvous, self.group = open_group(label, address, 2, device, checked=True)
        self._lock = threading.Lock()
        self._joined: dist.ProcessGroup | None = None
        self.left = False

    def joined(self) -> dist.ProcessGroup:
        """Waits for the other side at the first time. Raises WorkerError if this one has left meanwhile."""
        if self._joined is None:
            joined = join(self.group, 1)
            with self._lock:
                self._joined = joined
            if self.left:
                self.leave()
                raise WorkerError(f"{self.group.receiver} waits for these weights no more")
        return self._joined

    def leave(self) -> None:
        with self._lock:
            self.left, joined, self._joined = True, self._joined, None
        if joined is not None:
            leave(joined)


class WeightReceiver:
    """Takes tensors of `device` from one sender at a time; `label`: whose they are."""

    def __init__(self, label: str, device: torch.device) -> None:
        self._label, self._device = label, device
        self._membership: Membership | None = None

    def receive(self, offer: WeightsOffer, own: Mapping[str, Tensor]) -> None:
        """Writes the weights over `own`. Raises WorkerError unless all of it arrived as it was sent; `own` is no
        version at all then."""
        if self._membership is None or self._membership.left:
            self._membership = Membership(self._label, offer.address, self._device)
        membership, arriving = self._membership, Future[list[bytes]]()
        threading.Thread(target=self._take, args=(offer, membership, own, arriving), daemon=True).start()
        try:
            sent = offer.send(membership.group)
            arrived = arriving.result(SEND_S)
        except BaseException:
            membership.leave()  # ends collectives that still wait in the group
            raise
        for tensor, sum_sent, sum_arrived in zip(offer.distinct, sent, arrived, strict=True):
            if sum_arrived != sum_sent:
                raise WorkerError(
                    f"weights version {offer.version} arrived damaged: the checksum of {tensor.name} differs"
                )

    def _take(
        self, offer: WeightsOffer, membership: Membership, own: Mapping[str, Tensor], arriving: Future[list[bytes]]
    ) -> None:
        checksums = []
        try:
            for tensor in offer.distinct:
                target = own[tensor.name].detach()
                straight = target.dtype == tensor.dtype and target.is_contiguous()
                arrived = target if straight else torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
                dist.broadcast(arrived, 0, membership.joined())  # no other reference: its connections close with it
                checksums.append(checksum(arrived))
                if not straight:
                    target.copy_(arrived)
            arriving.set_result(checksums)
        except BaseException as error:
            membership.leave()
            arriving.set_exception(error)


class GroupTransfer:
    """The sender's side: `WeightSender`. The receiver's side is an offer, and `WeightReceiver`.

    address: of this process, for groups that are opened here. fetch: a copy of the weights by another transfer.
    """

    def __init__(self, address: Callable[[], str], fetch: Callable[[WeightsToken], Weights]) -> None:
        self._address, self._fetch = address, fetch
        self._sender = WeightSender()

    def publish(self, token: WeightsToken, state: Mapping[str, Tensor], request: WeightGroup) -> list[bytes]:
        return self._sender.send(state, token.tensors or (), request)

    def receive(self, token: WeightsToken, ask: Ask) -> WeightsOffer | None:
        """What a rollout needs to open a group; None if the weights are not offered to one."""
        if token.tensors is None:
            return None
        fetch = partial(self._fetch, token)
        return WeightsOffer(token.version, token.tensors, token.device, self._address(), fetch, ask)


def join(group: WeightGroup, rank: int) -> dist.ProcessGroup:
    """torch has no public way to a group beside the default one; SGLang makes its end of it in this same way."""
    from torch.distributed import distributed_c10d as c10d

    wait = timedelta(seconds=RENDEZVOUS_S)
    store = dist.TCPStore(group.address, group.port, group.world_size, is_master=False, timeout=wait)
    joined, _ = c10d._new_process_group_helper(
        group.world_size,
        rank,
        [],
        c10d.Backend(group.backend),
        dist.PrefixStore(group.name, store),
        group_name=group.name,
        timeout=timedelta(seconds=SEND_S),
    )
    c10d._world.pg_group_ranks[joined] = {rank: rank for rank in range(group.world_size)}
    return joined


def leave(joined: dist.ProcessGroup) -> None:
    """Without a message to the other ranks, which may be dead: collectives that wait for this process fail."""
    from torch.distributed import distributed_c10d as c10d

    c10d._abort_process_group(joined)
