"""The sliders of `--plan=html`: their values are overrides that load, and the plan of each is that of `--plan`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from rl_platform.launch.placed_config import load
from rl_platform.planner.lengths import Lengths
from rl_platform.planner.report import Report, plan_report
from rl_platform.planner.what_if import points, sliders, stretched

ROOT = Path(__file__).resolve().parents[3]
APART = """cluster={inventory: {nodes: 2, gpus_per_node: 8, gpu: h100}, component_placement:
 {actor: 0-7, critic: 8-15, rollout: '0-15:0-3', reward: {node_group: node, placement: '0-1:0-63'}}}"""


def planned(config: str, *overrides: str) -> Report:
    loaded, placement, inventory = load(config, overrides)
    return plan_report(loaded.config, placement, inventory)


def values(config: str, *overrides: str) -> dict[str, list[int]]:
    loaded, _, inventory = load(config, overrides)
    return {slider.name: [choice.value for choice in slider.choices] for slider in sliders(loaded.config, inventory)}


def test_every_position_is_the_plan_of_its_overrides():
    config = str(ROOT / "configs/reasoning/ppo.yaml")
    loaded, _, inventory = load(config, [])
    chosen = sliders(loaded.config, inventory)
    result = points(chosen, lambda overrides: planned(config, *overrides))
    assert len(result) == 25
    for point in result.values():
        assert point.report is not None
        assert point.report.spans == planned(config, *point.overrides).spans
    own = result[tuple(slider.own for slider in chosen)]
    assert own.overrides == ()
    longer = result[(chosen[0].own + 1, chosen[1].own)].report
    assert longer is not None
    assert longer.config.data.max_response_length == 2 * loaded.config.data.max_response_length
    assert longer.seconds > own.report.seconds


def test_a_larger_cluster_has_the_placement_in_proportion():
    config = str(ROOT / "configs/reasoning/ppo.yaml")
    loaded, _, inventory = load(config, [APART])
    devices = sliders(loaded.config, inventory)[0]
    assert [choice.value for choice in devices.choices] == [8, 16, 32, 64]  # a quarter would be half a machine
    for choice in devices.choices:
        report = planned(config, APART, *choice.overrides)
        assert report.inventory.num_accelerators == choice.value
        ranks = {name: part.ranks for name, part in report.layout.parts.items()}
        assert ranks == {
            "actor": choice.value // 2,
            "critic": choice.value // 2,
            "rollout": choice.value // 4,
            "reward": 4 * choice.value,
        }


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("cluster.gpus_per_node=8",), [2, 4, 8, 16, 32]),  # parts of a machine, or several
        (("cluster.gpus_per_node=2",), [1, 2, 4, 8]),
        (("cluster.devices_per_node=2",), [1, 2, 4, 8]),
        ((), None),  # a machine without devices
        (("cluster.gpus_per_node=4", "cluster.node_groups=[{label: a, node_ranks: '0'}]"), None),
    ],
)
def test_numbers_of_devices(overrides: Sequence[str], expected: list[int] | None):
    found = values(str(ROOT / "configs/reasoning/ppo.yaml"), *overrides)
    assert next((each for name, each in found.items() if name in ("GPUs", "CPU workers")), None) == expected


def test_a_position_that_is_refused_has_the_reason():
    config = str(ROOT / "configs/embodied/ppo.yaml")
    loaded, _, inventory = load(config, [])
    chosen = sliders(loaded.config, inventory)
    assert [slider.name for slider in chosen] == ["steps per environment", "environments"]
    fewest = points(chosen, lambda overrides: planned(config, *overrides))[(0, 0)]
    assert fewest.report is None
    assert fewest.refusal.startswith("data.mini_batch_size: mini-batches of 512 do not divide the 640 transitions")


def test_micro_batches_grow_where_they_would_not_hold_the_longest_sequence():
    config = str(ROOT / "configs/reasoning/recipes/deepseek_r1_7b_dapo_64gpu.yaml")
    loaded, _, inventory = load(config, [])
    lengths = next(slider for slider in sliders(loaded.config, inventory) if "response" in slider.name)
    longest = lengths.choices[-1].overrides
    assert any(override.startswith("actor.max_tokens_per_micro_batch=") for override in longest)
    assert planned(config, *longest).config.data.max_response_length == lengths.choices[-1].value


def test_measured_lengths_stretch_with_the_longest_response():
    lengths = stretched(Lengths((5,), (1, 2, 10)), longest=40, former=20)
    assert (lengths.prompts, lengths.responses) == ((5,), (2, 4, 20))
