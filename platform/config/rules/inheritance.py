"""Drops inherited keys that only a former choice reads.

A child that writes `data.task.type: jsonl` does not inherit the `params` of a generated task. Keys that the same file
writes remain, so that the rules can refuse them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import get_args

from rl_platform.config.describe import default_tree, field_at
from rl_platform.config.layers import Layers, steps_of, value_at
from rl_platform.config.rules import without_effect
from rl_platform.config.rules.checks import without
from rl_platform.config.rules.env import WARP_CANNOT
from rl_platform.config.rules.rule import when
from rl_platform.config.schema import Config
from rl_platform.config.source import Tree


def stale_keys(config: Config, layers: Layers, doubtful: Collection[str]) -> dict[str, str]:
    """Returns the inherited keys that `config`, made of `layers`, no longer reads, each with the changed choice.

    doubtful: as in `check`; such keys are neither stale nor a choice.
    """
    defaults, stale = default_tree(), dict[str, str]()
    for key, switches in _bound(without(config, doubtful)):
        for switch in switches:
            changed = _last_change(switch, layers, defaults) if _is_choice(switch) else 0
            for leaf in _leaves(key, value_at(layers.tree, steps_of(key))):
                if layers.written.get(leaf, 0) < changed and leaf not in doubtful and switch not in doubtful:
                    stale[leaf] = switch
    return stale


def _bound(config: Config) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields the keys that the choices of `config` do not read or cannot be combined with, and these choices."""
    yield from ((key, switches) for key, _, switches in without_effect(config))
    yield "data.task.params", ("data.task.type",)  # each type has parameters of its own
    if when(lambda: config.env.backend == "mujoco_warp"):
        yield from ((f"env.{name}", ("env.backend",)) for name in WARP_CANNOT)
    if when(lambda: config.actor.model.type in ("gru", "vla")):
        yield "actor.model.num_action_chunks", ("actor.model.type",)
    for role in ("actor", "critic"):
        if when(lambda role=role: config.section(role).training_backend == "megatron"):  # type: ignore[misc]
            switch = f"{role}.training_backend"
            yield from ((f"{role}.{name}", (switch,)) for name in ("lora", "cpu_offload", "parallel.context"))


def _is_choice(switch: str) -> bool:
    """Returns True for a key that selects a kind. A size may make another key idle, but is not set for that purpose."""
    field = field_at(switch)
    return field is not None and not {int, float} & {field.annotation, *get_args(field.annotation)}


def _last_change(switch: str, layers: Layers, defaults: Tree) -> int:
    """Returns the number of the last layer that gave `switch` another value, 0 if the lowest one decides."""
    path = steps_of(switch)
    values = [value_at(tree, path, value_at(defaults, path)) for tree in layers.trees]
    return max((number for number in range(1, len(values)) if values[number] != values[number - 1]), default=0)


def _leaves(key: str, value: object) -> Iterator[str]:
    """Yields the written keys at and below `key`; none if it is not written."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _leaves(f"{key}.{name}", item)
    elif value is not None:
        yield key
