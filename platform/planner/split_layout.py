"""The layout of a split of a cluster, made of sizes alone.

A search examines thousands of splits and schedules only those that it proposes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rl_platform.placement.layout import BESIDE, LEARNERS, Layout, Part


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
