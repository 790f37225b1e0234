"""Decides how many sequences the torch engine decodes together on a GPU without `rollout.max_running_requests`.

A decoding step reads the weights once for all sequences, so more of them give more tokens per second. SGLang and vLLM
have `engine_memory`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rl_platform.config.rollout_backend import chosen_backend
from rl_platform.config.schema import Config
from rl_platform.config.schema.rollout import RUNNING
from rl_platform.placement.estimates.component_shapes import Shape, shapes
from rl_platform.placement.estimates.engine_memory import MOST_RUNNING
from rl_platform.placement.estimates.memory import MemoryModel
from rl_platform.placement.estimates.model_shape import ModelShape
from rl_platform.placement.estimates.occupancy import Crowd, crowds_of, full_crowds, resolved_order
from rl_platform.placement.estimates.workload import rows_of_rollout
from rl_platform.placement.inventory import Inventory
from rl_platform.placement.layout import Layout
from rl_platform.placement.scheduler import Placement


def with_running_sequences(config: Config, placement: Placement, inventory: Inventory) -> Config:
    """Returns the config of a run with the number of sequences that fit; the same config if it stays RUNNING."""
    return resolved_running(config, shapes(config)[0], placement.layout, crowds_of(config, placement, inventory))


def running_text(config: Config, resolved: Config) -> str | None:
    """Returns what was decided; None if nothing was."""
    if config is resolved:
        return None
    return f"rollout.max_running_requests {resolved.rollout.max_running_requests}: they fit by the memory estimate"


def resolved_running(
    config: Config, known_shapes: Mapping[str, Shape], layout: Layout, crowds: Collection[Crowd]
) -> Config:
    """Returns the config with the largest multiple of RUNNING up to MOST_RUNNING, or all sequences of a rank, that fit
    on every GPU with a rollout. No component leaves a GPU because of them."""
    rollout, shape = config.rollout, known_shapes.get("rollout")
    if rollout.max_running_requests is not None or not isinstance(shape, ModelShape):
        return config
    if chosen_backend(rollout.backend, on_gpu=True)[0] != "torch":
        return config
    generating = [(crowd, device) for crowd, device in crowds if any(name == "rollout" for name, _, _ in crowd)]
    if not generating or any(device.memory is None or device.kind == "cpu" for _, device in generating):
        return config
    order = resolved_order(config, MemoryModel(config, known_shapes, layout, on_gpu=True), crowds)
    rows = rows_of_rollout(config, layout.parts["rollout"].ranks)
    for limit in range(MOST_RUNNING, RUNNING, -RUNNING):
        running = min(limit, rows)
        if running <= RUNNING:
            break
        wider = config.changed({"rollout.max_running_requests": running})
        if not full_crowds(MemoryModel(wider, known_shapes, layout, on_gpu=True), generating, order):
            return wider
    return config
