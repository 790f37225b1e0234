"""Which phases of one stage of a PPO step wait for one another, and which run side by side. Follows from the placement.

    [reference] [log-probs] [values]        [train critic] [train actor]

Phases of a stage need nothing of one another, but for a full KL, which the actor measures from the reference's states.
"""

from __future__ import annotations

from collections.abc import Iterable

from rl_platform.config.schema import Config
from rl_platform.placement.layout import Layout


def chains(components: Iterable[str], config: Config, layout: Layout) -> tuple[tuple[str, ...], ...]:
    """The components in chains. Those of one chain share devices or need one another's results, and work in this order;
    chains work side by side."""
    separate: list[tuple[str, ...]] = []
    for name in components:
        linked = [chain for chain in separate if any(_linked(name, other, config, layout) for other in chain)]
        separate = [chain for chain in separate if chain not in linked]
        separate.append((*(other for chain in linked for other in chain), name))
    return tuple(separate)


def _linked(name: str, other: str, config: Config, layout: Layout) -> bool:
    compared = config.algorithm.full_kl_in_reward and {name, other} == {"reference", "actor"}
    return compared or other in layout.sharing[name]
