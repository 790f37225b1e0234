"""Proposes placements for a config and a cluster, ranked by the predicted time of a step. They share or split the
devices in the usual ways and fit into memory.

The ranking is an estimate. Every component gets one rank per device; only rollout ranks of a hosted engine may have
several. Splits into sizes 1, 2, 3, 4, 6, 8, 12 ... devices are tried, also with idle devices: a small model trains
faster on fewer. Layouts of the models, `offload` and micro-batches are searched as well (`variants`), and a hosted
engine gets the share of its GPU that a run would give it. A placement whose plan would warn of nearly full memory does
not fit. Placements that generate one update ahead are ranked apart, because they change results.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from rl_platform.config.layers import put_at
from rl_platform.config.schema import Config
from rl_platform.errors import ConfigError, Problem
from rl_platform.placement.estimates.component_shapes import Shape, shapes
from rl_platform.placement.estimates.engine_memory import derived_memory, derives_memory, with_engine_memory
from rl_platform.placement.estimates.hardware import GIB, Device, Devices, devices_of
from rl_platform.placement.estimates.memory import MemoryModel
from rl_platform.placement.estimates.occupancy import NEARLY_FULL, Crowd, resolved_order
from rl_platform.placement.estimates.policy_device import with_policy_device
from rl_platform.placement.estimates.policy_shape import PolicyShape
from rl_platform.placement.estimates.recomputation import resolved_recomputation
from rl_platform.placement.estimates.running import resolved_running
from rl_platform.placement.estimates.streaming import streaming_chains
from rl_platform.placement.estimates.workload import layout_of_learner
from rl_platform.placement.inventory import Inventory
from rl_platform.placement.layout import LEARNERS
from rl_platform.placement.offload_order import OffloadOrder
from rl_platform.placement.scheduler import schedule
from rl_platform.planner.basis import Basis
from rl_platform.planner.candidates import Candidate, Keys, SearchResult
from rl_platform.planner.config_variants import Changes, Variant, contexts, layouts, micro_batches, one_update_older
from rl_platform.planner.cost import CostModel, swaps, waves
from rl_platform.planner.overlap import overlap
from rl_platform.planner.report import check_known
from rl_platform.planner.split_layout import layout_of_split
from rl_platform.planner.step_timeline import timeline

MANY = 64  # from this number of devices on only powers of two are tried
COARSE = 16  # splits of the first pass give a group at least one device in so many
FOLLOWED = 3  # layouts besides the config's that are tried on all splits
FEWEST = 256  # then also, each of three groups gets at least one device in so many (of four: in MANY)


class Search:
    """All candidates of one config on the devices of `inventory`; see `search`."""

    def __init__(self, config: Config, shapes: Mapping[str, Shape], inventory: Inventory, basis: Basis | None) -> None:
        self.config, self.shapes, self.basis = config, shapes, basis
        self.devices, self.per_node = devices_of(inventory), max(node.num_accelerators for node in inventory.nodes)
        self.device = self.devices.on(range(len(inventory.nodes)))
        self.available = inventory.num_accelerators or len(inventory.nodes)
        self.rollout_devices = max(1, schedule(config.cluster, inventory).layout.parts["rollout"].per_rank)
        self.runs = _runs(self.devices, len(inventory.nodes))
        first, *others = self.runs
        self.first_kind = sum(node.num_accelerators for node in inventory.nodes[: first[1]]) if others else 0
        self.emulated, self.tried = inventory.is_emulated, dict[str, Candidate]()

    def placements(self) -> SearchResult:
        """Tries placements only, on few splits of a large cluster: no other key of the config changes."""
        self._try(Variant(self.config, self.rollout_devices), coarse=self.available > MANY)
        return self._result()

    def run(self) -> SearchResult:
        """Tries every layout of the models on few splits, then the best ones on all and with other micro-batches."""
        configured, *others = layouts(self.config, self.shapes, self.per_node, self.rollout_devices)
        best = {number: self._try(variant, coarse=True) for number, variant in enumerate(others)}
        ranked = sorted((seconds, number) for number, seconds in best.items() if seconds < math.inf)
        for variant in (configured, *(others[number] for _, number in ranked[:FOLLOWED])):
            self._try(variant, coarse=False)
            for other in (*micro_batches(variant), *contexts(self.config, variant, self.shapes, self.per_node)):
                self._try(other, coarse=True)
        if changes := one_update_older(self.config):
            self._try(Variant(changed(self.config, changes), self.rollout_devices, changes), coarse=False)
        return self._result()

    def _result(self) -> SearchResult:
        fitting = sorted((one for one in self.tried.values() if one.fits), key=lambda candidate: candidate.order)
        peaks = [candidate.peak for candidate in self.tried.values() if not candidate.fits]
        return SearchResult(
            tuple(one for one in fitting if not one.ahead),
            len(peaks),
            min(peaks, default=0),
            self.device,
            bool(self.devices.others),
            self.available,
            tuple(one for one in fitting if one.ahead),
        )

    def _try(self, variant: Variant, *, coarse: bool) -> float:
        """Adds the candidates of a variant; returns the seconds of its best that fits."""
        model = CostModel(variant.config, self.shapes, self.devices, self.basis)
        best = math.inf
        groupings = self._groupings()
        # rollouts ahead of training need processes that do not train
        if variant.config.runner.max_staleness > self.config.runner.max_staleness:
            groupings = [one for one in groupings if not any("rollout" in names and "actor" in names for names in one)]
        for keys in _splits(groupings, self.available, self.first_kind, coarse=coarse):
            held = _hold_whole_copies(variant.config, keys, variant.rollout_devices)
            if held and all(self._shares_envs(len(devices)) for names, devices in keys if "env" in names):
                places = self._places(keys)
                identity = f"{places} {variant.rollout_devices} {variant.changes}"
                if identity not in self.tried:
                    self.tried[identity] = self._candidate(variant, model, keys)
                if (candidate := self.tried[identity]).fits:
                    best = min(best, candidate.seconds)
        return best

    def _shares_envs(self, ranks: int) -> bool:
        """Returns whether so many env ranks are predicted: only transformers outweigh their messages at each step."""
        env, policy = self.config.env, self.shapes.get("rollout")
        large = isinstance(policy, PolicyShape) and bool(policy.stacks)
        tasks = max(len(env.tasks), 1)
        return ranks == 1 or (large and env.num_envs % (ranks * tasks) == 0 and env.num_workers % ranks == 0)

    def _candidate(self, variant: Variant, model: CostModel, keys: Keys) -> Candidate:
        wide = variant.rollout_devices
        layout = layout_of_split(keys, self.per_node, wide)
        crowds = [
            (tuple((name, 1 / wide if name == "rollout" else 1.0, 1) for name in names), device)
            for names, devices in keys
            for device in self._kinds(devices)
        ]
        config = variant.config
        if self.per_node and not self.emulated:
            config = with_policy_device(config, layout)
            if config.actor.device == "cpu":  # its memory is that of the node
                crowds = []
        config = resolved_recomputation(config, self.shapes, layout, crowds)
        config, fewer = resolved_running(config, self.shapes, layout, crowds), config
        if config is not fewer:
            model = CostModel(config, self.shapes, self.devices, self.basis)
        memory = MemoryModel(config, self.shapes, layout, on_gpu=self.per_node > 0)
        order = resolved_order(config, memory, crowds)
        if derives_memory(config, self.device, self.per_node):
            try:
                derived = derived_memory(config, memory, order, crowds, self.device.memory or 0)
            except ConfigError:  # not enough memory for one sequence
                return Candidate(keys, (), max(_peaks(memory, crowds, order), default=0), False, wide, variant.changes)
            config = with_engine_memory(config, derived)
            memory = MemoryModel(config, self.shapes, layout, on_gpu=True)
            order = resolved_order(config, memory, crowds)
            model = CostModel(config, self.shapes, self.devices, self.basis)
        streams = {name for chain in streaming_chains(config, layout, order.leaving) for name in chain}
        moves, full_kl = swaps(order, memory, model.rates), config.algorithm.full_kl_in_reward
        costs = model.phases(layout)
        spans = timeline(costs, layout, streams, waves(config, layout), moves, full_kl)
        peaks = _peaks(memory, crowds, order)
        limits = [device.memory for _, device in crowds]
        fits = all(limit is None or peak <= NEARLY_FULL * limit for peak, limit in zip(peaks, limits, strict=True))
        ahead = overlap(spans, layout, config.runner.max_staleness)
        overlapping = None if ahead is None else ahead.seconds
        worked = sum(cost.seconds * layout.parts[name].devices for name, cost in costs.values())
        peak = max(peaks, default=0)
        return Candidate(keys, spans, peak, fits, wide, variant.changes, overlapping, worked)

    def _places(self, keys: Keys) -> Sequence[object]:
        """Returns the part of `keys` that a prediction depends on: the number and kinds of devices, not their order.

        The node counts for a group on one node, because links within a node are faster.
        """
        if not self.devices.others:
            return keys
        places: list[object] = []
        for names, devices in sorted(keys, key=lambda key: key[0]):
            first, last = self._nodes(devices)
            node = first if first == last else None
            places.append((names, len(devices), node, sorted(each.kind for each in self._kinds(devices))))
        return places

    def _nodes(self, devices: range) -> tuple[int, int]:
        """Returns the first and the last node of the devices with these numbers."""
        size = max(self.per_node, 1)
        return devices.start // size, (devices.stop - 1) // size

    def _kinds(self, devices: range) -> set[Device]:
        """Returns the kinds of devices with these numbers."""
        first, last = self._nodes(devices)
        return {kind for start, stop, kind in self.runs if start <= last and first < stop}

    def _groupings(self) -> Sequence[tuple[tuple[str, ...], ...]]:
        """Returns the groupings, each in every order if there are several kinds of devices."""
        groupings = _groupings(self.config)
        if not self.devices.others:
            return groupings
        return [order for grouping in groupings for order in itertools.permutations(grouping)]


def search(
    config: Config, inventory: Inventory, basis: Basis | None = None, *, placements_only: bool = False
) -> SearchResult:
    """Returns all candidates on the devices of `inventory`. Raises ConfigError for an unknown model or if none fits.

    placements_only: without candidates that change other keys.
    """
    known_shapes, unknown = shapes(config)
    check_known(unknown)
    searching = Search(config, known_shapes, inventory, basis)
    result = searching.placements() if placements_only else searching.run()
    if not result.candidates and not result.too_large:
        message = f"on {result.available} devices no placement gives the models ranks that their layouts divide"
        raise ConfigError([Problem("cluster.component_placement", message, hint="smaller actor.parallel sizes")])
    if not result.candidates:
        room = NEARLY_FULL * (result.device.memory or 0) / GIB
        needed = (
            f"{result.smallest_peak / GIB:.1f} GiB on its fullest device, {NEARLY_FULL:.0%} of {result.device.kind}"
        )
        message = f"none of {result.too_large} placements fits into memory: the leanest needs {needed} is {room:.1f}"
        hint = "more GPUs, smaller micro-batches (actor.micro_batch_size), or fewer rollout.max_running_requests"
        raise ConfigError([Problem("cluster.component_placement", message, hint=hint)])
    return result


def _peaks(memory: MemoryModel, crowds: Sequence[Crowd], order: OffloadOrder) -> list[int]:
    """Returns the most bytes in use on each device."""
    return [memory.usage(crowd, order).peak for crowd, _ in crowds]


def changed(config: Config, changes: Changes) -> Config:
    """Returns the config with other values of keys, as `runner.max_staleness`."""
    tree = config.model_dump()
    for key, value in changes.items():
        put_at(tree, key, value)
    return Config.model_validate(tree)


def _runs(devices: Devices, nodes: int) -> list[tuple[int, int, Device]]:
    """Returns the runs of neighbouring nodes of one kind: the first node, the one after the last, and their device."""
    if not devices.others:
        return [(0, nodes, devices.main)]
    runs = [(list(run), device) for device, run in itertools.groupby(range(nodes), lambda node: devices.on([node]))]
    return [(run[0], run[-1] + 1, device) for run, device in runs]


def _groupings(config: Config) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Returns groups of components that share devices: from all together to each alone."""
    if config.runner.task_type == "embodied":
        return ((("actor_critic", "env", "rollout"),), (("actor_critic",), ("env", "rollout")))
    critic = ("critic",) if config.critic.use_critic_model else ()
    reference = ("reference",) if config.has_reference else ()
    generating = ("rollout", "reward")
    wanted = [
        (("actor", *critic, *reference, *generating),),
        (("actor", *critic, *reference), generating),
        (("actor", *reference), critic, generating),
        (("actor",), (*critic, *reference), generating),
        (("actor", *critic), reference, generating),
        (("actor", *reference, *generating), critic),
        (("actor",), critic, reference, generating),
    ]
    return tuple(dict.fromkeys(grouping for grouping in wanted if all(grouping)))


