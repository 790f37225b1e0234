"""Clusters with two kinds of GPU: rates and memory of each component are those of its own nodes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from plans import Plans

from rl_platform.launch.placed_config import load
from rl_platform.placement.estimates.component_shapes import shapes
from rl_platform.planner.candidates import Candidate, Keys
from rl_platform.planner.cost import CostModel
from rl_platform.planner.report import Report, plan_report
from rl_platform.planner.report_text import report_text
from rl_platform.planner.search import Search, Variant, search

ROOT = Path(__file__).resolve().parents[3]
CONFIG = str(ROOT / "configs" / "reasoning" / "ppo.yaml")
ROWS = ("data.train_batch_size=1024", "data.mini_batch_size=256")
APART = {"actor,critic": "0-7", "rollout,reward": "8-15"}


def cluster(gpus: tuple[str, str], placement: dict[str, object] | None = None) -> str:
    """Two nodes with eight GPUs each of these kinds."""
    groups = [{"label": "second", "node_ranks": "1", "gpu": gpus[1]}]
    inventory = {"nodes": 2, "gpus_per_node": 8, "gpu": gpus[0]}
    value = {"inventory": inventory, "node_groups": groups, "component_placement": placement or APART}
    return f"cluster={json.dumps(value)}"


def report(*overrides: str) -> Report:
    loaded, placement, inventory = load(CONFIG, [*ROWS, *overrides])
    return plan_report(loaded.config, placement, inventory)


def test_each_phase_takes_as_long_as_on_a_cluster_of_its_own_kind():
    mixed, fast, slow = (report(cluster(kinds)) for kinds in (("h100", "l4"), ("h100", "h100"), ("l4", "l4")))
    for phase in ("log-probs", "values", "train critic", "train actor"):
        assert mixed.works[phase] == fast.works[phase]
        assert mixed.works[phase] != slow.works[phase]
    for phase in ("generate", "sync weights"):  # the slower network decides
        assert mixed.works[phase] == slow.works[phase]
        assert mixed.works[phase] != fast.works[phase]
    assert report(cluster(("l4", "h100"))).works["generate"] == fast.works["generate"]


def test_orders_of_groups_on_the_same_kinds_are_predicted_once(monkeypatch: pytest.MonkeyPatch):
    predicted, candidate = Counter[str](), Search._candidate

    def counted(self: Search, variant: Variant, model: CostModel, keys: Keys) -> Candidate:
        kinds = [(names, len(devices), sorted({device // 8 for device in devices})) for names, devices in keys]
        predicted[f"{sorted(kinds)} {variant.rollout_devices} {variant.changes}"] += 1
        return candidate(self, variant, model, keys)

    monkeypatch.setattr(Search, "_candidate", counted)
    loaded, _, inventory = load(CONFIG, [*ROWS, cluster(("h100", "l4"))])
    search(loaded.config, inventory)
    assert set(predicted.values()) == {1}
    assert any("[0, 1]" in places for places in predicted)


def test_a_group_on_one_node_has_another_prediction_than_one_on_two():
    groups = [{"label": "slow", "node_ranks": "2", "gpu": "l4"}]
    inventory = {"nodes": 3, "gpus_per_node": 8, "gpu": "h100"}
    value = {"inventory": inventory, "node_groups": groups, "component_placement": APART}
    loaded, _, machines = load(CONFIG, [*ROWS, f"cluster={json.dumps(value)}"])
    searching = Search(loaded.config, shapes(loaded.config)[0], machines, None)
    across = (("actor",), range(4)), (("critic",), range(4, 12)), (("rollout", "reward"), range(16, 24))
    within = (("critic",), range(8)), (("actor",), range(8, 12)), (("rollout", "reward"), range(16, 24))
    assert searching._places(across) != searching._places(within)


def test_a_component_on_both_kinds_computes_at_the_slower_rate():
    both = {"actor,critic,rollout,reward": "all"}
    mixed, slow = (report(cluster(kinds, both)) for kinds in (("h100", "l4"), ("l4", "l4")))
    assert mixed.works == slow.works


@pytest.fixture
def large(plans: Plans, tmp_path: Path) -> tuple[str, ...]:
    """A step that a rollout of a Llama with 1.2 billion parameters fills an l4 with."""
    return *plans.large, plans.llama(tmp_path), "rollout.max_running_requests=256", "rollout.backend=torch"


def test_memory_is_compared_with_the_gpus_own(large: tuple[str, ...]):
    mixed = report(cluster(("h100", "l4")))
    assert [round(mixed.capacity(use) / 2**30) for use in mixed.devices if use.number in (0, 15)] == [79, 22]
    assert "Memory in GiB, estimated (h100 has 79.00, l4 has 22.00)" in report_text(mixed)
    full = {kinds: report(cluster(kinds), *large).warnings for kinds in (("h100", "l4"), ("l4", "h100"))}
    assert any(text.startswith("GPU 8-15") and "l4 has 22.0 GiB" in text for text in full["h100", "l4"])
    assert not any(text.startswith("GPU 8-15") for text in full["l4", "h100"])


def test_only_gpus_without_room_are_left(large: tuple[str, ...]):
    shared = {"actor,rollout,reward": "0-7", "critic": "8-15"}
    leaving = {
        kinds: report(cluster(kinds, shared), *large).order.leaving
        for kinds in (("h100", "l4"), ("l4", "h100"), ("h100", "h100"))
    }
    assert leaving["h100", "l4"] == leaving["h100", "h100"]
    assert leaving["l4", "h100"] > leaving["h100", "h100"]


def test_a_search_places_the_work_on_the_faster_gpus():
    for kinds, first in ((("h100", "l4"), True), (("l4", "h100"), False)):
        loaded, placement, inventory = load(CONFIG, [*ROWS, cluster(kinds)])
        candidates = search(loaded.config, inventory).candidates
        best = {frozenset(names for names, _ in one.keys): one for one in reversed(candidates)}
        two = best[frozenset({("actor", "critic"), ("rollout", "reward")})]
        trainers = next(devices for names, devices in two.keys if "actor" in names)
        assert (trainers.stop <= 8) is first
        # the proposal is at least as good as the config's own placement
        assert candidates[0].seconds <= plan_report(loaded.config, placement, inventory).seconds


def test_one_kind_that_is_written_twice_changes_nothing():
    loaded, _, inventory = load(CONFIG, [*ROWS, cluster(("h100", "h100"))])
    plain = {"inventory": {"nodes": 2, "gpus_per_node": 8, "gpu": "h100"}, "component_placement": APART}
    other, _, same = load(CONFIG, [*ROWS, f"cluster={json.dumps(plain)}"])
    found, expected = search(loaded.config, inventory), search(other.config, same)
    assert found.candidates == expected.candidates
    assert not found.mixed


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"gpu": "h1000"}, "cluster.node_groups[0].gpu"),
        (
            {"gpu": "l4", "unnamed": True},
            "cluster.node_groups[0].gpu: this is for plans of a cluster whose GPUs are named",
        ),
        ({"gpu": "l4", "twice": True}, "cluster.node_groups[1].gpu: another group gives node-1 l4"),
    ],
)
def test_wrong_kinds_are_refused(command, value: dict[str, object], message: str):
    inventory = {"nodes": 2, "gpus_per_node": 8} | ({} if value.get("unnamed") else {"gpu": "h100"})
    groups = [{"label": "a", "node_ranks": "1", "gpu": value["gpu"]}]
    groups += [{"label": "b", "node_ranks": "0-1", "gpu": "a10"}] if value.get("twice") else []
    changed = {"inventory": inventory, "node_groups": groups, "component_placement": APART}
    ended = command("--plan", CONFIG, f"cluster={json.dumps(changed)}")
    assert (ended.code, ended.out) == (2, "")
    assert message in ended.err
