"""Published weights that a process group (NCCL or gloo) transfers: the offer of a learner, and its receivers.

This transfer serves rollouts whose GPUs are not the learner's: the weights are never copied to main memory. The learner
is rank 0 of one group with all receivers, which get each bucket in one broadcast. No process stores a copy, so a
receiver that restarts requests the weights again. If a receiver dies during a transfer, the others request the weights
again, each in a group of its own; with NCCL the sender may wait until the group's timeout. Not covered: the sender
(`runtime/ray/weight_sender.py`), and `rollout.sync: delta`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from rl_platform.errors import WorkerError
from rl_platform.records import Weights
from rl_platform.runtime.weights.weight_transfer import TensorShape, checksum, empty, shapes_of

logger = logging.getLogger(__name__)

RENDEZVOUS_S = 120.0  # longest wait for the other ranks: they may still be importing libraries
SEND_S = 120.0  # longest time for one bucket
BUCKET = 256 * 2**20  # bytes: a receiver needs one beside the weights, a sender two; a larger tensor is one bucket
CPU = "cpu"


@dataclass(frozen=True)
class JoinRequest:
    """A receiver's request for a group.

    ranks: number of the receiver's ranks, on devices of the type `device`. checked: the receiver compares checksums.
    group: name of its current group, empty if it has none. alone: the group must have no other receiver.
    """

    receiver: str
    ranks: int
    device: str
    checked: bool
    group: str = ""
    alone: bool = False


@dataclass(frozen=True)
class Absence:
    """Notice that a receiver gets the weights by another transfer."""


@dataclass(frozen=True)
class WeightGroup:
    """A process group and its rendezvous, for one transfer. The sender is rank 0.

    name: the same for all transfers of the group. first_ranks: the first rank of each receiver. checked: the sender
    returns a checksum of each bucket. bucket: bytes of a bucket. number: counts the transfers.
    """

    name: str
    address: str
    port: int
    world_size: int
    backend: str
    first_ranks: tuple[tuple[str, int], ...]
    checked: bool
    bucket: int
    number: int = 0

    def first_rank(self, receiver: str) -> int:
        return dict(self.first_ranks)[receiver]

    @property
    def receivers(self) -> frozenset[str]:
        return frozenset(dict(self.first_ranks))


@dataclass(frozen=True)
class WeightsOffer:
    """Published weights in another process, on `device` (a name of `place_of`).

    fetch: returns a copy, through main memory. join: returns the group for a request when all receivers have requested
    one. send: rank 0 joins the group, unless it is a member, and sends the distinct tensors in buckets; returns after
    the last bucket, with a checksum of each bucket if the group is checked.
    """

    version: int
    tensors: tuple[TensorShape, ...]
    device: str
    fetch: Callable[[], Weights]
    join: Callable[[JoinRequest], WeightGroup]
    send: Callable[[WeightGroup], Sequence[bytes]]

    @property
    def distinct(self) -> tuple[TensorShape, ...]:
        return tuple(tensor for tensor in self.tensors if tensor.same_as is None)

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.distinct)

    @property
    def buckets(self) -> int:
        return sum(1 for _ in buckets_of(self.tensors, BUCKET))

    def empty(self, device: torch.device) -> dict[str, Tensor]:
        """Returns a state of uninitialised tensors for these weights."""
        return empty(self.tensors, device)

    def reaches(self, devices: Iterable[torch.device]) -> bool:
        """Returns whether a group can transfer the weights to these devices: gloo connects CPUs, NCCL distinct GPUs."""
        places = {place_of(device) for device in devices}
        return places == {CPU} if self.device == CPU else not places & {CPU, self.device}


def reachable(weights: Weights | WeightsOffer, devices: Iterable[torch.device]) -> Weights | WeightsOffer:
    """Returns `weights`, or a copy through main memory if they are offered and no group reaches these devices."""
    if isinstance(weights, WeightsOffer) and not weights.reaches(devices):
        return weights.fetch()
    return weights


def place_of(device: torch.device) -> str:
    """Returns `cpu`, or the UUID of a GPU, because each process numbers its visible GPUs from 0."""
    return CPU if device.type == CPU else str(torch.cuda.get_device_properties(device).uuid)


class OfferFields(TypedDict):
    """Fields of a token of weights that a group may send."""

    tensors: tuple[TensorShape, ...]
    device: str


def offer_fields(state: Mapping[str, Tensor], types: Mapping[str, torch.dtype]) -> OfferFields:
    """Returns the fields of a token whose weights may be sent by a group. types: those of tensors to convert."""
    tensors = tuple(replace(tensor, dtype=types.get(tensor.name, tensor.dtype)) for tensor in shapes_of(state))
    return {"tensors": tensors, "device": place_of(next(iter(state.values())).device)}


def distinct(state: Mapping[str, Tensor], tensors: Iterable[TensorShape]) -> Iterator[Tensor]:
    """Yields the tensors of a state that are sent, in order."""
    return (state[tensor.name] for tensor in tensors if tensor.same_as is None)


def buckets_of(tensors: Iterable[TensorShape], size: int) -> Iterator[list[TensorShape]]:
    """Yields the distinct tensors in order, in buckets of one type each, because SGLang reads no unaligned numbers."""
    bucket: list[TensorShape] = []
    room = size
    for tensor in tensors:
        if tensor.same_as is not None:
            continue
        if bucket and (tensor.nbytes > room or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, room = [], size
        bucket.append(tensor)
        room -= tensor.nbytes
    if bucket:
        yield bucket


def flat_views(bucket: Sequence[TensorShape], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Allocates a bucket; returns its bytes [N] uint8 and the tensors that are views of it."""
    flat = torch.empty(sum(tensor.nbytes for tensor in bucket), dtype=torch.uint8, device=device)
    sizes = [tensor.nbytes for tensor in bucket]
    parts = zip(torch.split(flat, sizes), bucket, strict=True)
    return flat, [part.view(tensor.dtype).view(tensor.shape) for part, tensor in parts]


