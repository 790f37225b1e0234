"""Variants of a config that compute the same update: other splits of the models, and other micro-batches.

A variant changes the layout of the models: tensor, pipeline and expert parallelism if Megatron trains them, context
parallelism of long sequences, and the GPUs of a hosted engine's rollout rank. It may also change `offload` or the size
of the learners' micro-batches. `one_update_older` is the only one that changes results.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from rl_platform.config.rollout_backend import HOSTED
from rl_platform.config.schema import Config
from rl_platform.config.schema.models import Parallel
from rl_platform.placement.estimates.component_shapes import Shape
from rl_platform.placement.estimates.model_shape import ModelShape
from rl_platform.placement.estimates.workload import layout_of_learner
from rl_platform.placement.layout import LEARNERS

STAGES = (1, 2, 4, 8)  # tried pipeline sizes
FACTORS = (0.25, 0.5, 2, 4, 8)  # tried sizes of a micro-batch, in multiples of the config's

LONG = 4096  # tokens of a sequence from which on context parallelism is tried

Changes = Mapping[str, object]
"""Key of a config -> its new value."""


@dataclass(frozen=True)
class Variant:
    """A config with changed keys. rollout_devices: GPUs of a rollout rank."""

    config: Config
    rollout_devices: int
    changes: Changes = field(default_factory=dict)


def layouts(config: Config, shapes: Mapping[str, Shape], per_node: int, rollout_devices: int) -> Iterator[Variant]:
    """Yields the config itself, then its variants with other splits of the models on nodes of `per_node` GPUs."""
    yield Variant(config, rollout_devices)
    if kept := {f"{name}.offload": "auto" for name, asked in config.offload_keys.items() if asked != "auto"}:
        yield Variant(config.changed(kept), rollout_devices, kept)
    known = {name: shape for name, shape in shapes.items() if isinstance(shape, ModelShape)}
    roles = [name for name in LEARNERS if name in known and config.section(name).training_backend == "megatron"]
    splits = _splits(config, [known[role] for role in roles], per_node) if roles else [None]
    for split, devices in itertools.product(splits, _rollout_sizes(config, known, per_node, rollout_devices)):
        changed = config if split is None else _with_parallel(config, roles, split.model_dump(exclude={"context"}))
        changes = _changes(config, changed, roles)
        if changes or devices != rollout_devices:
            yield Variant(changed, devices, changes)


def contexts(config: Config, variant: Variant, shapes: Mapping[str, Shape], per_node: int) -> Iterator[Variant]:
    """Yields variants of `variant` in which other numbers of ranks split the tokens of long sequences."""
    models = {name: shape for name in LEARNERS if isinstance(shape := shapes.get(name), ModelShape)}
    if not models or config.data.longest_sequence < LONG:
        return
    for size in _powers(per_node):
        changed = _with_parallel(variant.config, models, {"context": size})
        if all(_divides(layout_of_learner(changed.section(role)), model) for role, model in models.items()):
            changes = _changes(variant.config, changed, list(models))
            if changes:
                yield Variant(changed, variant.rollout_devices, {**variant.changes, **changes})


def _changes(before: Config, after: Config, roles: list[str]) -> dict[str, object]:
    """Returns the changed keys `parallel` of these models; a reference without its own follows the actor."""
    changes: dict[str, object] = {}
    for role in roles:
        if role != "reference" or before.reference.parallel is not None:
            old, new = (config.section(role).parallel.model_dump() for config in (before, after))
            changes |= {f"{role}.parallel.{name}": new[name] for name in new if new[name] != old[name]}
    return changes


def one_update_older(config: Config) -> Changes:
    """Returns the changes by which responses are generated beside the training on earlier ones, if they may be."""
    if config.runner.max_staleness or config.runner.task_type != "reasoning":
        return {}
    algorithm = config.algorithm
    corrected = algorithm.rollout_is is not None or algorithm.old_log_probs == "rollout"
    return {"runner.max_staleness": 1} | ({} if corrected else {"algorithm.rollout_is": {}})


def micro_batches(variant: Variant) -> Iterator[Variant]:
    """Yields variants with larger and smaller micro-batches of the learners, where the config limits them."""
    for factor in FACTORS:
        changes: dict[str, object] = {}
        for role in ("actor", "critic"):
            section = variant.config.section(role)
            leasts = {"micro_batch_size": 1, "max_tokens_per_micro_batch": variant.config.data.longest_sequence}
            for name, least in leasts.items():
                value = getattr(section, name)
                if value is not None and value * factor >= least:
                    changes[f"{role}.{name}"] = int(value * factor)
        if changes:
            yield Variant(variant.config.changed(changes), variant.rollout_devices, {**variant.changes, **changes})


def _splits(config: Config, models: list[ModelShape], per_node: int) -> Iterator[Parallel]:
    """Yields the splits that divide all models. Tensor ranks stay within a node."""
    base = config.actor.parallel
    powers = _powers(per_node)
    stages = STAGES if base.virtual_pipeline == 1 else (base.pipeline,)
    for tensor, pipeline in itertools.product(powers, stages):
        for expert in powers if all(model.experts for model in models) else (1,):
            sequence = tensor > 1 and (base.sequence or any(model.experts for model in models))
            sizes = {"tensor": tensor, "pipeline": pipeline, "expert": expert, "sequence": sequence}
            split = base.model_copy(update=sizes)
            if all(_divides(split, model) for model in models):
                yield split


def _with_parallel(config: Config, roles: Iterable[str], sizes: Mapping[str, object]) -> Config:
    """Returns the config with other `sizes` of `parallel` of these models; a reference without its own follows the
    actor."""
    own = [role for role in roles if getattr(config, role).parallel is not None]
    return config.changed({f"{role}.parallel.{key}": size for role in own for key, size in sizes.items()})


def _divides(split: Parallel, model: ModelShape) -> bool:
    """Returns whether tensor and context ranks have equal shares of the heads, stages of the layers, and so on."""
    widths = (model.shared, model.dense_intermediate) if model.experts else (model.intermediate,)
    heads = all(count % (split.tensor * split.context) == 0 for count in (model.heads, model.kv_heads))
    inner = all(width % split.tensor == 0 for width in widths)
    return heads and inner and model.layers % split.pipeline == 0 and model.experts % split.expert == 0


def _rollout_sizes(
    config: Config, known: Mapping[str, ModelShape], per_node: int, rollout_devices: int
) -> Iterator[int]:
    yield rollout_devices
    rollout = config.rollout
    if rollout.backend not in HOSTED or rollout.tensor_parallel_size is not None or "rollout" not in known:
        return
    for size in _powers(per_node):
        if size != rollout_devices and known["rollout"].heads % size == 0:
            yield size


def _powers(most: int) -> list[int]:
    """Returns the powers of two up to `most`."""
    return [2**exponent for exponent in range(most.bit_length())]
