"""Placements: texts near the grammar on clusters of all sizes, with and without node groups."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from fuzz import values
from tiny_configs import EMBODIED, REASONING

from rl_platform.launch import command
from rl_platform.planner.placement_text import render

NAMES = {
    "reasoning": ("actor", "critic", "rollout", "reward"),
    "embodied": ("actor_critic", "env", "rollout"),
}
SIZES = (1, 1, 2, 3, 4, 8, 16, 100, 1000, 10_000)
PIECES = (
    "0",
    "1",
    "2",
    "3",
    "7",
    "8",
    "15",
    "99",
    "all",
    "-",
    ":",
    ",",
    " ",
    "-",
    ":",
    "0-3",
    "0-7",
    "999999999",
    "٣",
    "a",
)


class Placements:
    """Schedules each as the command line does, and renders it if it is possible."""

    def __init__(self, folder: Path) -> None:
        self.files = {"reasoning": folder / "reasoning.yaml", "embodied": folder / "embodied.yaml"}
        self.files["reasoning"].write_text(REASONING)
        self.files["embodied"].write_text(EMBODIED)

    def case(self, numbers: random.Random) -> tuple[str, Callable[[], object]]:
        task = numbers.choice(("reasoning", "embodied"))
        cluster: dict[str, Any] = {"component_placement": self._placement(numbers, NAMES[task])}
        cluster |= {"num_nodes": numbers.choice(SIZES), "gpus_per_node": numbers.choice((0, *SIZES, 20_000))}
        if numbers.random() < 0.2:
            cluster["inventory"] = {
                "nodes": numbers.choice(SIZES),
                "gpus_per_node": numbers.choice((0, *SIZES)),
                "gpu": "h100",
            }
            cluster = {name: item for name, item in cluster.items() if name not in ("num_nodes", "gpus_per_node")}
        if numbers.random() < 0.1:
            cluster["devices_per_node"] = numbers.choice(SIZES)
            cluster.pop("gpus_per_node", None)
        if numbers.random() < 0.3:
            cluster["node_groups"] = [
                {"label": numbers.choice(("gpu", "cpu", "node", "a")), "node_ranks": self._text(numbers)}
                | ({"accelerators": numbers.choice((0, 1, 8))} if numbers.random() < 0.3 else {})
                for _ in range(numbers.randrange(1, 3))
            ]
        if numbers.random() < 0.3:
            cluster = values.changed(cluster, numbers)
        override = "cluster=" + yaml.safe_dump(cluster, default_flow_style=True, width=10**9).split("\n...")[0].strip()
        return f"{task}: {override[:3000]}", lambda: self._schedule(str(self.files[task]), override)

    def _placement(self, numbers: random.Random, names: tuple[str, ...]) -> dict[str, Any]:
        left = list(names)
        numbers.shuffle(left)
        entries: dict[str, Any] = {}
        while left:
            count = numbers.randrange(1, len(left) + 1)
            key, left = ",".join(left[:count]), left[count:]
            text: Any = self._text(numbers)
            if numbers.random() < 0.2:
                text = {"node_group": numbers.choice(("gpu", "cpu", "node", "nowhere")), "placement": text}
            entries[key] = text
        return entries

    def _text(self, numbers: random.Random) -> Any:
        roll = numbers.random()
        if roll < 0.3:
            first = numbers.choice((0, 0, 0, 1, 4))
            last = first + numbers.choice((0, 1, 3, 7, 99, 99_999))
            ranks = numbers.choice(("", "", ":0", ":0-1", ":0-3", ":0-7", ":0-999"))
            return f"{first}-{last}{ranks}"
        if roll < 0.5:
            return numbers.choice(("all", "0", "all:0-3", "all:0-99999", "0,1", "0-1,2-3:2"))
        if roll < 0.55:
            return values.value(numbers)
        if roll < 0.6:
            return ",".join(str(number) for number in range(numbers.choice((10, 1000, 20_000))))
        return "".join(numbers.choice(PIECES) for _ in range(numbers.randrange(1, 8)))

    def _schedule(self, file: str, override: str) -> None:
        _, placement, inventory = command.load(file, [override])
        render(placement, inventory)
