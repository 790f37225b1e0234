"""Both tasks train two steps in this process: the shortest run through every part of the core."""

from __future__ import annotations

import math

import pytest

from rl_platform.launch.tools.report.definitions import definition_of
from rl_platform.metrics import read_metrics


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ("reasoning.yaml", {"actor/loss", "critic/loss", "reward/mean", "val/accuracy"}),
        ("embodied.yaml", {"actor/loss", "critic/loss", "episode/return", "val/return"}),
    ],
)
def test_two_steps(command, config: str, names: set[str]) -> None:
    ended = command(config, "runner.max_steps=2")
    assert ended.code == 0, ended.err
    rows = read_metrics("out")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert names <= set().union(*rows)
    assert all(math.isfinite(value) for row in rows for value in row.values())
    undefined = [name for name in set().union(*rows) - {"step"} if definition_of(name) is None]
    assert undefined == []  # launch/tools/report/metrics.yaml
