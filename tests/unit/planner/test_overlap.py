"""The plan of a run whose generation is ahead of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rl_platform.config import load_config
from rl_platform.placement.inventory import inventory_for
from rl_platform.placement.layout import Layout, Part
from rl_platform.placement.scheduler import schedule
from rl_platform.planner.overlap import overlap
from rl_platform.planner.report import plan_report
from rl_platform.planner.report_json import as_tree
from rl_platform.planner.report_text import report_text
from rl_platform.planner.step_timeline import Span

CONFIGS = Path(__file__).parents[3] / "configs"
APART = {"actor,critic": "0-3", "rollout,reward": "4-7"}


def span(phase: str, component: str, start: float, stop: float) -> Span:
    return Span(phase, component, start, stop, "arithmetic")


def layout(rollout_shares: bool) -> Layout:
    part = Part(1, 1, frozenset({0}), 1, "")
    actor, critic, rollout = frozenset({"actor"}), frozenset({"critic"}), frozenset({"rollout"})
    sharing = {"actor": critic, "critic": actor, "rollout": frozenset[str]()}
    if rollout_shares:
        sharing = {"actor": critic | rollout, "critic": actor | rollout, "rollout": actor | critic}
    return Layout(dict.fromkeys(sharing, part), sharing, False, frozenset())


SPANS = (
    span("sync weights", "actor", 0, 1),
    span("generate", "rollout", 1, 7),
    span("values", "critic", 7, 8),
    span("train critic", "critic", 8, 9),
    span("train actor", "actor", 9, 11),
)


def test_the_slower_side_sets_the_pace() -> None:
    found = overlap(SPANS, layout(rollout_shares=False), 2)
    assert found is not None
    assert (found.staleness, found.seconds) == (2, 7)  # 1 s of weights and 6 s of generation; training takes 1 + 4 s
    assert found.idle == pytest.approx({"actor": 2 / 7, "critic": 2 / 7, "rollout": 1 / 7})
    assert found.alternating == pytest.approx({"actor": 6 / 11, "critic": 6 / 11, "rollout": 5 / 11})


def test_on_shared_devices_nothing_overlaps() -> None:
    found = overlap(SPANS, layout(rollout_shares=True), 1)
    assert found is not None
    assert found.seconds == 11


def test_without_staleness_there_is_none() -> None:
    assert overlap(SPANS, layout(rollout_shares=False), 0) is None


def test_environments_that_step_while_the_learner_trains() -> None:
    placement = "cluster.component_placement={actor_critic: 0, 'rollout,env': 1}"
    keys = placement, "cluster.devices_per_node=2", "algorithm.rollout_is={}", "runner.max_staleness=2"
    config = load_config(CONFIGS / "embodied" / "ppo.yaml", list(keys)).config
    inventory = inventory_for(config.cluster)
    report = plan_report(config, schedule(config.cluster, inventory), inventory)
    seconds = {span.phase: span.seconds for span in report.spans}
    trains = seconds["log-probs"] + seconds["train actor"]
    assert report.overlap.seconds == pytest.approx(seconds["sync weights"] + max(seconds["collect"], trains))
    assert report.overlap.seconds < report.seconds
    assert report.overlap.idle["rollout"] == pytest.approx(1 - seconds["collect"] / report.overlap.seconds)
    assert report.overlap.idle["rollout"] < report.overlap.alternating["rollout"]


def test_report(plans: Any) -> None:
    keys = "runner.max_staleness=2", "algorithm.rollout_is={}"
    report = plans.report(plans.config(*plans.large, *keys, placement=APART))
    found = report.overlap
    assert max(found.idle["rollout"], found.idle["actor"]) < max(found.alternating.values())
    assert found.seconds < report.seconds
    text = report_text(report)
    assert "generation is ahead of training: a step every" in text
    assert f"; rollout,reward {found.idle['rollout']:.0%} ({found.alternating['rollout']:.0%})" in text
    step = as_tree(report)["step"]
    assert isinstance(step, dict)
    assert step["overlap"]["seconds"] == found.seconds
    assert "is ahead" not in report_text(plans.report(plans.config(*plans.large, placement=APART)))
