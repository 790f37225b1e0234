"""The sending side of the transfer of weights by process groups: groups of requesting receivers, and rank 0.

Not covered: receivers and the messages between both sides (`runtime/weights/group.py`).
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from rl_platform.errors import WorkerError
from rl_platform.records import Weights
from rl_platform.runtime.ray.process_group import Rendezvous
from rl_platform.runtime.weights import group as weight_group
from rl_platform.runtime.weights.group import (
    Absence,
    JoinRequest,
    WeightGroup,
    WeightsOffer,
    buckets_of,
    distinct,
    flat_views,
    join,
    leave,
)
from rl_platform.runtime.weights.weight_transfer import Ask, TensorShape, checksum
from rl_platform.runtime.weights_token import WeightsToken

logger = logging.getLogger(__name__)

JOIN_S = 60.0  # longest wait for the other receivers of a publication


class WeightSender:
    """Rank 0 of the groups."""

    def __init__(self) -> None:
        self._joined: dict[str, dist.ProcessGroup] = {}  # by name

    def send(self, values: Iterable[Tensor], tensors: Sequence[TensorShape], group: WeightGroup) -> list[bytes]:
        """Sends the values of the distinct tensors, in order. The next bucket is filled while one is on its way.

        Returns a checksum of each bucket if the group is checked. Raises WorkerError if a receiver fails.
        """
        checksums = []
        coming = iter(values)
        sending: tuple[dist.Work, Tensor] | None = None  # NCCL: after `wait` the device waits, not the host
        try:
            if group.name not in self._joined:
                self._joined[group.name] = join(group, 0)
            for bucket in buckets_of(tensors, group.bucket):
                if sending is not None and sum(tensor.nbytes for tensor in bucket) > group.bucket:
                    sending[0].wait()  # memory may not suffice for another bucket beside a large tensor
                    sending = None
                flat = _filled(bucket, coming)
                if sending is not None:
                    sending[0].wait()
                sending = dist.broadcast(flat, 0, self._joined[group.name], async_op=True), flat
                checksums += [checksum(flat)] if group.checked else []
                del flat
            if sending is not None:
                sending[0].wait()
                if group.backend == "nccl":  # which sends after the wait has returned
                    torch.cuda.synchronize(sending[1].device)
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


def _filled(bucket: Sequence[TensorShape], coming: Iterator[Tensor]) -> Tensor:
    """Returns the bytes of a bucket, [N] uint8, with the next values in it."""
    value = next(coming).detach()
    flat, parts = flat_views(bucket, value.device)
    parts[0].copy_(value)
    for part in parts[1:]:
        del value  # before the next one is gathered
        value = next(coming).detach()
        part.copy_(value)
    return flat


@dataclass
class _Meeting:
    """The requests of the receivers of one publication so far."""

    expected: int
    requests: list[JoinRequest] = field(default_factory=list)
    absent: int = 0
    group: WeightGroup | None = None

    def is_complete(self, lost: Collection[str]) -> bool:
        """Returns whether every receiver has sent its request, gets the weights otherwise, or is among the `lost`
        ranks."""
        components = {_component(one.receiver) for one in self.requests}
        dead = sum(_component(rank) in components for rank in lost)
        return bool(self.requests) and len(self.requests) + self.absent + dead >= self.expected


class GroupTransfer:
    """Forms the groups of a sending process, and transfers its weights.

    address: returns that of this process, for the rendezvous of new groups. fetch: returns a copy of the weights by
    another transfer.
    """

    def __init__(self, address: Callable[[], str], fetch: Callable[[WeightsToken], Weights]) -> None:
        self._address, self._fetch = address, fetch
        self._sender = WeightSender()
        self._changed = threading.Condition()
        self._meetings: dict[str, tuple[int, _Meeting]] = {}  # by rank: of its last publication
        self._opened: dict[str, tuple[Rendezvous, WeightGroup]] = {}  # by name; a rendezvous lives as long as its group
        self._lost: set[str] = set()  # ranks that died and were not started again yet
        self._count = 0

    def publish(self, token: WeightsToken, state: Mapping[str, Tensor], request: WeightGroup) -> list[bytes]:
        return self.send(token, distinct(state, token.tensors or ()), request)

    def send(self, token: WeightsToken, values: Iterable[Tensor], request: WeightGroup) -> list[bytes]:
        """Sends the values of the token's distinct tensors, which may be gathered one after the other."""
        with self._changed:
            left = self._sender.groups - self._opened.keys()
        self._sender.leave(left)
        return self._sender.send(values, token.tensors or (), request)

    def receive(self, token: WeightsToken, ask: Ask) -> WeightsOffer | None:
        """Returns the offer for a receiver; None if the weights are not offered to a group."""
        if token.tensors is None:
            return None

        def fetch() -> Weights:
            if token.receivers > 1:
                ask(Absence())
            return self._fetch(token)

        return WeightsOffer(token.version, token.tensors, token.device, fetch, join=ask, send=ask)

    def meet(self, token: WeightsToken, request: JoinRequest | Absence) -> WeightGroup | None:
        """Returns the group of the receivers of a publication, when all have requested one or after JOIN_S.

        Returns None for an absence.
        """
        with self._changed:
            if isinstance(request, JoinRequest) and (request.alone or token.receivers < 2):
                return self._group_of([request])
            number, meeting = self._meetings.get(token.label, (0, None))
            if meeting is None or number != token.number:
                meeting = _Meeting(token.receivers)
            elif meeting.group is not None:  # a restarted receiver: the others of that group have the weights
                own = {request.receiver} if isinstance(request, JoinRequest) else set[str]()
                meeting = _Meeting(token.receivers, absent=meeting.absent + len(meeting.group.receivers - own))
            self._meetings[token.label] = token.number, meeting
            if isinstance(request, Absence):
                meeting.absent += 1
            else:
                others = [one for one in meeting.requests if one.receiver != request.receiver]
                meeting.requests = [*others, request]  # a restarted receiver requests a second time
            self._complete(meeting)
            if isinstance(request, Absence):
                return None
            self._changed.wait_for(lambda: meeting.group is not None, timeout=JOIN_S)
            if meeting.group is None:
                logger.warning("%d of %d receivers requested weights", len(meeting.requests), meeting.expected)
                meeting.group = self._group_of(meeting.requests or [request])
                self._changed.notify_all()
            return meeting.group

    def lost(self, rank: str) -> None:
        """Drops the request of a rank that died. The others do not wait for it until `restarted`."""
        with self._changed:
            self._lost.add(rank)
            for _, meeting in self._meetings.values():
                if meeting.group is None:
                    meeting.requests = [one for one in meeting.requests if one.receiver != rank]
                    self._complete(meeting)

    def restarted(self) -> None:
        """Waits for all ranks again, as each of them is alive."""
        with self._changed:
            self._lost.clear()

    def _complete(self, meeting: _Meeting) -> None:
        if meeting.is_complete(self._lost):
            meeting.group = self._group_of(meeting.requests)
        self._changed.notify_all()

    def _group_of(self, requests: Sequence[JoinRequest]) -> WeightGroup:
        """Returns the open group of exactly these receivers, or a new one."""
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
            "gloo" if requests[0].device == weight_group.CPU else "nccl",
            tuple((request.receiver, rank) for request, rank in zip(requests, ranks, strict=True)),
            any(request.checked for request in requests),
            weight_group.BUCKET,
            self._count,
        )
        for left in [key for key, (_, old) in self._opened.items() if old.receivers & group.receivers]:
            del self._opened[left]
        self._opened[group.name] = rendezvous, group
        return group


def _component(rank: str) -> str:
    """Returns `rollout` for `rollout[1]`."""
    return rank.partition("[")[0]
