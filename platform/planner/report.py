"""The report of `--plan` on one config: ranks and memory of each GPU, one step in time, batches, warnings.

All numbers are estimates; nothing is started. `report_text`, `report_json` and `svg` draw it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from rl_platform.config.rollout_backend import HOSTED
from rl_platform.config.schema import Config
from rl_platform.errors import ConfigError, Problem
from rl_platform.placement.estimates.component_shapes import Shape, shapes
from rl_platform.placement.estimates.engine_memory import engine_memory, with_engine_memory
from rl_platform.placement.estimates.hardware import ASSUMED, GIB, Device, Devices, devices_of
from rl_platform.placement.estimates.memory import MemoryModel, Usage
from rl_platform.placement.estimates.occupancy import NEARLY_FULL, chosen_order, occupancy_of
from rl_platform.placement.estimates.policy_device import policy_device_text, with_policy_device
from rl_platform.placement.estimates.recomputation import recomputation_text, with_recomputation
from rl_platform.placement.estimates.running import running_text, with_running_sequences
from rl_platform.placement.estimates.streaming import streaming_chains
from rl_platform.placement.inventory import Inventory
from rl_platform.placement.layout import Layout
from rl_platform.placement.offload_order import OffloadOrder
from rl_platform.placement.scheduler import Placement
from rl_platform.planner.basis import Basis
from rl_platform.planner.batches import Division, divisions
from rl_platform.planner.cost import CostModel, OtherWork, swaps, waves
from rl_platform.planner.lengths import Lengths
from rl_platform.planner.overlap import Overlap, overlap
from rl_platform.planner.placement_text import number_ranges
from rl_platform.planner.step_timeline import Span, step_seconds, timeline


@dataclass(frozen=True)
class DeviceUse:
    """One GPU, or the main memory of a node with ranks without a GPU.

    number, local: of the GPU in the cluster and in its node, None for main memory. ranks: its ranks by component.
    expected: its usage with sequences of mean length.
    """

    node: int
    local: int | None
    number: int | None
    ranks: Mapping[str, tuple[int, ...]]
    usage: Usage
    expected: Usage


@dataclass(frozen=True)
class Report:
    """The report. unknown: components with an unknown model, and why. streams: components that evaluate early.

    works: component and seconds of each phase, with its moves, without waiting. other_work: work outside the phases of
    a step. decisions: values that the run chooses for `auto`, in words.
    """

    config: Config
    placement: Placement
    inventory: Inventory
    devices_by_node: Devices
    layout: Layout
    shapes: Mapping[str, Shape]
    unknown: Mapping[str, str]
    devices: tuple[DeviceUse, ...]
    works: Mapping[str, tuple[str, float]]
    spans: tuple[Span, ...]
    divisions: tuple[Division, ...]
    order: OffloadOrder
    streams: frozenset[str]
    other_work: tuple[OtherWork, ...]
    lengths: Lengths
    source: str  # of the rates
    decisions: tuple[str, ...]

    @cached_property
    def device(self) -> Device:
        """The device of the used nodes; of several kinds the lowest rates of all."""
        return self.devices_by_node.on(
            sorted(frozenset[int]().union(*(part.nodes for part in self.layout.parts.values())))
        )

    @property
    def mean_seconds(self) -> float:
        """Seconds of a step with its share of the work outside the phases."""
        return self.seconds + sum(work.per_step for work in self.other_work)

    @property
    def seconds(self) -> float:
        return step_seconds(self.spans)

    @property
    def overlap(self) -> Overlap | None:
        """Steps of a run whose generation is ahead of training; None if they alternate."""
        return overlap(self.spans, self.layout, self.config.runner.max_staleness)

    def capacity(self, use: DeviceUse) -> int | None:
        """Returns the memory of a device in bytes; None if not known."""
        return self.inventory.nodes[use.node].memory if use.number is None else self.gpu(use).memory

    def gpu(self, use: DeviceUse) -> Device:
        """Returns the kind of a GPU."""
        return self.devices_by_node.on([use.node])

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for the user, the gravest first."""
        placed = (*_rank_warnings(self), *_idle_warnings(self), *_unknown_warnings(self))
        return (*_memory_warnings(self), *_offload_warnings(self), *placed)


