"""Malformed and impossible placements, each with its whole message: `bad_placements.yaml` is the table."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl_platform.config.placement_names import SHOWN
from rl_platform.config.schema.cluster import PLACEMENT, Cluster
from rl_platform.errors import ConfigError
from rl_platform.launch.placed_config import load
from rl_platform.placement.grammar import MAX_PIECES
from rl_platform.placement.inventory import Inventory
from rl_platform.placement.scheduler import schedule

ROOT = Path(__file__).parents[3]
WORKS = {"actor,critic": "0-3", "rollout": "4-6", "reward": "7"}
BAD = yaml.safe_load(Path(__file__).with_name("bad_placements.yaml").read_text(encoding="utf-8"))
MANY = "0" + ",0" * MAX_PIECES
BAD.append(
    {
        "placed": {"rollout": MANY},
        "says": f"{PLACEMENT}.rollout: more than {MAX_PIECES} segments\n    value: {MANY[:SHOWN]}...\n"
        f"{BAD[0]['says'].splitlines()[2]}\n    hint: write ranges, as 0-3\n",
    }
)


def cluster_with(bad: dict[str, Any]) -> dict[str, Any]:
    """The section `cluster` with the change."""
    placement = {**{key: text for key, text in WORKS.items() if key not in bad.get("without", ())}, **bad["placed"]}
    return {"gpus_per_node": 8, **bad.get("cluster", {}), "component_placement": placement}


def place(bad: dict[str, Any]) -> None:
    if "nodes" in bad:
        schedule(Cluster(**cluster_with(bad)), Inventory.declared(bad["nodes"], 8))
    else:
        load(str(ROOT / "configs/reasoning/ppo.yaml"), [f"cluster={json.dumps(cluster_with(bad))}"])


def test_there_are_many_and_they_differ() -> None:
    assert len(BAD) >= 40
    assert len({bad["says"] for bad in BAD}) == len(BAD)


def sentences_of_problems(path: Path) -> set[str]:
    """Every text of two or more words in a function that makes a problem, and in the tables of the module."""
    names = {"Problem", "problem", "problem_at", "fail", "uneven"}
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            calls = {ast.unparse(one.func).rpartition(".")[2] for one in ast.walk(node) if isinstance(one, ast.Call)}
            parts = node.body[ast.get_docstring(node) is not None :] if names & {node.name, *calls} else []
        else:
            parts = [node.value] if isinstance(node, ast.Assign) and node.col_offset == 0 else []
        constants = [one for part in parts for one in ast.walk(part) if isinstance(one, ast.Constant)]
        found |= {text for one in constants if isinstance(text := one.value, str) and " " in text.strip()}
    return found


MODULES = ["config/placement_names", "placement/grammar", "placement/inventory", "placement/scheduler"]


@pytest.mark.parametrize("module", MODULES)
def test_every_sentence_of_the_rules_stands_in_a_case(module: str) -> None:
    said = "".join(bad["says"] for bad in BAD)
    missing = [text for text in sentences_of_problems(ROOT / f"platform/{module}.py") if text not in said]
    assert not missing, f"add a case of each to bad_placements.yaml: {missing}"


def test_what_they_change_works() -> None:
    place({"placed": {}})


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad["says"].splitlines()[0][:90])
def test_bad_placement(bad: dict[str, Any]) -> None:
    """The message is that of the table, which names the place and what to do."""
    with pytest.raises(ConfigError) as caught:
        place(bad)
    (problem,) = caught.value.problems
    assert f"{problem}\n".removeprefix("command line: ") == bad["says"]
    assert caught.value.exit_code == 2
    first, *rest = bad["says"].splitlines()
    assert first.startswith("cluster")
    assert any(line.strip().startswith(("allowed:", "hint:")) for line in rest)
