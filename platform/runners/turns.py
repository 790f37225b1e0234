"""Components that share devices leave them for one another, as the plan says."""

from __future__ import annotations

from collections.abc import Mapping

from rl_platform.config.schema import Config
from rl_platform.placement.offload_order import CAN_LEAVE, OffloadOrder
from rl_platform.runtime.worker_group import WorkerGroup


class TakingTurns:
    """`groups`: the components, by name. Who is needed comes back by itself; the others must leave before."""

    def __init__(self, turns: OffloadOrder, groups: Mapping[str, WorkerGroup]) -> None:
        self.turns, self.groups = turns, groups

    def before(self, phase: str) -> None:
        """Those leave who must not be on the devices of `phase`; over when they have left."""
        leaving = [self.groups[name].offload(weights) for name, weights in self.turns.leaves_before(phase)]
        for handle in leaving:
            handle.wait()


def with_turns(config: Config, turns: OffloadOrder) -> Config:
    """The config whose components know whether they leave: `offload` is true or false, and no longer auto."""
    sections = {name: getattr(config, name) for name in CAN_LEAVE}
    return config.model_copy(
        update={
            name: section.model_copy(update={"offload": name in turns.leaving}) for name, section in sections.items()
        }
    )
