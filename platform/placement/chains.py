"""Chains of components: phases of one stage of a PPO step that run one after the other, beside other chains.

    [reference] [log-probs] [values]        [train critic] [train actor]

The phases of a stage are independent, except for a full KL, which the actor computes from the reference's states. The
placement decides which of them share devices.
"""

from __future__ import annotations

from collections.abc import Iterable

from rl_platform.config.schema import Config
from rl_platform.placement.layout import Layout


def chains(components: Iterable[str], config: Config, layout: Layout) -> tuple[tuple[str, ...], ...]:
    """Returns the components in chains. Components of a chain share devices or need results of one another, and work in
    this order. Chains work side by side."""
    separate: list[tuple[str, ...]] = []
    for name in components:
        linked = [chain for chain in separate if any(_linked(name, other, config, layout) for other in chain)]
        separate = [chain for chain in separate if chain not in linked]
        separate.append((*(other for chain in linked for other in chain), name))
    return tuple(separate)


def _linked(name: str, other: str, config: Config, layout: Layout) -> bool:
    compared = config.algorithm.full_kl_in_reward and {name, other} == {"reference", "actor"}
    return compared or other in layout.sharing[name]
