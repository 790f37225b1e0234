"""Who leaves shared devices for host memory, and when: the order of a step, and the memory estimate where nobody said.

A component that leaves is on its devices from its first to its last use in a step, and others find the room it gives
up: every component comes and goes once per step. Gradients and optimizer state come for the update alone; the actor's
weights stay from the log-probs on, also while the critic is trained, until the rollout has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from rl_platform.config.schema import Config
from rl_platform.placement.layout import Layout

Held = Literal["nothing", "weights", "all"]

PHASES: Mapping[str, tuple[str, ...]] = {  # in the order of a step: who works in it
    "sync weights": ("actor", "rollout"),
    "generate": ("rollout",),
    "reference": ("reference",),
    "log-probs": ("actor",),
    "values": ("critic",),
    "train critic": ("critic",),
    "train actor": ("actor",),
}
_STAYS: Mapping[str, Mapping[str, Held]] = {  # what a component that leaves has on its devices; else nothing
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
_ORDER: tuple[Held, ...] = ("nothing", "weights", "all")
_PARTS: Mapping[Held, tuple[str, ...]] = {
    "nothing": (),
    "weights": ("weights",),
    "all": ("weights", "gradients", "optimizer"),
}


@dataclass(frozen=True)
class Move:
    """A component that leaves before a phase or comes back for it: what it had on its devices, and what it has then."""

    component: str
    before: Held
    after: Held

    def __str__(self) -> str:
        """`critic (weights, optimizer)`: what is moved."""
        less, more = sorted((self.before, self.after), key=_ORDER.index)
        parts = ("weights",) if self.component in ("rollout", "reference") else _PARTS[more]
        return f"{self.component} ({', '.join(part for part in parts if part not in _PARTS[less])})"


@dataclass(frozen=True)
class Turn:
    """One phase of a step that goes on and on: who leaves before it, who comes for it, what each component holds."""

    phase: str
    leaves: tuple[Move, ...]
    comes: tuple[Move, ...]
    held: Mapping[str, Held]


@dataclass(frozen=True)
class Turns:
    """`leaving`: components that give up their devices; `recompute`: the actor computes log-probs before the update;
    `lends_weights`: the actor's weights are the rollout's as well, so they stay."""

    layout: Layout
    leaving: frozenset[str] = frozenset()
    recompute: bool = True
    lends_weights: bool = False

    def leaves_before(self, phase: str) -> tuple[tuple[str, bool], ...]:
        """(component, whether its weights leave too) of all that must not be on the devices that `phase` uses."""
        workers = PHASES[phase]
        found = []
        for name in CAN_LEAVE:
            meets = name in workers or any(worker in self.layout.turns.get(name, ()) for worker in workers)
            if name in self.leaving and meets and (held := self._may_hold(name, phase)) != "all":
                found.append((name, held == "nothing"))
        return tuple(found)

    @cached_property
    def step(self) -> tuple[Turn, ...]:
        """The phases of a step, in the middle of a run."""
        held: dict[str, Held] = {
            name: "nothing" if name in self.leaving else "all" for name in CAN_LEAVE if name in self.layout.parts
        }
        turns: list[Turn] = []
        for _ in range(2):  # the first step has nobody to send away
            turns = [self._turn(phase, held) for phase in self._phases]
        return tuple(turns)

    @property
    def _phases(self) -> tuple[str, ...]:
        there = (phase for phase, workers in PHASES.items() if set(workers) <= self.layout.parts.keys())
        return tuple(phase for phase in there if self.recompute or phase != "log-probs")

    def _turn(self, phase: str, held: dict[str, Held]) -> Turn:
        """What happens in a phase to those who hold this; `held` becomes what they hold in it."""
        leaves = []
        for name, weights in self.leaves_before(phase):
            kept: Held = "nothing" if weights else "weights"
            if _ORDER.index(held[name]) > _ORDER.index(kept):
                leaves.append(Move(name, held[name], kept))
                held[name] = kept
        comes = []
        for name in PHASES[phase]:
            wanted = self._may_hold(name, phase)
            if name in self.leaving and _ORDER.index(held[name]) < _ORDER.index(wanted):
                comes.append(Move(name, held[name], wanted))
                held[name] = wanted
        return Turn(phase, tuple(leaves), tuple(comes), dict(held))

    def _may_hold(self, name: str, phase: str) -> Held:
        stays = _STAYS[name].get(phase, "nothing")
        if name == "actor" and not self.recompute and phase in ("log-probs", "values", "train critic"):
            stays = "nothing"
        return "weights" if name == "actor" and self.lends_weights and stays == "nothing" else stays


def lends_weights(layout: Layout) -> bool:
    """Whether the rollout may generate with the very tensors that the actor trains: in one process, of one rank."""
    if "actor" not in layout.parts:
        return False
    actor, rollout = layout.parts["actor"], layout.parts["rollout"]
    return actor.ranks == 1 and (layout.one_process or actor.key == rollout.key)


def turns_with(config: Config, layout: Layout, leaving: frozenset[str]) -> Turns:
    """The turns of a config when these components leave."""
    recompute = config.algorithm.old_log_probs == "recompute"
    return Turns(layout, leaving, recompute, lends_weights(layout))


def asked_to_leave(config: Config, layout: Layout, answer: bool | Literal["auto"]) -> frozenset[str]:
    """The components whose `offload` is `answer` and for which it means something: others use their devices."""
    if config.runner.task_type == "embodied" or config.runner.max_staleness:
        return frozenset()  # one ahead: generation and training are at the same time, nobody can leave
    full_kl = config.algorithm.full_kl_in_reward or config.algorithm.full_kl_in_loss
    return frozenset(
        name
        for name, asked in config.offload_keys.items()
        if name in layout.parts
        and asked == answer
        and layout.turns[name]
        and not (name == "rollout" and lends_weights(layout))
        and not (name == "reference" and full_kl)  # its output matrix is read in every update of the actor
    )
