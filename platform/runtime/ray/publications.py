"""Weights that one process publishes, and weights that it receives from other processes.

Components of the process get references. Another process gets a copy by the first transfer that reaches it. The
sending side of a transfer runs between two calls of the publishing rank. All ranks of a learner gather weights on
request during the transfer. The sender sends each bucket meanwhile, so no rank holds all of them.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_platform.errors import PlatformError, WorkerError
from rl_platform.records import Weights
from rl_platform.runtime.lifecycle import RUNNER
from rl_platform.runtime.ray.weight_sender import GroupTransfer
from rl_platform.runtime.ray.weight_store import StoreTransfer
from rl_platform.runtime.waits import caller
from rl_platform.runtime.weights.group import (
    Absence,
    JoinRequest,
    OfferFields,
    WeightGroup,
    WeightsOffer,
    offer_fields,
    place_of,
)
from rl_platform.runtime.weights.weight_transfer import TensorShape, WeightTransfer, shapes_under
from rl_platform.runtime.weights_token import WeightsToken

if TYPE_CHECKING:
    from rl_platform.runtime.ray.transport import RayTransport

logger = logging.getLogger(__name__)

EXPORT_S = 600.0  # longest wait for a rank to hand out its weights
GATHER = "gather"  # request of the sending rank to the other ranks of its learner
Request = tuple[str, WeightGroup | None]  # transfer and its request
RunInTurn = Callable[[str, Callable[[], object]], "Future[object]"]  # (rank, function): between two calls of the rank


class Publications:
    """The publications of one process.

    host: the name of this process, or `runner`, which passes tokens on without resolving them. receives: a component
    of this process may read publications of this process.
    """

    def __init__(self, host: str, transport: RayTransport, receives: bool = False) -> None:
        self._host, self._transport, self._receives = host, transport, receives
        self.store = StoreTransfer(transport)
        self._group = GroupTransfer(lambda: transport.address(), self.copy)
        self._transfers: Mapping[str, WeightTransfer[Weights | WeightsOffer]] = {  # in order of preference
            "group": self._group,
            "store": self.store,
        }
        self._published: dict[str, dict[int, Weights]] = {}  # by rank and number of the publication
        self._shapes: dict[str, OfferFields] = {}  # by rank: fields of the tokens of weights gathered on request
        self._count = 0
        self._exports: tuple[int, dict[Request, Future[object]]] = 0, {}  # of the publication that was requested last
        self._exporting = threading.Lock()

    def publish(self, weights: Weights) -> WeightsToken:
        """Returns the token that is sent instead of the weights. All ranks that share parameters call it together."""
        self._count += 1
        token = WeightsToken(self._host, caller(), self._count, weights.version, weights.delta)
        if weights.readable > 1 and weights.gathered is None and not self._receives:
            # the rank may be in a call when a receiver reads, and would answer only after it
            self.store.publish_now(token, weights.state, weights.readable)
            return replace(token, held=False)
        if weights.gathered is not None and weights.offered and weights.on_request and not self._receives:
            self._published[caller()] = {self._count: weights}
            if caller() not in self._shapes:
                self._shapes[caller()] = _shapes_of(weights.gathered())  # they never change
            return replace(token, **self._shapes[caller()])
        if weights.gathered is not None:
            if not (self._receives or (weights.offered and weights.stores)):
                if weights.stores:
                    self.store.publish_gathered(token, weights.gathered(), weights.readable)
                else:
                    deque(weights.gathered(), maxlen=0)  # ranks that do not store help to gather
                return replace(token, held=False)
            weights = replace(weights, state=self._gathered(weights), gathered=None)
        published = self._published.setdefault(caller(), {})
        published[self._count] = weights
        for number in list(published)[: -weights.readable]:
            del published[number]
        return replace(token, **offer_fields(weights.state, weights.types)) if weights.offered else token

    def _gathered(self, weights: Weights) -> dict[str, Tensor]:
        """Gathers the tensors of a learner's ranks, if possible in the memory of an older publication.

        Publications that are no longer readable are dropped first: memory does not suffice for one more.
        """
        assert weights.gathered is not None
        published, own = self._published.setdefault(caller(), {}), dict[str, Tensor]()
        for number in list(published)[: max(0, len(published) - weights.readable + 1)]:
            state = published.pop(number).state
            own = dict(state) if weights.overwrites or not self._receives else {}
            del state
        gathered: dict[str, Tensor] = {}
        for names, tensor in weights.gathered():
            former = own.get(names[0])
            if former is not None and _can_hold(former, tensor):
                tensor = former.copy_(tensor)
            gathered |= dict.fromkeys(names, tensor)
            for name in names:
                own.pop(name, None)
            del former
        return gathered

    def resolve(self, token: WeightsToken) -> Weights | WeightsOffer | WeightsToken:
        """Returns the weights of this process, or the result of the first transfer that reaches another process."""
        if (here := token.at(self._host)) is not None:
            if token.tensors is not None and token.receivers > 1:
                self._ask(token, "group", Absence())
            return self.published(here)
        return token if self._host == RUNNER else self._receive(token, *self._transfers)

    def published(self, token: WeightsToken) -> Weights:
        """Returns weights of this process. Raises WorkerError if newer publications have replaced them."""
        weights = self._published.get(token.label, {}).get(token.number)
        if weights is None:
            raise WorkerError(f"weights version {token.version} of {token.label} were replaced before they were read")
        return weights

    def copy(self, token: WeightsToken) -> Weights:
        """Returns a copy of another process's weights, in main memory."""
        weights = self._receive(token, "store")
        assert isinstance(weights, Weights)
        return weights

    def export(
        self,
        token: WeightsToken,
        transfer: str,
        request: JoinRequest | Absence | WeightGroup | None,
        run_in_turn: RunInTurn,
    ) -> object:
        """Runs the sending side of a transfer; returns its answer. Receivers with equal requests share one."""
        if transfer == "store" and (manifest := self.store.stored(token)) is not None:
            return manifest
        if isinstance(request, JoinRequest | Absence):
            return self._group.meet(token, request)
        if transfer == GATHER:
            run_in_turn(token.label, partial(self._help, token)).result()
            return None
        publish = partial(self._publish, token, transfer, request)
        with self._exporting:
            if self._exports[0] != token.number:
                self._exports = token.number, {}
            answers = self._exports[1]
            if (transfer, request) not in answers:
                answers[transfer, request] = run_in_turn(token.label, publish)
            answer = answers[transfer, request]
        return answer.result()

    def lost(self, rank: str) -> None:
        """Makes receivers that are alive not wait for the request of this rank, which died."""
        self._group.lost(rank)

    def restarted(self) -> None:
        """Makes receivers wait for all ranks again, as each of them is alive."""
        self._group.restarted()

    def _publish(self, token: WeightsToken, transfer: str, request: WeightGroup | None) -> object:
        weights = self.published(token)
        if weights.gathered is None:
            return self._transfers[transfer].publish(token, weights.state, request)
        for copy in token.copies:
            threading.Thread(target=self._request_help, args=(copy, request), daemon=True).start()
        parts = weights.gathered()
        try:
            if request is not None:
                return self._group.send(token, (tensor for _, tensor in parts), request)
            self.store.publish_gathered(token, parts)
            return self.store.stored(token)
        finally:
            deque(parts, maxlen=0)  # after a failure too: the other ranks wait in their collectives

    def _request_help(self, copy: WeightsToken, request: WeightGroup | None) -> None:
        try:
            self._ask(copy, GATHER, request)
        except PlatformError as error:  # the collective of the others fails too, and with it their call
            logger.warning("%s did not gather weights: %s", copy.label, error)

    def _help(self, token: WeightsToken) -> None:
        """Gathers with the other ranks of a learner and keeps nothing."""
        weights = self.published(token)
        assert weights.gathered is not None
        deque(weights.gathered(), maxlen=0)

    def _receive(self, token: WeightsToken, *transfers: str) -> Weights | WeightsOffer:
        received = (self._transfers[name].receive(token, partial(self._ask, token, name)) for name in transfers)
        return next(weights for weights in received if weights is not None)

    def _ask(self, token: WeightsToken, transfer: str, request: object) -> object:
        if token.host == self._host and isinstance(request, Absence):
            return self._group.meet(token, request)
        return self._transport.call(token.host, "export", token, transfer, request, limit=EXPORT_S)


def _shapes_of(gathered: Iterable[tuple[Sequence[str], Tensor]]) -> OfferFields:
    """Returns the fields of a token for tensors that are gathered one after the other. Keeps none of them."""
    tensors: list[TensorShape] = []
    device = torch.device("cpu")
    for names, tensor in gathered:
        tensors += shapes_under(names, tensor)
        device = tensor.device
        del tensor
    return {"tensors": tuple(tensors), "device": place_of(device)}


def _can_hold(former: Tensor, tensor: Tensor) -> bool:
    """Returns whether `tensor` fits into the memory of `former`, which is not swapped out and is not its own."""
    alike = (former.shape, former.dtype, former.device) == (tensor.shape, tensor.dtype, tensor.device)
    return alike and former.untyped_storage().nbytes() > 0 and former.data_ptr() != tensor.data_ptr()
