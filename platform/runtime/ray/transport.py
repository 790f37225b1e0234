"""Calls to the actors of one run: frequent ones through a Unix-domain socket on the same node, the others through Ray.

Ray detects dead processes: when a connection ends, the call is looked up through Ray, and the error of that look-up is
reported.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError

from rl_platform.errors import Deadline, HostDied, PlatformError, WorkerError
from rl_platform.runtime.ray.serialization import Answer, value_of
from rl_platform.runtime.ray.unix_socket import FetchThroughRay, SocketAnswer, SocketClient, SocketServer, socket_name

T = TypeVar("T")
GRACE_S = 10.0  # how long a busy process may take to answer that it is alive
FREQUENT = frozenset({"call", "channel", "export"})  # handled by `HostActor.take`


class RayTransport:
    """Calls between the actors of one run, by name; large messages in Ray's object store."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self._actors: dict[str, ActorHandle] = {}
        self._clients: dict[str, SocketClient | None] = {}
        self._connecting, self._calling = threading.Lock(), threading.Lock()
        self._ended = False

    def listen(self, host: str, take: Callable[..., Future[Answer]]) -> SocketServer:
        """Makes this process, which is `host`, take the frequent calls of others on its node."""
        return SocketServer(self._socket_name(host), take, ray.ObjectRef)

    def send(
        self,
        host: str,
        actor: ActorHandle,
        method: str,
        arguments: tuple[object, ...],
        then: Callable[[Future[Answer]], None],
    ) -> None:
        """Does not wait. `then` gets the answer; the future raises what Ray does, HostDied after `end`."""
        sent = self._call_over_socket(host, method, arguments)
        if sent is None:
            self._through_ray(host, partial(_call_through_ray, actor, method, arguments)).add_done_callback(then)
        else:
            sent.add_done_callback(partial(self._arrived, host, actor, then))

    def end(self) -> None:
        """From now on, no thread calls Ray here: a call after `ray.shutdown` ends the process with exit code 1, in C++,
        where no error can be caught."""
        with self._calling:
            self._ended = True

    def call(self, host: str, method: str, *arguments: object, limit: float) -> Any:
        try:
            if host not in self._actors:
                self._actors[host] = ray.get_actor(host, self.namespace)
            actor = self._actors[host]
            sent = self._call_over_socket(host, method, arguments)
            if sent is not None:
                answer = self._wait(actor, host, lambda timeout: sent.result(timeout), limit)
                if not isinstance(answer, FetchThroughRay):
                    return value_of(answer)
                method, arguments = "fetch", (answer.number,)
            reference = _call_through_ray(actor, method, arguments)
            return value_of(self._wait(actor, host, lambda timeout: ray.get(reference, timeout=timeout), limit))
        except (RayActorError, ValueError) as error:
            if isinstance(error, ValueError) and not str(error).startswith("Failed to look up actor"):
                raise
            raise HostDied(f"the process of {host} died: {reason(error)}") from error

    def address(self) -> str:
        return str(ray.util.get_node_ip_address())

    def store(self, value: object) -> ray.ObjectRef:
        return ray.put(value)

    def load(self, references: Sequence[object]) -> list[Any]:
        try:
            return list(ray.get(list(references)))
        except RayError as error:
            raise HostDied(f"a message is lost with the process that sent it: {reason(error)}") from error

    def _call_over_socket(self, host: str, method: str, arguments: tuple[object, ...]) -> Future[SocketAnswer] | None:
        """None: the call must go through Ray."""
        if method not in FREQUENT:
            return None
        with self._connecting:
            if host not in self._clients:
                self._clients[host] = SocketClient.to(self._socket_name(host), ray.ObjectRef)
            client = self._clients[host]
        return None if client is None else client.call(method, arguments)

    def _socket_name(self, host: str) -> str:
        return socket_name(self.namespace, ray.get_runtime_context().get_node_id(), host)

    def _arrived(
        self, host: str, actor: ActorHandle, then: Callable[[Future[Answer]], None], sent: Future[SocketAnswer]
    ) -> None:
        answer = sent.result()
        if isinstance(answer, FetchThroughRay):
            self._through_ray(host, lambda: actor.fetch.remote(answer.number)).add_done_callback(then)
        else:
            then(cast("Future[Answer]", sent))

    def _through_ray(self, host: str, call: Callable[[], ray.ObjectRef]) -> Future[Answer]:
        failed: Future[Answer] = Future()
        with self._calling:
            try:
                if not self._ended:
                    future: Future[Answer] = call().future()
                    return future
                failed.set_exception(HostDied(f"the process of {host} was ended"))
            except Exception as error:  # the connection to Ray is lost
                failed.set_exception(error)
        return failed

    def _wait(self, actor: ActorHandle, host: str, get: Callable[[float], T], limit: float) -> T:
        """Returns the answer, however long it takes, as long as the process shows that it lives."""
        while True:
            try:
                return get(min(limit + GRACE_S, threading.TIMEOUT_MAX))
            except TimeoutError:
                try:
                    ray.get(actor.ping.remote(), timeout=GRACE_S)
                except TimeoutError:
                    raise Deadline(f"the process of {host} has not answered for {limit + 2 * GRACE_S:g} s") from None


def _call_through_ray(actor: ActorHandle, method: str, arguments: tuple[object, ...]) -> ray.ObjectRef:
    if method in FREQUENT:
        return actor.take.remote(method, *arguments)
    return getattr(actor, method).remote(*arguments)


def typed(host: str, error: BaseException) -> PlatformError:
    """Returns the platform's error for one that Ray raised; an error of the platform stays."""
    if isinstance(error, PlatformError):
        return error
    if isinstance(error, RayTaskError):
        return WorkerError(f"the process of {host} failed: {error}")
    return HostDied(f"the process of {host} died: {reason(error)}")


def reason(error: BaseException) -> str:
    """Returns Ray's reason for the end of a process, on one line."""
    text = " ".join(str(error).split()).partition(" Some common causes include")[0]
    return text.partition("The actor is dead because its worker process has died. ")[2] or text
