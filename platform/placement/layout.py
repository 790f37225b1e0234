"""How a placement divides the work: ranks, devices and nodes of every component, and which components take turns.

Memory and time are estimated from a layout. `Placement.layout` is that of a placement. A search makes layouts of sizes
alone: it examines thousands of splits of a cluster and schedules only those that it proposes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

LEARNERS = ("actor", "critic", "actor_critic", "reference")  # several ranks of these form a process group
BESIDE = ("reward", "env")  # compute while others do: on a CPU wherever they are placed, except for a reward model


@dataclass(frozen=True)
class Part:
    """One component: its ranks, their devices and nodes, accelerators of one rank (0: it has none), and the key whose
    components share its processes."""

    ranks: int
    devices: int
    nodes: frozenset[int]
    per_rank: int
    key: str


@dataclass(frozen=True)
class Layout:
    """What every component has.

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
        """Whether two components of one rank each live in one process and on one device."""
        one, other = self.parts[first], self.parts[second]
        if one.ranks != 1 or other.ranks != 1 or second not in self.sharing[first]:
            return False
        return self.one_process or one.key == other.key


def layout_of_split(keys: Sequence[tuple[tuple[str, ...], range]], per_node: int, rollout_devices: int = 1) -> Layout:
    """Returns the layout of keys on disjoint ranges of devices, one rank each. `per_node` 0: the devices are nodes.

    rollout_devices: of a rank of the rollout; above 1 it has a key of its own on the same devices.
    """
    parts: dict[str, Part] = {}
    sharing: dict[str, frozenset[str]] = {}
    around_reward: frozenset[str] = frozenset()
    for components, devices in keys:
        size = max(per_node, 1)
        nodes = frozenset(range(devices.start // size, (devices.stop - 1) // size + 1))
        part = Part(len(devices), len(devices), nodes, min(per_node, 1), ",".join(components))
        computing = frozenset(components).difference(BESIDE)
        for name in components:
            parts[name] = part
            if name == "rollout" and rollout_devices > 1:
                parts[name] = replace(part, ranks=len(devices) // rollout_devices, per_rank=rollout_devices, key=name)
            sharing[name] = frozenset() if name in BESIDE else computing - {name}
        if "reward" in components:
            around_reward = computing
    learners = [part for name, part in parts.items() if name in LEARNERS]
    alone = all(part.ranks == 1 for part in learners)
    used = {device for _, devices in keys for device in devices} if alone and len(keys) < 8 else {0, 1}
    return Layout(parts, sharing, alone and len(used) == 1, around_reward)
