"""docs/placement.md: its plans are what the command prints and its tables are complete."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl_platform.config.schema.cluster import Cluster
from rl_platform.placement.estimates.hardware import GPUS
from rl_platform.placement.inventory import Inventory
from rl_platform.placement.scheduler import schedule

pytestmark = pytest.mark.usefixtures("unmeasured")
ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "placement.md").read_text(encoding="utf-8")
SIMULATED = re.MULTILINE | re.DOTALL
OUTPUTS = re.findall(r"<!-- output: (\S+) -->\n```\n(.*?)```", PAGE, re.DOTALL)


def overrides() -> list[str]:
    """The example before the first output, as overrides."""
    text = re.findall(r"```yaml\n(.*?)```", PAGE[: PAGE.index("<!-- output:")], re.DOTALL)[-1]
    sections = yaml.safe_load(text)
    return [f"{section}.{key}={json.dumps(value)}" for section, keys in sections.items() for key, value in keys.items()]


@pytest.mark.parametrize(("option", "shown"), OUTPUTS, ids=[option for option, _ in OUTPUTS])
def test_plans_are_what_the_command_prints(command: Any, option: str, shown: str) -> None:
    ended = command(option, ROOT / "configs/reasoning/ppo.yaml", *overrides())
    assert ended.code == 0, ended.err
    assert ended.out == shown, f"put the output of {option} into docs/placement.md"


def test_the_simulation_is_what_its_command_prints(command: Any) -> None:
    line, shown = re.findall(
        r"^platform-launch (--plan=simulate .*)\n```\n\n<!-- simulated -->\n```\n(.*?)```", PAGE, SIMULATED
    )[0]
    option, config, *changes = line.split()
    ended = command(option, ROOT / config, *changes)
    assert ended.code == 0, ended.err
    assert ended.out == shown, "put the output of --plan=simulate into docs/placement.md"


def test_the_picture_is_what_the_command_draws(command: Any) -> None:
    drawn = command("--plan=svg", ROOT / "configs/reasoning/ppo.yaml", *overrides()).out
    assert (ROOT / "docs/images/plan.svg").read_text(encoding="utf-8") == drawn


def test_every_kind_of_gpu_is_named() -> None:
    listed = re.search(r"<!-- gpus -->(.*?)<!-- /gpus -->", PAGE, re.DOTALL)
    assert listed is not None
    assert listed[1].replace("\n", " ").split(", ") == list(GPUS)


def test_every_key_of_the_json_is_documented(command: Any) -> None:
    tree = json.loads(command("--plan=json", ROOT / "configs/reasoning/ppo.yaml", *overrides()).out)
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE, re.MULTILINE))
    assert [key for key in rows if key in tree] == list(tree)
    for key in ("components", "devices", "processes", "batches"):
        items = tree[key] if isinstance(tree[key], list) else list(tree[key].values())
        assert all(f"`{name}`" in rows[key] for name in items[0]), key
    assert all(f"`{name}`" in rows["step"] for name in tree["step"]["phases"][0])


def test_the_table_of_the_grammar_is_true() -> None:
    rows = re.findall(r"^\| `(.+?)` \| (.+) \|$", PAGE[: PAGE.index("Within a segment")], re.MULTILINE)
    ranks = {}
    for text, _ in rows:
        cluster = Cluster(num_nodes=2, component_placement={"rollout": yaml.safe_load(text)})
        slots = schedule(cluster, Inventory.declared(2, 8)).components["rollout"]
        ranks[text] = [(slot.node, slot.accelerators) for slot in slots]
    assert [len(numbers) for numbers in ranks.values()] == [16, 4, 8, 4, 8, 8, 32]
    assert ranks["0-3,8-11"][4] == (1, (0,))
    assert ranks["0-7:0-3"][1] == (0, (2, 3))
    assert ranks["0-1:0-7"].count((0, (1,))) == 4
    assert ranks["0-3:4-7,4-7:0-3"][0] == (0, (4,))
