"""Plans of a config with other sizes: devices, longest responses, batches; the sliders of `--plan=html`.

Each value of a slider is a list of overrides as a user types them, so every planned config passes the same checks.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from rl_platform.config.schema import Config
from rl_platform.errors import ConfigError
from rl_platform.placement.grammar import Entry, Segment, read
from rl_platform.placement.inventory import Inventory
from rl_platform.planner.lengths import Lengths
from rl_platform.planner.report import Report

FACTORS = tuple(map(Fraction, ("1/4", "1/2", "1", "2", "4")))
WHOLE_NODE = 8  # GPUs of one machine, from which on more GPUs are more machines


@dataclass(frozen=True)
class Choice:
    """One value of a slider. factor: in multiples of the config's value."""

    value: int
    factor: Fraction
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Slider:
    """A size that may change, and its values in ascending order."""

    name: str
    choices: tuple[Choice, ...]

    @property
    def own(self) -> int:
        """The index of the config's own value."""
        return next(index for index, choice in enumerate(self.choices) if choice.factor == 1)


@dataclass(frozen=True)
class Point:
    """One choice of every slider, and its report, or the reason why such a config is refused."""

    overrides: tuple[str, ...]
    report: Report | None
    refusal: str = ""


def sliders(config: Config, inventory: Inventory) -> tuple[Slider, ...]:
    """Returns the sliders with at least two values."""
    data, env = config.data, config.env
    if config.runner.task_type == "embodied":
        length = _multiples("steps per environment", {"env.rollout_steps": env.rollout_steps})
        batch = _multiples("environments", {"env.num_envs": env.num_envs})
    else:
        length = Slider("longest response (tokens)", tuple(_lengths(config)))
        rows = {"data.train_batch_size": data.train_batch_size, "data.mini_batch_size": data.mini_batch_size}
        batch = _multiples("prompts per step", rows)
    devices = Slider(f"{inventory.noun}s", tuple(_devices(config, inventory)))
    return tuple(slider for slider in (devices, length, batch) if len(slider.choices) > 1)


def points(chosen: Sequence[Slider], plan: Callable[[Sequence[str]], Report]) -> dict[tuple[int, ...], Point]:
    """Returns the point of every combination of choices, by their indices. plan: of the config with overrides."""
    result = {}
    for indices in itertools.product(*(range(len(slider.choices)) for slider in chosen)):
        choices = [slider.choices[index] for slider, index in zip(chosen, indices, strict=True)]
        overrides = tuple(override for choice in choices for override in choice.overrides)
        try:
            result[indices] = Point(overrides, plan(overrides))
        except ConfigError as error:
            problem = error.problems[0]
            result[indices] = Point(overrides, None, f"{problem.key}: {problem.message}")
    return result


def stretched(lengths: Lengths, longest: int, former: int) -> Lengths:
    """Returns measured lengths for another longest response: all responses change in the same proportion."""
    responses = (max(1, round(length * longest / former)) for length in lengths.responses)
    return replace(lengths, responses=tuple(responses))


def _multiples(name: str, keys: Mapping[str, int]) -> Slider:
    """Returns a slider of the first of `keys`, with the others in proportion, as far as they stay whole."""
    choices = []
    for factor in FACTORS:
        values = {key: value * factor for key, value in keys.items()}
        if all(value.denominator == 1 for value in values.values()):
            overrides = () if factor == 1 else tuple(f"{key}={value}" for key, value in values.items())
            choices.append(Choice(int(next(iter(values.values()))), factor, overrides))
    return Slider(name, tuple(choices))


def _lengths(config: Config) -> Iterator[Choice]:
    """Yields other longest responses, with larger micro-batches where they would not hold the longest sequence."""
    own, sampling = config.data.max_response_length, config.rollout.sampling.max_new_tokens
    for choice in _multiples("", {"data.max_response_length": own}).choices:
        overrides = list(choice.overrides)
        if choice.factor != 1 and sampling is not None:
            overrides.append(f"rollout.sampling.max_new_tokens={int(sampling * choice.factor)}")
        mean = config.data.expected_response_length
        if choice.factor != 1 and mean is not None:
            overrides.append(f"data.expected_response_length={max(1, int(mean * choice.factor))}")
        for role in ("actor", "critic"):
            held = config.section(role).max_tokens_per_micro_batch
            if held is not None and held < config.data.longest_sequence + choice.value - own:
                overrides.append(f"{role}.max_tokens_per_micro_batch={int(held * choice.factor)}")
        yield replace(choice, overrides=tuple(overrides))


