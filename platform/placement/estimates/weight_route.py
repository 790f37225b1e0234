"""Finds the ranks of a policy that hold a copy of the weights for the rollout, and its type."""

from __future__ import annotations

from rl_platform.config.rollout_backend import HOSTED, gathers_as_engine, may_go_by_group
from rl_platform.config.schema import Config
from rl_platform.placement.decisions import weight_transfer
from rl_platform.placement.layout import Layout


def held_publications(config: Config, layout: Layout, *, on_gpu: bool) -> int:
    """Returns how many whole published models a rank of a sharded learner holds, beside the rollout's weights.

    Ranks with a rollout in their process hold them for that rollout. Rank 0 holds them for a process group if it trains
    while a restarted rollout may request them. As `components.learner.Learner.publish`.
    """
    if "rollout" not in layout.parts or layout.parts[layout.policy].ranks == 1:
        return 0
    policy, rollout = layout.parts[layout.policy], layout.parts["rollout"]
    if policy.key == rollout.key:  # the built-in engine generates with that copy, unless it converts it
        own = config.rollout.backend not in HOSTED and published_type(config, on_gpu=on_gpu) == config.actor.model.dtype
        return config.readable_publications - own
    return int(sends_by_group(config, layout, on_gpu=on_gpu) and config.runner.max_staleness == 1)


def sent_while_gathered(config: Config, layout: Layout, *, on_gpu: bool) -> bool:
    """Returns whether rank 0 of a sharded learner sends buckets to a process group while later ones are gathered."""
    if "rollout" not in layout.parts or layout.parts[layout.policy].ranks == 1:
        return False
    apart = layout.parts[layout.policy].key != layout.parts["rollout"].key
    return apart and config.runner.max_staleness == 0 and sends_by_group(config, layout, on_gpu=on_gpu)


def sends_by_group(config: Config, layout: Layout, *, on_gpu: bool) -> bool:
    """Returns whether a process group of the policy's and the rollout's ranks broadcasts the weights."""
    return weight_transfer(config, layout) != "memory" and may_go_by_group(config, on_gpu)


def published_type(config: Config, *, on_gpu: bool) -> str:
    """Returns the type of gathered weights. The estimate takes every GPU for one that multiplies bfloat16 faster."""
    return config.actor.model.dtype if gathers_as_engine(config, on_gpu) else "float32"
