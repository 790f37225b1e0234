"""Decides `gradient_checkpointing: auto`: learners recompute their layers on GPUs that cannot hold the activations.

Offloading comes first, because copies between phases cost less than a second forward pass in every micro-batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from rl_platform.config.schema import Config
from rl_platform.placement.estimates.component_shapes import Shape, shapes
from rl_platform.placement.estimates.memory import MemoryModel
from rl_platform.placement.estimates.occupancy import Crowd, crowds_of, full_crowds, resolved_order
from rl_platform.placement.inventory import Inventory
from rl_platform.placement.layout import Layout
from rl_platform.placement.scheduler import Placement

SECTIONS = {"actor": "actor", "actor_critic": "actor", "critic": "critic"}  # of learners


def with_recomputation(config: Config, placement: Placement, inventory: Inventory) -> Config:
    """Returns the config of a run with true or false in place of auto; false without a GPU or with an unknown one."""
    crowds = crowds_of(config, placement, inventory)
    return resolved_recomputation(config, shapes(config)[0], placement.layout, crowds)


def recomputation_text(config: Config, resolved: Config) -> str | None:
    """Returns what was decided for the sections with auto; None without any."""
    names = [name for name in ("actor", "critic") if config.section(name) is not resolved.section(name)]
    values = [
        f"{name}.gradient_checkpointing {resolved.section(name).gradient_checkpointing}".lower() for name in names
    ]
    return f"{', '.join(values)}: from the estimate" if values else None


def resolved_recomputation(
    config: Config, known_shapes: Mapping[str, Shape], layout: Layout, crowds: Iterable[Crowd]
) -> Config:
    """Returns the config with true or false in place of auto."""
    undecided = {
        name for name in SECTIONS if name in layout.parts and config.section(name).gradient_checkpointing == "auto"
    }
    if not undecided:
        return config
    plain = _with(config, undecided, recompute=False)
    memory, crowds = MemoryModel(plain, known_shapes, layout, on_gpu=True), list(crowds)
    full = full_crowds(memory, crowds, resolved_order(plain, memory, crowds))
    return _with(plain, undecided & {name for crowd in full for name, _, _ in crowd}, recompute=True)


def _with(config: Config, names: Collection[str], *, recompute: bool) -> Config:
    return config.changed({f"{SECTIONS[name]}.gradient_checkpointing": recompute for name in names})
