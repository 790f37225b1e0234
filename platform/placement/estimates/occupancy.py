"""The ranks on each device. If they do not fit together, components leave for host memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rl_platform.config.rollout_backend import HOSTED
from rl_platform.config.schema import Config
from rl_platform.placement.estimates.component_shapes import Shape, shapes
from rl_platform.placement.estimates.hardware import Device, devices_of
from rl_platform.placement.estimates.memory import Counted, MemoryModel
from rl_platform.placement.inventory import Inventory
from rl_platform.placement.offload_order import OffloadOrder, asked_to_leave, order_with
from rl_platform.placement.scheduler import Placement

NEARLY_FULL = 0.9  # of a device's memory; the rest is for memory that the estimate leaves out


Crowd = tuple[tuple[Counted, ...], Device]
"""The components on a device, as `MemoryModel.usage` counts them, and the device."""


@dataclass(frozen=True)
class Occupant:
    """A component on one device: its ranks there, and the memory of how many ranks."""

    component: str
    ranks: tuple[int, ...]
    share: float

    @property
    def counted(self) -> Counted:
        return self.component, self.share, len(self.ranks)


def occupancy_of(config: Config, placement: Placement) -> dict[tuple[int, int | None], tuple[Occupant, ...]]:
    """Returns the components on every used GPU (node, local number), and on nodes for ranks without one (node, None).

    A rank computes on the first of its GPUs, a rollout engine for several GPUs on all of them. With `actor.device: cpu`
    an embodied run uses no GPU.
    """
    ranks: dict[tuple[int, int | None], dict[str, list[int]]] = {}
    shares: dict[tuple[int, int | None], dict[str, float]] = {}
    spread = config.rollout.backend in HOSTED
    on_cpu = config.actor.device == "cpu" and not placement.emulated
    for name, slots in placement.components.items():
        for slot in slots:
            for position, local in enumerate((not on_cpu and slot.accelerators) or (None,)):
                key = (slot.node, local)
                ranks.setdefault(key, {}).setdefault(name, []).append(slot.rank)
                even = spread and name == "rollout"
                share = 1 / max(len(slot.accelerators), 1) if even else float(position == 0)
                known = shares.setdefault(key, {})
                known[name] = known.get(name, 0.0) + share
    return {
        key: tuple(Occupant(name, tuple(numbers), shares[key][name]) for name, numbers in held.items())
        for key, held in ranks.items()
    }


def offload_order(config: Config, placement: Placement, inventory: Inventory) -> OffloadOrder:
    """Returns the offload order of a run. Models that cannot be counted leave only if `offload` is true."""
    return chosen_order(config, placement, shapes(config)[0], inventory)


def chosen_order(
    config: Config, placement: Placement, known_shapes: Mapping[str, Shape], inventory: Inventory
) -> OffloadOrder:
    """Returns the order of a placement: `resolved_order` on its used GPUs."""
    memory = MemoryModel(config, known_shapes, placement.layout, on_gpu=True)
    return resolved_order(config, memory, crowds_of(config, placement, inventory))


def crowds_of(config: Config, placement: Placement, inventory: Inventory) -> set[Crowd]:
    """Returns the components on each used GPU, and the GPU; equal ones once."""
    devices, occupied = devices_of(inventory), occupancy_of(config, placement).items()
    return {
        (tuple(one.counted for one in occupants), devices.on([node]))
        for (node, local), occupants in occupied
        if local is not None
    }


def full_crowds(memory: MemoryModel, crowds: Iterable[Crowd], order: OffloadOrder) -> list[tuple[Counted, ...]]:
    """Returns the components on GPUs that cannot hold them.

    Unknown memory counts as enough; a CPU's memory is the host's.
    """
    return [
        crowd
        for crowd, device in crowds
        if device.memory is not None
        and device.kind != "cpu"
        and memory.usage(crowd, order).peak > NEARLY_FULL * device.memory
    ]


def resolved_order(config: Config, memory: MemoryModel, crowds: Iterable[Crowd]) -> OffloadOrder:
    """Returns the order: components with `offload` true leave, and those with auto on a device that cannot hold all."""
    layout = memory.layout
    asked, auto = asked_to_leave(config, layout, True), asked_to_leave(config, layout, "auto")
    order = order_with(config, layout, asked)
    if not auto or not (full := full_crowds(memory, crowds, order)):
        return order
    return order_with(config, layout, asked | (auto & {name for crowd in full for name, _, _ in crowd}))
