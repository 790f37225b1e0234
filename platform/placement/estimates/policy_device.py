"""Decides `actor.device: auto`: small embodied policies act and train on the CPU of a machine with GPUs.

A step of a small network takes a few microseconds on a CPU; on a GPU it waits for dozens of kernel launches and copies.
"""

from __future__ import annotations

from rl_platform.config.schema import Config
from rl_platform.placement.estimates.component_shapes import shapes
from rl_platform.placement.estimates.policy_shape import SMALL, PolicyShape
from rl_platform.placement.layout import Layout


def with_policy_device(config: Config, layout: Layout) -> Config:
    """Returns the config of an embodied run with cpu or gpu in place of auto; unchanged if the policy has no GPU."""
    if config.runner.task_type != "embodied" or config.actor.device != "auto":
        return config
    name = layout.policy
    if not (layout.parts[name].per_rank or layout.parts["rollout"].per_rank):
        return config
    shape = shapes(config)[0].get(name)
    small = isinstance(shape, PolicyShape) and not (shape.convolutions or shape.stacks) and shape.parameters <= SMALL
    # ranks of a learner on GPUs communicate by NCCL, which takes no tensors of the CPU
    device = "cpu" if small and layout.parts[name].ranks == 1 else "gpu"
    return config.changed({"actor.device": device})


def policy_device_text(config: Config, resolved: Config) -> str | None:
    """Returns the reason if a policy with a GPU works on the CPU; None otherwise."""
    if resolved.actor.device != "cpu" or config.actor.device == "cpu":
        return None
    return f"actor.device cpu: the policy has at most {SMALL:,} parameters; actor.device: gpu moves it to its GPU"
