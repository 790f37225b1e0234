"""`actor.device: auto` keeps small embodied policies on the CPU of a machine with GPUs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from stand_ins import context

from rl_platform.components.learner import device_of
from rl_platform.config import load_config
from rl_platform.config.schema import Config
from rl_platform.launch.start_checks.preflight import rank_problems
from rl_platform.placement.estimates.policy_device import policy_device_text, with_policy_device
from rl_platform.placement.inventory import Inventory, Node
from rl_platform.placement.scheduler import Placement, schedule
from rl_platform.planner.report import plan_report

CONFIGS = Path(__file__).parents[3] / "configs/embodied"


def placed(name: str, gpus: int, *overrides: str) -> tuple[Config, Placement]:
    config = load_config(CONFIGS / name, [*overrides]).config
    return config, schedule(config.cluster, Inventory.declared(1, gpus))


ONE = "cluster.component_placement={'actor_critic,env,rollout': 0}"
SEVERAL = "cluster.component_placement={actor_critic: 0-1, 'env,rollout': 2}"


@pytest.mark.parametrize(
    ("name", "overrides", "device"),
    [
        ("cartpole.yaml", [ONE], "cpu"),
        ("ant.yaml", [ONE], "cpu"),
        ("cartpole.yaml", [ONE, "actor.device=gpu"], "gpu"),
        ("cartpole.yaml", [ONE, "actor.model.hidden_sizes=[1024, 1024]"], "gpu"),
        ("cartpole.yaml", [SEVERAL], "gpu"),
        ("pixels.yaml", [ONE], "gpu"),
        ("vla.yaml", [ONE], "gpu"),
    ],
)
def test_where_a_policy_with_a_gpu_works(name: str, overrides: list[str], device: str) -> None:
    config, placement = placed(name, 4, *overrides)
    resolved = with_policy_device(config, placement.layout)
    assert resolved.actor.device == device
    text = policy_device_text(config, resolved)
    assert (text is not None) == (device == "cpu")
    assert text is None or "actor.device: gpu" in text
    used = device_of(replace(context("actor_critic"), accelerators=(0,)), resolved)
    assert used == torch.device(*(("cuda", 0) if device == "gpu" else ("cpu",)))


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_the_plan_counts_a_policy_where_it_works(device: str) -> None:
    inventory = Inventory((replace(Inventory.declared(1, 1).nodes[0], cpus=8),), gpu="h100")
    config, _ = placed("cartpole.yaml", 1, ONE, *(["actor.device=gpu"] if device == "gpu" else []))
    placement = schedule(config.cluster, inventory)
    report = plan_report(config, placement, inventory)
    used = {use.local for use in report.devices if use.usage.peak}
    assert used == ({None} if device == "cpu" else {0})
    assert any("actor.device cpu" in text for text in report.decisions) == (device == "cpu")
    assert not any("used by no component" in warning for warning in report.warnings), "its process owns the GPU"
    laptop = Inventory((Node("laptop", cpus=8),))
    alone = plan_report(config, schedule(config.cluster, laptop), laptop) if device == "cpu" else None
    assert alone is None or alone.seconds == pytest.approx(report.seconds)


def test_without_a_gpu_nothing_is_decided() -> None:
    config, placement = placed("cartpole.yaml", 0)
    assert with_policy_device(config, placement.layout) is config
    assert policy_device_text(config, config) is None
    assert device_of(context("actor_critic"), config).type == "cpu"


def test_several_learners_with_gpus_cannot_work_on_the_cpu() -> None:
    config, placement = placed("cartpole.yaml", 4, SEVERAL, "actor.device=cpu")
    assert [problem.key for problem in rank_problems(config, placement)] == ["actor.device"]
    assert not [*rank_problems(*placed("cartpole.yaml", 4, SEVERAL))]
    assert not [*rank_problems(*placed("cartpole.yaml", 4, ONE, "actor.device=cpu"))]
