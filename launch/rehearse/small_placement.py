"""A small placement of the same shape: fewer ranks and devices, the same sharing.

Devices that the same keys use form a set. Every set keeps at least one device, so keys that share devices still share
some, and keys that share none still share none. All devices are CPU workers of one machine.

Pure: nothing is started, and no machine is looked at.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rl_platform.config.schema import Config
from rl_platform.config.schema.models import Parallel
from rl_platform.placement.estimates.workload import data_parallel
from rl_platform.placement.layout import LEARNERS
from rl_platform.placement.scheduler import Placement

MOST_DEVICES_PER_SET = 8
Device = tuple[int, int]  # node, local number


@dataclass(frozen=True)
class Copies:
    """The ranks of a learner: a multiple of `unit`; `copy` of them hold the model; `several`: more than one copy."""

    unit: int
    copy: int
    several: bool

    def allow(self, ranks: int) -> bool:
        return ranks % self.unit == 0 and (ranks // self.copy > 1) == self.several


@dataclass(frozen=True)
class _Key:
    """A key of `component_placement`.

    per_rank: devices of one rank; per_device: ranks that share one device. Both are cut to 1 or 2.
    """

    text: str
    components: tuple[str, ...]
    devices: frozenset[Device]
    ranks: int
    per_rank: int
    per_device: int
    copies: tuple[Copies, ...]

    def allows(self, ranks: int) -> bool:
        """Returns whether a rehearsal with so many ranks keeps what is larger than 1 larger than 1."""
        if ranks < min(self.ranks, 2) or (self.ranks == 1 and ranks > 1):
            return False
        return all(each.allow(ranks) for each in self.copies)

    def ranks_of(self, devices: int) -> int | None:
        """Returns the ranks on `devices`, None if they do not share them evenly."""
        return None if devices % self.per_rank else devices * self.per_device // self.per_rank


def small_parallel(parallel: Parallel) -> Parallel:
    """Returns the layout with every kind of parallelism that is larger than 1 cut to 2."""
    cut = {name: min(getattr(parallel, name), 2) for name in ("tensor", "pipeline", "expert", "context")}
    return parallel.model_copy(update=cut | {"virtual_pipeline": min(parallel.virtual_pipeline, 2)})


def copies_of(config: Config, role: str, ranks: int) -> Copies:
    """Returns what the ranks of a learner with `ranks` ranks must be in a rehearsal."""
    section = config.section(role)
    small = small_parallel(section.parallel)
    several = data_parallel(section, ranks) > 1
    if section.training_backend == "megatron":
        return Copies(small.ranks, small.tensor * small.pipeline * small.context, several)
    return Copies(small.context, small.context, several)


def small_cluster(config: Config, placement: Placement) -> dict[str, object]:
    """Returns the keys of the section `cluster` of a rehearsal that differ from the config's."""
    keys = list(_keys(config, placement))
    sets = _device_sets(keys)
    sizes = _sizes(keys, sets)
    numbers = itertools.count()
    devices = {users: [next(numbers) for _ in range(size)] for users, size in zip(sets, sizes, strict=True)}
    total = sum(sizes)
    entries = {key.text: _entry(key, devices, bool(total)) for key in keys}
    alone: dict[str, object] = {"devices_per_node": total} if total else {"gpus_per_node": 0}
    return {
        "num_nodes": 1,
        "gpus_per_node": None,
        "devices_per_node": None,
        "inventory": None,
        "address": None,
        "node_groups": [],
        "reallocate": "off",
        **alone,
        "component_placement": entries,
    }


def _keys(config: Config, placement: Placement) -> Iterator[_Key]:
    for text in config.cluster.component_placement:
        components = tuple(name.strip() for name in text.split(","))
        slots = placement.components[components[0]]
        devices = frozenset((slot.node, local) for slot in slots for local in slot.accelerators)
        per_rank = max(len(slot.accelerators) for slot in slots)
        copies = tuple(copies_of(config, name, len(slots)) for name in components if name in LEARNERS)
        per_device = 2 if devices and len(slots) > len(devices) else 1
        yield _Key(text, components, devices, len(slots), min(max(per_rank, 1), 2), per_device, copies)


def _device_sets(keys: Sequence[_Key]) -> dict[frozenset[str], int]:
    """Returns the number of devices of each set, by the keys that use it, in the order of their first device."""
    users: dict[Device, set[str]] = {}
    for key in keys:
        for device in key.devices:
            users.setdefault(device, set()).add(key.text)
    counts: dict[frozenset[str], int] = {}
    for device in sorted(users):
        name = frozenset(users[device])
        counts[name] = counts.get(name, 0) + 1
    return counts


def _sizes(keys: Sequence[_Key], sets: Mapping[frozenset[str], int]) -> tuple[int, ...]:
    """Returns the smallest number of devices of each set with which every key has ranks that it allows."""
    choices = [range(1, min(count, MOST_DEVICES_PER_SET) + 1) for count in sets.values()]
    owners = {key.text: key for key in keys}

    def fits(sizes: tuple[int, ...]) -> bool:
        pairs = list(zip(sets, sizes, strict=True))
        for key in keys:
            if not key.devices:
                continue
            mine = [size for users, size in pairs if key.text in users]
            ranks = key.ranks_of(sum(mine))
            if ranks is None or not key.allows(ranks):
                return False
        return all(size % max(owners[user].per_rank for user in users) == 0 for users, size in pairs)

    fitting = (sizes for sizes in itertools.product(*choices) if fits(sizes))
    return min(fitting, key=lambda sizes: (sum(sizes), sizes), default=tuple(sets.values()))


def _entry(key: _Key, devices: Mapping[frozenset[str], list[int]], has_devices: bool) -> object:
    if not key.devices:
        ranks = next(ranks for ranks in itertools.count(1) if key.allows(ranks))
        text = "0" if ranks == 1 else f"0:0-{ranks - 1}"
        return {"node_group": "node", "placement": text} if has_devices else text
    mine = sorted(device for users, numbers in devices.items() if key.text in users for device in numbers)
    segments, rank = [], 0
    for first, last in _runs(mine):
        count = (last - first + 1) * key.per_device // key.per_rank
        segments.append(f"{_span(first, last)}:{_span(rank, rank + count - 1)}")
        rank += count
    return ",".join(segments)


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields the first and last number of every run without a gap."""
    start = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
            yield numbers[start], numbers[end - 1]
            start = end


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"
