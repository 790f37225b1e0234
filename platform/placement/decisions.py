"""Decides the keys that leave a choice to the platform, with notes for the run.

The choices follow from the estimates of memory in `estimates/`. Without accelerators there is nothing to choose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rl_platform.config.schema import Config
from rl_platform.extras import is_present, required
from rl_platform.placement.inventory import Inventory
from rl_platform.placement.layout import Layout
from rl_platform.placement.offload_order import OffloadOrder, asked_to_leave, order_with
from rl_platform.placement.scheduler import Placement

ESTIMATES = "rl_platform.placement.estimates"  # an extra


@dataclass(frozen=True)
class Decisions:
    """The config with values in place of `auto`, the order in which components leave their devices, and notes."""

    config: Config
    order: OffloadOrder
    notes: tuple[str, ...] = ()


def decide(config: Config, placement: Placement, inventory: Inventory) -> Decisions:
    """Returns the decisions of a run. Raises ConfigError if an engine has no memory for a single sequence."""
    if not is_present(ESTIMATES) and not any(placement.accelerators.values()):
        return Decisions(config, order_with(config, placement.layout, asked_to_leave(config, placement.layout, True)))
    with required(ESTIMATES, "cluster.component_placement"):
        from rl_platform.placement.estimates.run_decisions import from_estimates
    return from_estimates(config, placement, inventory)


def weight_transfer(config: Config, layout: Layout) -> Literal["auto", "group", "memory"]:
    """Returns `rollout.weight_transfer` without `auto` where a process group cannot connect policy and rollout.

    NCCL needs a separate GPU for each rank. With `auto`, rank 0 would hold weights that no group could send.
    """
    asked = config.rollout.weight_transfer
    return "memory" if asked == "auto" and "rollout" in layout.sharing[layout.policy] else asked