class Membership:
    """One rank of a receiver in a group. If any rank leaves, collectives of the others fail."""

    def __init__(self, group: WeightGroup, rank: int) -> None:
        self.group, self._rank = group, rank
        self._lock = threading.Lock()
        self._joined: dist.ProcessGroup | None = None
        self.left = False

    def joined(self) -> dist.ProcessGroup:
        """Returns the group; the first call waits for the other ranks. Raises WorkerError if this rank has left."""
        if self._joined is None:
            joined = join(self.group, self._rank)
            with self._lock:
                self._joined = joined
            if self.left:
                self.leave()
                raise WorkerError("the receiver waits for these weights no more")
        return self._joined

    def leave(self) -> None:
        with self._lock:
            self.left, joined, self._joined = True, self._joined, None
        if joined is not None:
            leave(joined)


class WeightReceiver:
    """Receives weights on `device` from one sender at a time. label: name of the receiving rank."""

    def __init__(self, label: str, device: torch.device) -> None:
        self._label, self._device = label, device
        self._membership: Membership | None = None

    def receive(self, offer: WeightsOffer, own: Mapping[str, Tensor]) -> None:
        """Overwrites `own` with the weights. Raises WorkerError for a failed or damaged transfer; `own` is then
        incomplete."""
        try:
            group = self._join(offer)
            sent, arrived = self._transfer(offer, group, own)
        except WorkerError as error:
            if self._membership is None or len(self._membership.group.receivers) == 1:
                raise
            logger.warning("%s requests the weights again, alone: %s", self._label, error)
            group = self._join(offer, alone=True)
            sent, arrived = self._transfer(offer, group, own)
        buckets = buckets_of(offer.tensors, group.bucket)
        for bucket, sum_sent, sum_arrived in zip(buckets, sent, arrived, strict=True):
            if sum_arrived != sum_sent:
                names = bucket[0].name if len(bucket) == 1 else f"{bucket[0].name} to {bucket[-1].name}"
                raise WorkerError(f"weights version {offer.version} arrived damaged: the checksum of {names} differs")

    def _join(self, offer: WeightsOffer, alone: bool = False) -> WeightGroup:
        member = self._membership
        known = member.group.name if member is not None and not member.left else ""
        group = offer.join(JoinRequest(self._label, 1, self._device.type, True, known, alone))
        if member is None or not known or group.name != member.group.name:
            if member is not None:
                member.leave()
            self._membership = Membership(group, group.first_rank(self._label))
        return group

    def _transfer(
        self, offer: WeightsOffer, group: WeightGroup, own: Mapping[str, Tensor]
    ) -> tuple[Sequence[bytes], Sequence[bytes]]:
        """Returns the checksums of the buckets at the sender and at this receiver."""
        assert self._membership is not None
        membership, arriving = self._membership, Future[list[bytes]]()
        threading.Thread(target=self._take, args=(offer, membership, own, arriving), daemon=True).start()
        try:
            return offer.send(group), arriving.result(SEND_S)
        except BaseException:
            membership.leave()  # ends collectives that still wait in the group
            raise

    def _take(
        self, offer: WeightsOffer, membership: Membership, own: Mapping[str, Tensor], arriving: Future[list[bytes]]
    ) -> None:
        checksums = []
        try:
            for bucket in buckets_of(offer.tensors, membership.group.bucket):
                flat, parts = flat_views(bucket, self._device)
                dist.broadcast(flat, 0, membership.joined())  # a second reference would keep connections open
                checksums.append(checksum(flat))
                for tensor, part in zip(bucket, parts, strict=True):
                    own[tensor.name].detach().copy_(part)
            arriving.set_result(checksums)
        except (RuntimeError, dist.DistError) as error:
            membership.leave()
            arriving.set_exception(WorkerError(f"weights for {self._label} did not arrive: {error}"))
        except BaseException as error:
            membership.leave()
            arriving.set_exception(error)


def join(group: WeightGroup, rank: int) -> dist.ProcessGroup:
    """Joins the group. torch has no public function for a group beside the default one; SGLang calls the same ones."""
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
    """Leaves the group at once. Other ranks may be dead, so none is notified; their pending collectives fail."""
    from torch.distributed import distributed_c10d as c10d

    c10d._abort_process_group(joined)
