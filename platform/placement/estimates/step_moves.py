"""The moves of a step for estimates: components that leave and come before each phase, and what each holds in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rl_platform.placement.offload_order import CAN_LEAVE, PHASES, Held, OffloadOrder

_ORDER: tuple[Held, ...] = ("nothing", "weights", "all")
_PARTS: Mapping[Held, tuple[str, ...]] = {
    "nothing": (),
    "weights": ("weights",),
    "all": ("weights", "gradients", "optimizer"),
}


@dataclass(frozen=True)
class Move:
    """A component that leaves before a phase or comes back for it, and what it holds before and after."""

    component: str
    before: Held
    after: Held

    def __str__(self) -> str:
        """Returns the component and the moved parts, as `critic (weights, optimizer)`."""
        less, more = sorted((self.before, self.after), key=_ORDER.index)
        parts = ("weights",) if self.component in ("rollout", "reference") else _PARTS[more]
        return f"{self.component} ({', '.join(part for part in parts if part not in _PARTS[less])})"


@dataclass(frozen=True)
class PhaseMoves:
    """One phase of a step: components that leave before it, that come for it, and what each component holds in it."""

    phase: str
    leaves: tuple[Move, ...]
    comes: tuple[Move, ...]
    held: Mapping[str, Held]


def phases_of(order: OffloadOrder) -> tuple[PhaseMoves, ...]:
    """Returns the phases of a step, in the middle of a run: the first step of a run moves less."""
    held: dict[str, Held] = {
        name: "nothing" if name in order.leaving else "all" for name in CAN_LEAVE if name in order.layout.parts
    }
    phases: list[PhaseMoves] = []
    for _ in range(2):  # in the first step nothing has to leave
        phases = [_moves(order, phase, held) for phase in _names(order)]
    return tuple(phases)


def _names(order: OffloadOrder) -> tuple[str, ...]:
    there = (phase for phase in PHASES if set(PHASES[phase]) <= order.layout.parts.keys())
    return tuple(phase for phase in there if order.recompute or phase != "log-probs")


def _moves(order: OffloadOrder, phase: str, held: dict[str, Held]) -> PhaseMoves:
    """Returns the moves of a phase and updates `held`, what each component holds, to this phase."""
    leaves = []
    for name, weights in order.leaves_before(phase):
        kept: Held = "nothing" if weights else "weights"
        if _ORDER.index(held[name]) > _ORDER.index(kept):
            leaves.append(Move(name, held[name], kept))
            held[name] = kept
    comes = []
    for name in PHASES[phase]:
        wanted = order.may_hold(name, phase)
        if name in order.leaving and _ORDER.index(held[name]) < _ORDER.index(wanted):
            comes.append(Move(name, held[name], wanted))
            held[name] = wanted
    return PhaseMoves(phase, tuple(leaves), tuple(comes), dict(held))
