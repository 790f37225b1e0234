"""The decisions of a run that follow from the estimates."""

from __future__ import annotations

from rl_platform.config.schema import Config
from rl_platform.placement.decisions import Decisions
from rl_platform.placement.estimates.engine_memory import engine_memory, with_engine_memory
from rl_platform.placement.estimates.occupancy import offload_order
from rl_platform.placement.estimates.policy_device import policy_device_text, with_policy_device
from rl_platform.placement.estimates.recomputation import recomputation_text, with_recomputation
from rl_platform.placement.estimates.running import running_text, with_running_sequences
from rl_platform.placement.inventory import Inventory
from rl_platform.placement.scheduler import Placement


def from_estimates(config: Config, placement: Placement, inventory: Inventory) -> Decisions:
    """Returns the decisions of a run. Raises ConfigError if an engine has no memory for a single sequence."""
    config, asked = with_recomputation(config, placement, inventory), config
    notes = [recomputation_text(asked, config)]
    if config.runner.task_type == "reasoning":
        memory = engine_memory(config, placement, inventory)
        notes.append(None if memory is None else str(memory))
        config = with_engine_memory(config, memory)
        config, asked = with_running_sequences(config, placement, inventory), config
        notes.append(running_text(asked, config))
    else:
        config, asked = with_policy_device(config, placement.layout), config
        notes.append(policy_device_text(asked, config))
    order = offload_order(config, placement, inventory)
    return Decisions(config, order, tuple(note for note in notes if note is not None))
