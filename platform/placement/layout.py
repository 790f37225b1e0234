"""The layout of a placement: ranks, devices and nodes of every component, and which components take turns.

`Placement.layout` computes it. Memory and time of a step are estimated from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LEARNERS = ("actor", "critic", "actor_critic", "reference")  # several ranks of these form a process group
BESIDE = ("reward", "env")  # compute while others do: on a CPU wherever they are placed, except for a reward model


@dataclass(frozen=True)
class Part:
    """The share of one component in a layout.

    ranks, devices: their numbers. nodes: those with a rank. per_rank: accelerators of one rank; 0 on a CPU. key: the
    key of `component_placement` that names it; the components of a key share processes.
    """

    ranks: int
    devices: int
    nodes: frozenset[int]
    per_rank: int
    key: str


@dataclass(frozen=True)
class Layout:
    """The ranks and devices of every component.

    sharing: for every component, the others that compute on its devices, so only one works at a time; none for those
    in `BESIDE`. one_process: all ranks are threads of one process. around_reward: the components that compute on the
    devices of the reward, which compete with a reward model.
    """

    parts: Mapping[str, Part]
    sharing: Mapping[str, frozenset[str]]
    one_process: bool
    around_reward: frozenset[str] = frozenset()

    @property
    def policy(self) -> str:
        """The component that trains the policy."""
        return "actor" if "actor" in self.parts else "actor_critic"

    def together(self, first: str, second: str) -> bool:
        """Returns whether two components of one rank each live in one process and on one device."""
        one, other = self.parts[first], self.parts[second]
        if one.ranks != 1 or other.ranks != 1 or second not in self.sharing[first]:
            return False
        return self.one_process or one.key == other.key
