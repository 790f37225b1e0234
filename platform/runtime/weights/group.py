"""Published weights sent by process groups (NCCL or gloo) from the learner's process to those that generate.

For rollouts on GPUs apart from the learner's: the weights are never copied to main memory. The learner is rank 0 of one
group with all receivers, which get each bucket in one broadcast. No other process has a copy, so a receiver that is
started anew requests the weights again. If a receiver dies meanwhile, the others request them again, each in a group of
its own; the sender may wait (NCCL) until the group's timeout. Not covered: `rollout.sync: delta`.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_platform.errors import WorkerError
from rl_platform.records import Weights
from rl_platform.runtime.process_group import RENDEZVOUS_S, Rendezvous
from rl_platform.runtime.weights.weight_transfer import Ask, TensorShape, WeightsToken, checksum, shapes_of

logger = logging.getLogger(__name__)

SEND_S = 120.0  # longest time for one bucket
JOIN_S = 60.0  # longest wait for the other receivers of a publication: a process that died will never ask
BUCKET = 256 * 2**20  # bytes that a sender and each receiver need beside the weights; a larger tensor is one bucket
CPU = "cpu"


@dataclass(frozen=True)
class JoinRequest:
    """A receiver's request for a group. ranks: of the receiver, on a kind of `device`. checked: it compares checksums.
    group: the name of the group that it is in. alone: it wants a group without the other receivers."""

    receiver: str
    ranks: int
    device: str
    checked: bool
    group: str = ""
    alone: bool = False


@dataclass(frozen=True)
class Absence:
    """Notice of a receiver that gets the weights in another way."""


@dataclass(frozen=True)
class WeightGroup:
    """A process group and its rendezvous. The sender is rank 0.

    first_ranks: the first rank of each receiver. checked: the sender returns a checksum of each bucket. bucket: its
    size. number: counts the requests for the group, each of which is one sending.
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

    def same_as(self, other: WeightGroup) -> bool:
        """Whether both are the same process group, for two sendings."""
        return self.name == other.name


