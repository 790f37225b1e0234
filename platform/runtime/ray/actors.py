"""The Ray actors of one run: one for every host of the placement, on its node, inside one placement group.

Ray never restarts them: it would bring an actor back with the state of its constructor and report nothing. `launch`
creates a new one instead.
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

import ray
import torch
from ray.actor import ActorHandle
from ray.exceptions import RayActorError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rl_platform import acceleration, numerics
from rl_platform.environment_variables import inherited
from rl_platform.errors import Deadline, WorkerDied
from rl_platform.placement.inventory import VISIBLE_DEVICES
from rl_platform.placement.scheduler import Host
from rl_platform.runtime.ray import reservation
from rl_platform.runtime.ray.host_actor import HostActor
from rl_platform.runtime.ray.serialization import Answer, unpack_error
from rl_platform.runtime.ray.transport import RayTransport, typed
from rl_platform.runtime.ray.worker_proxy import Send


class RayActors:
    """The actors of one run. `patience`: seconds to wait for what other runs hold; `trace`: see `RayRuntime`."""

    def __init__(self, patience: float, trace: bool) -> None:
        self.transport = RayTransport(f"rl-platform-{uuid.uuid4().hex[:12]}")
        self._patience, self._trace = patience, trace
        self._group: PlacementGroup | None = None
        self._class = ray.remote(HostActor)  # one for all hosts: Ray exports each class, which takes 20 ms
        self._actors: dict[str, ActorHandle] = {}
        self._recipes: dict[str, tuple[dict[str, object], tuple[object, ...]]] = {}  # by host: of its actor
        self._visible: dict[str, str] = {}
        self._nodes: list[list[Host]] = []
        self._processes: dict[str, str] = {}  # by host: the name of its present process

    def start(self, hosts: Sequence[Host]) -> Mapping[str, Send]:
        parts = self._nodes = reservation.by_node(hosts)
        wanted = [reservation.resources_for(part) for part in parts]
        bundles, labels = ([getattr(place, name) for place in wanted] for name in ("resources", "labels"))
        strategy = "STRICT_SPREAD" if len(parts) > 1 else "STRICT_PACK"
        self._group = placement_group(bundles, strategy, bundle_label_selector=labels if any(labels) else None)
        self._reserve(wanted)
        for index, part in enumerate(parts):
            self._start_node(part, index)
        for part in parts:
            self._show_accelerators(part)
        return {name: partial(self._send, name) for name in self._actors}

    def _start_node(self, hosts: Sequence[Host], bundle: int) -> None:
        """Starts the hosts of one node, which share its cores. The first reserves all accelerators of the run there."""
        gpus = reservation.resources_for(hosts).resources.get("GPU", 0.0)
        for placed in hosts:
            environment = placed.env
            own = {name: value for name, value in environment.items() if name != VISIBLE_DEVICES}
            options = {
                "namespace": self.transport.namespace,
                "num_cpus": 0,
                "num_gpus": gpus if placed is hosts[0] else 0,
                "max_restarts": 0,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, bundle),
                "runtime_env": {"env_vars": own} if own else None,  # before the process starts, for its loader
            }
            paths = [os.getcwd(), *sys.path]
            variables = {**inherited(acceleration.VARIABLE, numerics.VARIABLE), **environment}
            threads = reservation.threads_for(placed, hosts, torch.get_num_threads())
            self._recipes[placed.name] = (
                options,
                (self.transport.namespace, variables, threads, paths, self._trace, bool(placed.accelerators)),
            )
            self.launch(placed.name, placed.name)

    def launch(self, host: str, name: str) -> Send:
        options, arguments = self._recipes[host]
        actor = self._actors[name] = self._class.options(**options | {"name": name}).remote(name, *arguments)
        self._processes[host] = name
        if host in self._visible:
            actor.see.remote(self._visible[host])  # before the calls that follow
        return partial(self._send, name)

    def end(self, name: str) -> None:
        """Ends the process of this name, whether it lives or not."""
        ray.kill(self._actors.pop(name))

    def show_again(self, hosts: Collection[str]) -> None:
        """Shows processes that were started again the accelerators of their node, which may be another one than before.

        Called when the processes have come up. Raises HostDied if one has died again.
        """
        for part in self._nodes:
            if part[0].name in hosts:  # it holds the reservation, and ends with the node at the latest
                self._show_accelerators(part)

    def _show_accelerators(self, hosts: Sequence[Host]) -> None:
        """Translates the plan's accelerators into the names of those that Ray reserved on the node."""
        used = sorted({local for placed in hosts for local in placed.accelerators})
        if not used:
            return
        try:
            reserved = ray.get(self._actors[self._processes[hosts[0].name]].accelerators.remote())
        except RayActorError as error:
            raise typed(hosts[0].name, error) from error
        names = dict(zip(used, reserved, strict=True))
        for placed in hosts:
            if placed.accelerators:
                self._visible[placed.name] = shown = ",".join(names[local] for local in placed.accelerators)
                self._actors[self._processes[placed.name]].see.remote(shown)  # before the calls that follow

    def stop(self) -> None:
        self.transport.end()
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors = {}
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    def _send(self, host: str, method: str, *arguments: object) -> Future[object]:
        """Returns the future of a call. It does not wait, and all errors are in the future."""
        future: Future[object] = Future()
        actor = self._actors.get(host)
        if actor is None:
            future.set_exception(WorkerDied(f"the process of {host} was ended"))
        else:
            self.transport.send(host, actor, method, arguments, partial(_answered, host, future))
        return future

    def _reserve(self, wanted: Sequence[reservation.NodeResources]) -> None:
        """Waits for the placement group: one that cannot be met would stay pending for ever."""
        assert self._group is not None
        alive = [node for node in ray.nodes() if node["Alive"]]
        nodes = [reservation.NodeResources(node["Resources"], node.get("Labels", {})) for node in alive]
        if not reservation.fits(wanted, nodes):
            self.stop()
            raise reservation.too_large(wanted, nodes)
        if not self._group.wait(self._patience):
            self.stop()
            free = f"{ray.available_resources().get('GPU', 0):g} GPUs of the cluster are free"
            needed = f"the placement needs {reservation.listed(wanted)}"
            raise Deadline(f"{needed}, which others still hold after {self._patience:g} s: {free}")


def _answered(host: str, future: Future[object], done: Future[Answer]) -> None:
    error = done.exception()
    if error is not None:
        future.set_exception(typed(host, error))
        return
    value, failure = done.result()
    if failure is None:
        future.set_result(value)
    else:
        future.set_exception(unpack_error(failure))