def _splits(
    groupings: Sequence[tuple[tuple[str, ...], ...]], available: int, first_kind: int = 0, *, coarse: bool = False
) -> Iterator[Keys]:
    """Yields every grouping on every combination of sizes that the devices allow. coarse: on few of them.

    first_kind: devices before those of another kind.
    """
    sizes = sorted({*_sizes(available), *({first_kind, available - first_kind} if first_kind else ())})
    if coarse:
        sizes = [size for size in sizes if size & (size - 1) == 0 and size >= available / COARSE] or sizes
    large = [size for size in sizes if size >= available / FEWEST] if available > MANY else sizes
    powers = [size for size in large if size & (size - 1) == 0 and size >= available / MANY]
    for grouping in groupings:
        tried = sizes if len(grouping) < 3 else large if len(grouping) == 3 else powers
        for combination in itertools.product(tried, repeat=len(grouping)):
            if sum(combination) > available:
                continue
            stops = list(itertools.accumulate(combination))
            ranges = (range(stop - size, stop) for stop, size in zip(stops, combination, strict=True))
            yield tuple(zip(grouping, ranges, strict=True))


def _hold_whole_copies(config: Config, keys: Keys, rollout_devices: int) -> bool:
    """Returns whether every model has as many ranks as its layout divides, and every rank of the rollout its
    devices."""
    for names, devices in keys:
        if "rollout" in names and (len(devices) % rollout_devices or devices.start % rollout_devices):
            return False
        for name in set(names) & set(LEARNERS):
            if len(devices) % layout_of_learner(config.section(name)).ranks:
                return False
    return True


def _sizes(available: int) -> list[int]:
    """Returns 1, 2, 3, 4, 6, 8, 12 ..., all devices, and their remainders if there are few devices."""
    powers = [2**exponent for exponent in range(available.bit_length())]
    sizes = {size for size in powers if size <= available} | {available}
    if available <= MANY:
        sizes |= {3 * size for size in powers if 3 * size <= available}
    return sorted(sizes)
