"""The order in which components leave shared devices for host memory and come back within a step.

A component that leaves is on its devices from its first to its last use in a step; others use its memory in between.
So every component leaves and comes once per step. Gradients and optimizer state come for the update alone. The actor's
weights stay from the log-probs until the rollout has them, also while the critic is trained. `occupancy` decides by the
memory estimate which components leave where `offload` is auto.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rl_platform.config.schema import Config
from rl_platform.placement.layout import Layout

Held = Literal["nothing", "weights", "all"]

PHASES: Mapping[str, tuple[str, ...]] = {  # in the order of a step, with the components that work in it
    "sync weights": ("actor", "rollout"),
    "generate": ("rollout",),
    "reference": ("reference",),
    "log-probs": ("actor",),
    "values": ("critic",),
    "train critic": ("critic",),
    "train actor": ("actor",),
}
_STAYS: Mapping[str, Mapping[str, Held]] = {  # on the devices of a component that leaves; in other phases nothing
    "rollout": {"sync weights": "all", "generate": "all"},
    "reference": {"reference": "all"},
    "critic": {"values": "weights", "train critic": "all"},
    "actor": {
        "log-probs": "weights",
        "values": "weights",
        "train critic": "weights",
        "train actor": "all",
        "sync weights": "weights",
    },
}
CAN_LEAVE = tuple(_STAYS)


@dataclass(frozen=True)
class OffloadOrder:
    """The components that leave their devices within a step, and what the order depends on.

    leaving: components that leave their devices. recompute: the actor computes log-probs before the update.
    lends_weights: the rollout generates with the actor's own tensors, so these stay. scores: a reward model
    scores while responses are generated.
    """

    layout: Layout
    leaving: frozenset[str] = frozenset()
    recompute: bool = True
    lends_weights: bool = False
    scores: bool = False

    def leaves_before(self, phase: str) -> tuple[tuple[str, bool], ...]:
        """Returns (component, whether its weights leave too) for all that must not be on the devices of `phase`."""
        workers = PHASES[phase]
        beside = self.layout.around_reward if self.scores and phase == "generate" else frozenset()
        leaving = []
        for name in CAN_LEAVE:
            sharing = self.layout.sharing.get(name, ())
            meets = name in workers or name in beside or any(worker in sharing for worker in workers)
            if name in self.leaving and meets and (held := self.may_hold(name, phase)) != "all":
                leaving.append((name, held == "nothing"))
        return tuple(leaving)

    def may_hold(self, name: str, phase: str) -> Held:
        """Returns what a component that leaves may have on its devices in a phase."""
        stays = _STAYS[name].get(phase, "nothing")
        if name == "actor" and not self.recompute and phase in ("log-probs", "values", "train critic"):
            stays = "nothing"
        return "weights" if name == "actor" and self.lends_weights and stays == "nothing" else stays


def lends_weights(layout: Layout) -> bool:
    """Returns whether the rollout may generate with the tensors that the actor trains: one rank, in one process."""
    if "actor" not in layout.parts:
        return False
    actor, rollout = layout.parts["actor"], layout.parts["rollout"]
    return actor.ranks == 1 and (layout.one_process or actor.key == rollout.key)


def order_with(config: Config, layout: Layout, leaving: frozenset[str]) -> OffloadOrder:
    """Returns the order of a config in which these components leave."""
    recompute = config.algorithm.old_log_probs == "recompute"
    scores = config.reward.classifier is not None
    return OffloadOrder(layout, leaving, recompute, lends_weights(layout), scores)


def asked_to_leave(config: Config, layout: Layout, answer: bool | Literal["auto"]) -> frozenset[str]:
    """Returns the components whose `offload` is `answer` and whose devices other components use too."""
    if config.runner.task_type == "embodied" or config.runner.max_staleness:
        return frozenset()  # generation and training run at the same time, so none can leave
    around_reward = layout.around_reward if config.reward.classifier is not None else frozenset()
    return frozenset(
        name
        for name, asked in config.offload_keys.items()
        if name in layout.parts
        and asked == answer
        and (layout.sharing[name] or name in around_reward)
        and not (name == "rollout" and lends_weights(layout))
        # the reference's output matrix is read in every update of the actor
        and not (name == "reference" and config.algorithm.full_kl)
    )