@dataclass(frozen=True)
class WeightsOffer:
    """Published weights that are in another process, on `device` (as `place_of` names it).

    fetch: a copy, through main memory. join: returns the group for a request, as soon as the other receivers have made
    theirs. send: rank 0 joins the group, if it has not, and sends the tensors in buckets, one of those that share their
    memory; returns when all are sent, with a checksum of each bucket if the group is checked.
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


def offer_fields(state: Mapping[str, Tensor], types: Mapping[str, torch.dtype]) -> dict[str, Any]:
    """The fields of a token for weights that may be sent by a group. `types`: of tensors that are converted for it."""
    tensors = tuple(replace(tensor, dtype=types.get(tensor.name, tensor.dtype)) for tensor in shapes_of(state))
    return {"tensors": tensors, "device": place_of(next(iter(state.values())).device)}


def buckets_of(tensors: Iterable[TensorShape], size: int) -> Iterator[list[TensorShape]]:
    """Yields the distinct tensors, in order, as buckets of one type each: SGLang reads no unaligned numbers."""
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
    """Allocates a bucket; returns it as bytes, and the tensors that are its parts."""
    flat = torch.empty(sum(tensor.nbytes for tensor in bucket), dtype=torch.uint8, device=device)
    sizes = [tensor.nbytes for tensor in bucket]
    parts = [part.view(tensor.dtype).view(tensor.shape) for part, tensor in zip(flat.split(sizes), bucket, strict=True)]
    return flat, parts


class WeightSender:
    """Rank 0 of groups."""

    def __init__(self) -> None:
        self._joined: dict[str, dist.ProcessGroup] = {}  # by name

    def send(self, state: Mapping[str, Tensor], tensors: Sequence[TensorShape], group: WeightGroup) -> list[bytes]:
        """Sends the tensors; returns checksums if the group is checked. Raises WorkerError if a receiver fails."""
        checksums = []
        device = state[tensors[0].name].device
        try:
            if group.name not in self._joined:
                self._joined[group.name] = join(group, 0)
            for bucket in buckets_of(tensors, group.bucket):
                flat, parts = flat_views(bucket, device)
                for tensor, part in zip(bucket, parts, strict=True):
                    part.copy_(state[tensor.name].detach())
                dist.broadcast(flat, 0, self._joined[group.name])
                checksums += [checksum(flat)] if group.checked else []
            if group.backend == "nccl":  # which sends after the call has returned
                torch.cuda.synchronize(device)
        except (RuntimeError, dist.DistError) as error:
            self.leave([group.name])
            receivers = ", ".join(sorted(group.receivers))
            raise WorkerError(f"weights for {receivers} could not be sent: {error}") from error
        return checksums

    def leave(self, names: Iterable[str]) -> None:
        for name in names:
            if (joined := self._joined.pop(name, None)) is not None:
                leave(joined)

    @property
    def groups(self) -> set[str]:
        return set(self._joined)


class Membership:
    """One rank of a receiver in a group. If any rank leaves, collectives of the others fail."""

    def __init__(self, group: WeightGroup, rank: int) -> None:
        self.group, self._rank = group, rank
        self._lock = threading.Lock()
        self._joined: dist.ProcessGroup | None = None
        self.left = False

    def joined(self) -> dist.ProcessGroup:
        """Waits for the other ranks at the first time. Raises WorkerError if this one has left meanwhile."""
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
    """Takes tensors of `device` from one sender at a time; `label`: whose they are."""

    def __init__(self, label: str, device: torch.device) -> None:
        self._label, self._device = label, device
        self._membership: Membership | None = None

    def receive(self, offer: WeightsOffer, own: Mapping[str, Tensor]) -> None:
        """Writes the weights over `own`. Raises WorkerError unless all of it arrived as it was sent; `own` is no
        version at all then."""
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
        if member is None or not known or not group.same_as(member.group):
            if member is not None:
                member.leave()
            self._membership = Membership(group, group.first_rank(self._label))
        return group

    def _transfer(
        self, offer: WeightsOffer, group: WeightGroup, own: Mapping[str, Tensor]
    ) -> tuple[Sequence[bytes], Sequence[bytes]]:
        """Returns the checksums of what was sent and of what arrived."""
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
                dist.broadcast(flat, 0, membership.joined())  # no other reference: its connections close with it
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


@dataclass
class _Meeting:
    """The receivers of one publication that have asked so far."""

    expected: int
    requests: list[JoinRequest] = field(default_factory=list)
    absent: int = 0
    group: WeightGroup | None = None

    @property
    def complete(self) -> bool:
        return len(self.requests) + self.absent >= self.expected


class GroupTransfer:
    """The sender's side: forms groups, and `WeightSender`. The receiver's side is an offer, and `WeightReceiver`.

    address: of this process, for groups that are opened here. fetch: a copy of the weights by another transfer.
    """

    def __init__(self, address: Callable[[], str], fetch: Callable[[WeightsToken], Weights]) -> None:
        self._address, self._fetch = address, fetch
        self._sender = WeightSender()
        self._changed = threading.Condition()
        self._meetings: dict[str, tuple[int, _Meeting]] = {}  # by rank: of its last publication
        self._opened: dict[str, tuple[Rendezvous, WeightGroup]] = {}  # by name; a rendezvous lives as long as its group
        self._count = 0

    def publish(self, token: WeightsToken, state: Mapping[str, Tensor], request: WeightGroup) -> list[bytes]:
        with self._changed:
            left = self._sender.groups - self._opened.keys()
        self._sender.leave(left)
        return self._sender.send(state, token.tensors or (), request)

    def receive(self, token: WeightsToken, ask: Ask) -> WeightsOffer | None:
        """What a rollout needs to join a group; None if the weights are not offered to one."""
        if token.tensors is None:
            return None

        def fetch() -> Weights:
            if token.receivers > 1:
                ask(Absence())
            return self._fetch(token)

        return WeightsOffer(token.version, token.tensors, token.device, fetch, join=ask, send=ask)

    def meet(self, token: WeightsToken, request: JoinRequest | Absence) -> WeightGroup | None:
        """Returns the group of all receivers of a publication, as soon as they have asked or JOIN_S have passed."""
        with self._changed:
            if isinstance(request, JoinRequest) and (request.alone or token.receivers < 2):
                return self._group_of([request])
            number, meeting = self._meetings.get(token.label, (0, None))
            if meeting is None or number != token.number or meeting.group is not None:
                meeting = _Meeting(token.receivers)
                self._meetings[token.label] = token.number, meeting
            if isinstance(request, Absence):
                meeting.absent += 1
            else:
                others = [one for one in meeting.requests if one.receiver != request.receiver]
                meeting.requests = [*others, request]  # one that was started again asks a second time
            if meeting.complete and meeting.requests:
                meeting.group = self._group_of(meeting.requests)
            self._changed.notify_all()
            if isinstance(request, Absence):
                return None
            self._changed.wait_for(lambda: meeting.group is not None, timeout=JOIN_S)
            if meeting.group is None:
                logger.warning("%d of %d receivers asked for weights", len(meeting.requests), meeting.expected)
                meeting.group = self._group_of(meeting.requests)
                self._changed.notify_all()
            return meeting.group

    def _group_of(self, requests: Sequence[JoinRequest]) -> WeightGroup:
        """The group that exactly these receivers are in, or a new one."""
        self._count += 1
        (name, *others) = {request.group for request in requests}
        if not others and name in self._opened:
            group = replace(self._opened[name][1], number=self._count)
            if group.receivers == {request.receiver for request in requests}:
                return group
        *ranks, world_size = accumulate((request.ranks for request in requests), initial=1)
        rendezvous = Rendezvous(self._address(), world_size)
        group = WeightGroup(
            f"weights-{uuid.uuid4().hex}",
            self._address(),
            rendezvous.port,
            world_size,
            "gloo" if requests[0].device == CPU else "nccl",
            tuple((request.receiver, rank) for request, rank in zip(requests, ranks, strict=True)),
            any(request.checked for request in requests),
            BUCKET,
            self._count,
        )
        for left in [key for key, (_, old) in self._opened.items() if old.receivers & group.receivers]:
            del self._opened[left]
        self._opened[group.name] = rendezvous, group
        return group


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
