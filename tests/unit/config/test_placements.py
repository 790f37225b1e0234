"""The shipped placements: one per shape for both tasks, each possible as it stands; the docs list all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_platform.launch.placed_config import load
from rl_platform.launch.plans.plan_forms import plan
from rl_platform.placement.scheduler import Placement

ROOT = Path(__file__).parents[3]
SHIPPED = sorted(ROOT.glob("configs/*/placements/*.yaml"))


def of_shape(task: str, shape: str) -> Placement:
    return load(str(ROOT / f"configs/{task}/placements/{shape}.yaml"), [])[1]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parents[1].name}/{path.stem}")
def test_it_has_a_plan(path: Path) -> None:
    planned = load(str(path), [])
    text = plan("text", planned)
    placement = planned[1]
    assert all(f"\n{name}" in text for name in placement.components)
    assert planned[0].config.runner.experiment_name.endswith(f"_{path.stem}"), "runs of two shapes would share a folder"


def test_the_docs_list_all_of_them() -> None:
    text = (ROOT / "docs/placement.md").read_text(encoding="utf-8")
    assert [path for path in SHIPPED if f"../{path.relative_to(ROOT)}" not in text] == []


@pytest.mark.parametrize("task", ["embodied", "reasoning"])
def test_the_shapes_are_what_they_are_called(task: str) -> None:
    learner = "actor_critic" if task == "embodied" else "actor"
    apart, shared = of_shape(task, "disjoint"), of_shape(task, "all_shared")
    assert {len(host.members) for host in shared.hosts} == {len(shared.components)}
    assert not apart.takes_turns_with(learner)
    overlapping = of_shape(task, "overlapping")
    assert overlapping.takes_turns_with(learner)
    assert overlapping.runs_beside(learner)
    assert any(slot.shared for slot in of_shape(task, "several_ranks_per_gpu").components["rollout"])
    assert max(len(slot.accelerators) for slot in of_shape(task, "several_gpus_per_rank").components["rollout"]) == 2
    on_cpu = of_shape(task, "cpu_nodes").components["env" if task == "embodied" else "reward"]
    assert [(slot.node, slot.accelerators) for slot in on_cpu] == [(1, ()), (1, ())]
    for shape, nodes in (("two_nodes", 2), ("four_nodes", 4), ("ray_labels", 2)):
        assert len({host.node for host in of_shape(task, shape).hosts}) == nodes
    assert all(host.ray_labels for host in of_shape(task, "ray_labels").hosts)


def test_a_critic_alone_shares_neither_process_nor_device() -> None:
    placement = of_shape("reasoning", "critic_alone")
    assert [host.members for host in placement.hosts if ("critic", 0) in host.members] == [(("critic", 0),)]
    assert not placement.takes_turns_with("critic")
