"""Malformed and impossible placements, each with its whole message: `bad_placements.yaml` is the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl_platform.errors import ConfigError
from rl_platform.launch.command import load
from rl_platform.placement.grammar import COMPONENTS

ROOT = Path(__file__).parents[3]
WORKS = {"actor,critic": "0-3", "rollout": "4-6", "reward": "7"}
BAD = yaml.safe_load(Path(__file__).with_name("bad_placements.yaml").read_text(encoding="utf-8"))


def cluster_with(bad: dict[str, Any]) -> str:
    """The override that makes the change."""
    placement = {**{key: text for key, text in WORKS.items() if key not in bad.get("without", ())}, **bad["placed"]}
    return f"cluster={json.dumps({'gpus_per_node': 8, **bad.get('cluster', {}), 'component_placement': placement})}"


def test_there_are_many_and_they_differ() -> None:
    assert len(BAD) >= 40
    assert len({bad["says"] for bad in BAD}) == len(BAD)


def test_what_they_change_works() -> None:
    load(str(ROOT / "configs/reasoning/ppo.yaml"), [cluster_with({"placed": {}})])


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad["says"].splitlines()[0][:90])
def test_bad_placement(bad: dict[str, Any]) -> None:
    """The message is that of the table, which names the place and what to do."""
    with pytest.raises(ConfigError) as caught:
        load(str(ROOT / "configs/reasoning/ppo.yaml"), [cluster_with(bad)])
    (problem,) = caught.value.problems
    assert f"{problem}\n".removeprefix("command line: ") == bad["says"]
    assert caught.value.exit_code == 2
    first, *rest = bad["says"].splitlines()
    assert any(name in first for name in (*COMPONENTS, "component", "node_groups[", "inventory"))
    assert any(line.strip().startswith(("allowed:", "hint:")) for line in rest)
