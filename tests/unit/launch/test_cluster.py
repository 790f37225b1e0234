"""Which runtime a run gets, and clusters that cannot be joined."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from rl_platform.config.schema import Cluster
from rl_platform.errors import PlacementError
from rl_platform.launch.cli import load
from rl_platform.launch.cluster import ray_cluster, uses_ray

APART = "cluster.component_placement={actor_critic: 0, 'env,rollout': 1}"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], False),
        (["cluster.runtime=ray"], True),
        (["cluster.address=auto"], True),
        (["cluster.devices_per_node=2", APART], True),
        (["cluster.devices_per_node=1"], False),
    ],
)
def test_processes_are_made_where_they_are_asked_for_or_needed(folder: Path, overrides: list[str], expected: bool):
    loaded, placement, _ = load("embodied.yaml", overrides)
    assert uses_ray(loaded.config.cluster, placement) is expected


def test_an_address_where_nobody_answers_is_told_soon():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    began = time.monotonic()
    joined = ray_cluster(Cluster(component_placement={}, address=address))
    with pytest.raises(PlacementError, match="no Ray cluster can be joined") as refused, joined:
        pass
    assert refused.value.problems[0].key == "cluster.address"
    assert time.monotonic() - began < 10