def _devices(config: Config, inventory: Inventory) -> list[Choice]:
    """Returns other numbers of machines, or of devices if there is one machine; the placement grows with them.

    Empty without devices, and for clusters whose nodes are in groups.
    """
    total = inventory.num_accelerators
    if not total or config.cluster.node_groups:
        return []
    nodes, per_node = len(inventory.nodes), total // len(inventory.nodes)
    choices = []
    for factor in FACTORS:
        more_nodes = factor if nodes > 1 or (factor > 1 and per_node >= WHOLE_NODE) else Fraction(1)
        overrides = _resized(config, inventory, factor, more_nodes)
        if overrides is not None:
            choices.append(Choice(int(total * factor), factor, () if factor == 1 else overrides))
    return choices


def grown(config: Config, inventory: Inventory, total: int) -> tuple[str, ...] | None:
    """Returns the overrides for a cluster of `total` devices, with placement, batches and environments in proportion.

    None without devices, for clusters whose nodes are in groups, and where numbers would not stay whole.
    """
    if not inventory.num_accelerators or config.cluster.node_groups:
        return None
    factor, nodes = Fraction(total, inventory.num_accelerators), len(inventory.nodes)
    several = nodes > 1 or inventory.num_accelerators >= WHOLE_NODE
    placed = _resized(config, inventory, factor, factor if several else Fraction(total, WHOLE_NODE))
    embodied = config.runner.task_type == "embodied"
    rows = {"data.mini_batch_size": config.data.mini_batch_size * factor}
    if config.critic.mini_batch_size is not None:
        rows["critic.mini_batch_size"] = config.critic.mini_batch_size * factor
    if embodied:
        rows["env.num_envs"] = config.env.num_envs * factor
    else:
        rows["data.train_batch_size"] = config.data.train_batch_size * factor
    if placed is None or any(value.denominator != 1 for value in rows.values()):
        return None
    return (*placed, *(f"{key}={value}" for key, value in rows.items()))


def _resized(config: Config, inventory: Inventory, factor: Fraction, more_nodes: Fraction) -> tuple[str, ...] | None:
    """Returns the overrides for `factor` times as many devices on `more_nodes` times as many machines; None where
    numbers would not stay whole."""
    nodes, per_node = len(inventory.nodes), inventory.num_accelerators // len(inventory.nodes)
    sizes = nodes * more_nodes, per_node * factor / more_nodes
    entries, _ = read(config.cluster.component_placement)
    placement = {
        ",".join(entry.components): _scaled(entry, factor if entry.node_group is None else more_nodes)
        for entry in entries
    }
    if any(size.denominator != 1 for size in sizes) or None in placement.values():
        return None
    placed = f"cluster.component_placement={json.dumps(placement)}"
    return (*_cluster(config, inventory, *map(int, sizes)), placed)


def _cluster(config: Config, inventory: Inventory, nodes: int, per_node: int) -> tuple[str, ...]:
    if inventory.is_emulated:
        return f"cluster.num_nodes={nodes}", f"cluster.devices_per_node={per_node}"
    counts = f"cluster.num_nodes={nodes}", f"cluster.gpus_per_node={per_node}"
    if config.cluster.inventory is None:
        return counts
    return *counts, f"cluster.inventory.nodes={nodes}", f"cluster.inventory.gpus_per_node={per_node}"


def _scaled(entry: Entry, factor: Fraction) -> object:
    """Returns the placement of an entry on more or fewer resources; None if its numbers would not stay whole."""
    segments = []
    for segment in entry.segments:
        resources, ranks = _range(segment.resources, factor), _range(segment.ranks, factor)
        if (resources is None) != (segment.resources is None) or (ranks is None) != (segment.ranks is None):
            return None
        segments.append(str(Segment(resources, ranks)))
    text = ",".join(segments)
    return text if entry.node_group is None else {"node_group": entry.node_group, "placement": text}


def _range(span: range | None, factor: Fraction) -> range | None:
    if span is None:
        return None
    first, stop = span.start * factor, span.stop * factor
    return range(int(first), int(stop)) if first.denominator == stop.denominator == 1 else None