def check_known(unknown: Mapping[str, str]) -> None:
    """Raises ConfigError if the model of a component is unknown. unknown: component -> why."""
    if unknown:
        problems = [Problem(f"{name}.model", f"nothing can be predicted: {why}") for name, why in unknown.items()]
        raise ConfigError([problem for problem in problems if problem.key != "rollout.model"])


def plan_report(config: Config, placement: Placement, inventory: Inventory, basis: Basis | None = None) -> Report:
    """Returns the report on `placement`, computed from `inventory`."""
    devices, layout, asked = devices_of(inventory), placement.layout, config
    placed = config if inventory.is_emulated else with_policy_device(config, layout)
    config = with_recomputation(placed, placement, inventory)
    decided = recomputation_text(placed, config), policy_device_text(asked, config)
    known_shapes, unknown = shapes(config)
    engine, config = _engine(config, placement, inventory)
    config, fewer = with_running_sequences(config, placement, inventory), config
    order = chosen_order(config, placement, known_shapes, inventory)
    streams = frozenset(name for chain in streaming_chains(config, layout, order.leaving) for name in chain)
    memory = MemoryModel(config, known_shapes, layout, on_gpu=True)
    model = CostModel(config, known_shapes, devices, basis)
    costs, moves, full_kl = model.phases(layout), swaps(order, memory, model.rates), config.algorithm.full_kl_in_reward
    unknown = {name: reason for name, reason in unknown.items() if name in layout.parts}
    return Report(
        config=config,
        placement=placement,
        inventory=inventory,
        devices_by_node=devices,
        layout=layout,
        shapes=known_shapes,
        unknown=unknown,
        devices=tuple(_devices(config, known_shapes, placement, inventory, layout, order, model.lengths)),
        works={
            phase: (name, cost.seconds + (moves[phase].seconds if phase in moves else 0.0))
            for phase, (name, cost) in costs.items()
        },
        spans=timeline(costs, layout, streams, waves(config, layout), moves, full_kl),
        divisions=divisions(config, layout),
        order=order,
        streams=streams,
        other_work=model.other_work(layout),
        lengths=model.lengths,
        source=model.rates.source,
        decisions=tuple(text for text in (*decided, engine, running_text(fewer, config)) if text is not None),
    )


def _engine(config: Config, placement: Placement, inventory: Inventory) -> tuple[str | None, Config]:
    """Returns the share of a GPU that a hosted engine takes, or why it has none, in words; and the config with it."""
    try:
        derived = engine_memory(config, placement, inventory)
    except ConfigError as error:
        return f"rollout: {error.problems[0].message}", config
    return (None if derived is None else str(derived)), with_engine_memory(config, derived)


def _devices(
    config: Config,
    known_shapes: Mapping[str, Shape],
    placement: Placement,
    inventory: Inventory,
    layout: Layout,
    order: OffloadOrder,
    lengths: Lengths,
) -> Iterator[DeviceUse]:
    """Yields every GPU in order, then every node with ranks without one. Equal GPUs are estimated once."""
    occupancy = occupancy_of(config, placement)
    models = {
        on_gpu: [MemoryModel(one, known_shapes, layout, on_gpu=on_gpu) for one in (config, _of_length(config, lengths))]
        for on_gpu in (True, False)
    }
    known_usages: dict[object, list[Usage]] = {}

    def use(node: int, local: int | None, number: int | None) -> DeviceUse:
        occupants = occupancy.get((node, local), ())
        kind = (number is None, tuple(occupant.counted for occupant in occupants))
        if kind not in known_usages:
            on_gpu = number is not None and not inventory.is_emulated
            known_usages[kind] = [model.usage(kind[1], order) for model in models[on_gpu]]
        return DeviceUse(node, local, number, {one.component: one.ranks for one in occupants}, *known_usages[kind])

    number = 0
    for node, entry in enumerate(inventory.nodes):
        for local in range(entry.num_accelerators):
            yield use(node, local, number)
            number += 1
    yield from (use(node, None, None) for node in sorted(node for node, local in occupancy if local is None))


def _of_length(config: Config, lengths: Lengths) -> Config:
    """Returns the config with prompts and responses of mean length as their limits."""
    if config.runner.task_type == "embodied":
        return config
    response = math.ceil(lengths.response + lengths.inserted)
    return config.changed({"data.max_prompt_length": math.ceil(lengths.prompt), "data.max_response_length": response})


