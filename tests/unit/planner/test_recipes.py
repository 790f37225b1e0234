"""The search beats or equals the placement of every shipped config, by the plan's own model.

tests/unit/launch/test_recipes.py compares the recipes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_platform.config import load_config
from rl_platform.errors import ConfigError
from rl_platform.placement.inventory import inventory_for
from rl_platform.placement.scheduler import schedule
from rl_platform.planner.report import plan_report
from rl_platform.planner.search import search

pytestmark = pytest.mark.usefixtures("unmeasured")
CONFIGS = Path(__file__).parents[3] / "configs"
NAMES = sorted(path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*.yaml"))
NOT_SEARCHED = {  # layouts of models that the search cannot place
    "embodied/placements/several_gpus_per_rank.yaml",
    "reasoning/reward_model.yaml",
}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NOT_SEARCHED and "/recipes/" not in name])
def test_it_beats_or_equals_every_shipped_config(name: str) -> None:
    config = load_config(CONFIGS / name).config
    inventory = inventory_for(config.cluster)
    report = plan_report(config, schedule(config.cluster, inventory), inventory)
    own = report.overlap.seconds if report.overlap else report.seconds
    assert search(config, inventory).candidates[0].seconds <= own * (1 + 1e-9)


@pytest.mark.parametrize("name", sorted(NOT_SEARCHED))
def test_configs_that_are_not_searched_say_why(name: str) -> None:
    config = load_config(CONFIGS / name).config
    with pytest.raises(ConfigError, match=r"nothing can be predicted|no placement gives the models ranks"):
        search(config, inventory_for(config.cluster))