def _memory_warnings(report: Report) -> Iterator[str]:
    full: dict[tuple[bool, int, int], list[DeviceUse]] = {}
    for use in report.devices:
        capacity = report.capacity(use)
        if capacity is not None and use.usage.peak > NEARLY_FULL * capacity:
            full.setdefault((use.number is None, use.usage.peak, capacity), []).append(use)
    for (on_node, peak, capacity), uses in full.items():
        where = names_of(uses, report.inventory)
        verb = "cannot hold" if peak > capacity else "would be nearly full with"
        limit = f"{'the node' if on_node else report.gpu(uses[0]).kind} has {capacity / GIB:.1f} GiB"
        largest = max(uses[0].usage.components, key=lambda name: uses[0].usage.components[name].total)
        remedy = _remedy(report, largest, capacity)
        yield f"{where} {verb} {peak / GIB:.1f} GiB: {limit}; {largest} is the largest: {remedy}"


def _remedy(report: Report, component: str, capacity: int) -> str:
    """Returns what makes a component smaller that is the largest on a device of `capacity` bytes."""
    memory = MemoryModel(report.config, report.shapes, report.layout, on_gpu=True).rank(component)
    own = ", or GPUs of its own" if report.layout.sharing[component] else ""
    if component == "rollout":
        if memory.weights > capacity:
            return "its weights alone are larger: more GPUs for each rank (rollout.backend sglang or vllm)"
        return f"fewer sequences at once (rollout.max_running_requests){own}"
    if component == "reference":
        return f"more ranks, over which its parameters are sharded{own}"
    if component == "reward":
        return f"fewer responses at once (reward.max_batch_size){own}"
    if memory.activations > memory.lasting + memory.gradients:
        return f"a smaller {'critic' if component == 'critic' else 'actor'}.micro_batch_size"
    return f"more ranks, over which its parameters and optimizer are sharded{own}"


def _offload_warnings(report: Report) -> Iterator[str]:
    """Yields warnings where `offload: true` saves nothing."""
    for name, asked in report.config.offload_keys.items():
        if name not in report.layout.parts or asked is not True:
            continue
        if name not in report.order.leaving:
            alone = not report.layout.sharing[name]
            reason = "no other component uses its devices" if alone else "it generates with the actor's own weights"
            yield f"{name}.offload: {reason}, so it stays"
        elif report.device.kind == "cpu":
            yield f"{name}.offload: on a CPU it leaves main memory for main memory, which takes time and saves nothing"


def _rank_warnings(report: Report) -> Iterator[str]:
    for division in report.divisions:
        if division.idle_ranks:
            yield f"{division}; use {division.rows} ranks or fewer, or a larger {division.key.partition(' ')[0]}"
        elif not division.even and division.most > 1:
            yield f"{division}: the ranks do not divide it, so some wait for others"
    for name, part in report.layout.parts.items():
        several = part.per_rank > 1
        if several and not (name == "rollout" and report.config.rollout.backend in HOSTED):
            yield f"{name}: a rank owns {part.per_rank} GPUs and computes on the first; give every rank one"


def _idle_warnings(report: Report) -> Iterator[str]:
    owned = frozenset[tuple[int, int]]().union(*report.placement.accelerators.values())
    idle = [use for use in report.devices if use.local is not None and (use.node, use.local) not in owned]
    if idle:
        names = names_of(idle, report.inventory)
        yield f"{names} {'is' if len(idle) == 1 else 'are'} used by no component"


def _unknown_warnings(report: Report) -> Iterator[str]:
    for reason in dict.fromkeys(report.unknown.values()):
        names = [name for name, why in report.unknown.items() if why == reason]
        yield f"no estimate for {', '.join(names)}: {reason}"
    if not report.device.known:
        yield (
            f"the kind of GPU is not known, so times are those of an {ASSUMED} and memory has no limit; "
            "cluster.inventory: {nodes, gpus_per_node, gpu} names it"
        )


def names_of(uses: Sequence[DeviceUse], inventory: Inventory) -> str:
    """Returns `GPU 0-3,8`, `CPU worker 0`, or the nodes' names."""
    numbers = [use.number for use in uses if use.number is not None]
    if numbers:
        return f"{inventory.noun} {number_ranges(numbers)}"
    names = [inventory.nodes[use.node].name for use in uses]
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
