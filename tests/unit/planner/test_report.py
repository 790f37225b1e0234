"""The report of a plan in its three forms, and its warnings."""

from __future__ import annotations

import json
import textwrap
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from rl_platform.config import load_config
from rl_platform.placement.inventory import Inventory, Node, inventory_for
from rl_platform.placement.scheduler import schedule
from rl_platform.planner.placement_text import render
from rl_platform.planner.report import plan_report
from rl_platform.planner.report_json import as_tree, report_json
from rl_platform.planner.report_text import report_text
from rl_platform.planner.svg import report_svg

ROOT = Path(__file__).parents[3]
SVG = "{http://www.w3.org/2000/svg}"
APART: dict[str, object] = {
    "actor,critic": "0-3",
    "rollout": "4-6",
    "reward": {"node_group": "node", "placement": "0:0-1"},
}


def test_text_shows_placement_memory_time_batches_and_warnings(plans: Any) -> None:
    report = plans.report(plans.config(placement=APART))
    text = report_text(report)
    assert text.startswith(render(report.placement, report.inventory))
    rest = text.removeprefix(render(report.placement, report.inventory))
    memory, step, batches, warnings = rest.strip("\n").split("\n\n")
    assert memory.splitlines()[0] == "Memory in GiB, estimated (h100 has 79.00):"
    rows = [line.split() for line in memory.splitlines()]
    assert rows[1] == ["weights", "graphs", "gradients", "optimizer", "activations", "KV", "cache", "sum"]
    assert [row[:3] for row in rows if row[0] == "GPU"] == [["GPU", "0-3", "actor"], ["GPU", "4-6", "rollout"]]
    assert step.splitlines()[0].startswith("One step, estimated for h100: ")
    assert step.splitlines()[-1].startswith("  actor, critic stream: every 16 finished responses")
    assert [line.split("  ")[1] for line in step.splitlines()[2:9]] == [
        "actor: sync weights",
        "rollout: generate",
        "reward: score",
        "actor: log-probs",
        "critic: values",
        "critic: train critic",
        "actor: train actor",
    ]
    assert batches == textwrap.dedent(
        """\
        Batches:
          data.train_batch_size: 64 rows over 3 rollout ranks: 22 or 21 each
          data.mini_batch_size: 32 rows over 4 actor ranks: 8 each
          data.mini_batch_size: 32 rows over 4 critic ranks: 8 each"""
    )
    assert warnings == textwrap.dedent(
        """\
        Warnings:
          data.train_batch_size: 64 rows over 3 rollout ranks: 22 or 21 each: the ranks do not divide it, so some wait for others
          GPU 7 is used by no component"""  # noqa: E501
    )


def test_gpus_that_hold_alike_are_one_block(plans: Any) -> None:
    text = report_text(plans.report(plans.config(nodes=512)))
    assert "  GPU 0-4095  actor " in text
    assert len(text.splitlines()) < 60


@pytest.mark.parametrize(
    ("overrides", "options", "expected"),
    [
        ((), {"placement": {"actor,critic,rollout,reward": "0-6"}}, ["GPU 7 is used by no component"]),
        (("data.mini_batch_size=4", "data.train_batch_size=64"), {}, ["4 ranks get none; use 4 ranks or fewer"]),
        ((), {"placement": {"actor,critic,rollout,reward": "all:0-3"}}, ["a rank owns 2 GPUs and computes on"]),
        (("actor.model.path=/nowhere",), {}, ["no estimate for actor, rollout, critic: no config.json of /nowhere"]),
        ((), {"gpu": ""}, ["the kind of GPU is not known, so times are those of an h100"]),
        ((), {}, []),
    ],
)  # fmt: skip
def test_warnings(plans: Any, overrides: tuple[str, ...], options: dict[str, Any], expected: list[str]) -> None:
    warnings = plans.report(plans.config(*overrides, **options)).warnings
    for text in expected:
        assert any(text in warning for warning in warnings), warnings
    assert bool(warnings) == bool(expected)


def test_memory_over_the_gpus_says_who_and_what_helps(plans: Any, tmp_path: Any) -> None:
    model = plans.llama(tmp_path, num_hidden_layers=60)
    stay = tuple(f"{name}.offload=false" for name in ("actor", "critic", "rollout"))
    report = plans.report(plans.config(model, *stay, gpus=2, placement={"actor,critic,rollout,reward": "all"}))
    (warning,) = report.warnings
    assert warning.startswith("GPU 0-1 cannot hold ")
    assert "h100 has 79.0 GiB" in warning
    assert "more ranks, over which its parameters and optimizer are sharded" in warning
    assert max(use.usage.peak for use in report.devices) > 79 * 2**30
    assert "over" in report_svg(report).split("</style>")[1]
    unlimited = (f"{name}.max_tokens_per_micro_batch=null" for name in ("actor", "critic"))
    crowded = ("data.mini_batch_size=64", "data.max_response_length=4000", *unlimited)
    report = plans.report(plans.config(*crowded, gpus=1))
    assert any("a smaller actor.micro_batch_size" in warning for warning in report.warnings)


def test_weights_larger_than_a_gpu_need_several_for_each_rank(plans: Any, tmp_path: Any) -> None:
    apart = {"actor,critic": "0-15", "rollout,reward": "16"}
    overrides = plans.llama(tmp_path, num_hidden_layers=600), "data.mini_batch_size=16"
    (warning,) = plans.report(plans.config(*overrides, gpus=17, placement=apart)).warnings
    assert warning.startswith("GPU 16 cannot hold ")
    assert warning.endswith("its weights alone are larger: more GPUs for each rank (rollout.backend sglang or vllm)")


def test_a_machine_without_gpus_is_judged_by_its_main_memory() -> None:
    config = load_config(ROOT / "configs/reasoning/ppo.yaml").config
    small = Inventory((Node("laptop", 0, cpus=4, memory=4 * 2**30),), "detected")
    report = plan_report(config, schedule(config.cluster, small), small)
    assert report.device.kind == "cpu"
    assert [use.number for use in report.devices] == [None]
    assert any(warning.startswith("laptop cannot hold") for warning in report.warnings)
    large = Inventory((Node("laptop", 0, cpus=4, memory=64 * 2**30),), "detected")
    assert not plan_report(config, schedule(config.cluster, large), large).warnings
    text = report_text(report)
    assert "a node has 4.00" in text
    assert "One step, estimated for the CPU" in text


def test_the_embodied_step(plans: Any) -> None:
    config = load_config(ROOT / "configs/embodied/cartpole.yaml").config
    laptop = Inventory((Node("laptop", 0, cpus=4, memory=2**34),), "detected")
    report = plan_report(config, schedule(config.cluster, laptop), laptop)
    phases = [(span.component, span.phase) for span in report.spans]
    assert phases == [
        ("actor_critic", "sync weights"),
        ("rollout", "collect"),
        ("env", "simulate"),
        ("actor_critic", "log-probs"),
        ("actor_critic", "train actor"),
    ]
    assert [division.key for division in report.divisions] == ["env.num_envs", "data.mini_batch_size"]


def test_json_has_every_gpu_and_is_stable(plans: Any) -> None:
    report = plans.report(plans.config(placement=APART))
    tree = json.loads(report_json(report))
    assert tree == as_tree(report)
    assert list(tree) == [
        "version",
        "cluster",
        "components",
        "devices",
        "processes",
        "step",
        "batches",
        "unknown",
        "warnings",
    ]
    assert tree["version"] == 1
    assert tree["cluster"]["device"] == {"kind": "h100", "known": True, "memory_bytes": 79 * 2**30}
    assert len(tree["devices"]) == 8 + 1  # and the node's CPU, which reward is on
    first = tree["devices"][0]
    assert (first["node"], first["gpu"], first["ranks"]) == ("node-0", 0, {"actor": [0], "critic": [0]})
    memory = first["memory_bytes"]
    assert set(memory) == {"components", "processes", "peak", "expected"}
    assert memory["expected"] < memory["peak"]  # prompts of half the limit
    lasting = {"weights", "published", "graphs", "optimizer"}
    assert set(memory["components"]["actor"]) == lasting | {"gradients", "activations", "kv_cache"}
    assert first["capacity_bytes"] == 79 * 2**30 > memory["peak"]
    assert tree["components"]["actor"]["parameters"] == 134_515_008
    assert tree["components"]["reward"]["parameters"] is None
    assert [phase["phase"] for phase in tree["step"]["phases"]][:2] == ["sync weights", "generate"]
    assert tree["step"]["seconds"] == max(phase["stop"] for phase in tree["step"]["phases"])
    assert tree["batches"][0] == {
        "key": "data.train_batch_size",
        "rows": 64,
        "component": "rollout",
        "ranks": 3,
        "together": 1,
        "even": False,
    }


def test_json_says_null_for_what_is_not_known(plans: Any) -> None:
    tree = as_tree(plans.report(plans.config("actor.model.path=/nowhere", gpu="")))
    assert tree["step"]["seconds"] is None
    assert tree["devices"][0]["capacity_bytes"] is None
    assert tree["unknown"]["actor"] == "no config.json of /nowhere is on this machine"


def boxes(picture: str, style: str) -> int:
    root = ElementTree.fromstring(picture)
    return sum(element.get("class") == style for element in root.iter(f"{SVG}rect"))


def test_the_picture_has_every_gpu_and_every_phase(plans: Any) -> None:
    report = plans.report(plans.config(placement=APART))
    picture = report_svg(report)
    assert boxes(picture, "gpu") == 9
    root = ElementTree.fromstring(picture)
    words = [element.text for element in root.iter(f"{SVG}text")]
    assert {f"GPU {number}" for number in range(8)} <= set(words)
    assert {f"{span.component}: {span.phase}" for span in report.spans} <= set(words)
    width, height = (float(number) for number in root.attrib["viewBox"].split()[2:])
    for box in root.iter(f"{SVG}rect"):
        assert float(box.get("x", 0)) + float(box.attrib["width"]) <= width + 0.1
        assert float(box.get("y", 0)) + float(box.attrib["height"]) <= height + 0.1
    assert "prefers-color-scheme: dark" in picture


def test_equal_nodes_are_drawn_once(plans: Any) -> None:
    placement: dict[str, object] = {"actor,critic": "0-2047", "rollout,reward": "2048-4095"}
    picture = report_svg(plans.report(plans.config(nodes=512, placement=placement)))
    assert boxes(picture, "gpu") == 16
    assert "node-0 .. node-255" in picture
    assert len(picture) < 40_000


def test_names_from_the_config_are_escaped(plans: Any) -> None:
    picture = report_svg(plans.report(plans.config('runner.experiment_name="<b> & </text>"')))
    assert "<b>" not in picture
    ElementTree.fromstring(picture)


def test_ten_thousand_gpus_are_planned_without_quadratic_work(plans: Any) -> None:
    """It takes about a second. Work that grows with the square of the GPUs would take minutes."""
    import time

    placement: dict[str, object] = {"actor,critic": "0-4999", "rollout,reward": "5000-9999"}
    config = plans.config(nodes=1250, placement=placement)
    inventory = inventory_for(config.cluster)
    began = time.process_time()
    report = plan_report(config, schedule(config.cluster, inventory), inventory)
    assert report_text(report)
    assert time.process_time() - began < 3
    assert len(report.devices) == 10_000
    assert report_json(report)
    assert report_svg(report)


def test_a_rank_on_several_gpus_fills_them_if_its_engine_does(plans: Any) -> None:
    placement: dict[str, object] = {"actor,critic": "0-3", "reward": "3", "rollout": "4-7:0-1"}
    spread = plans.report(plans.config("rollout.backend=sglang", placement=placement))
    first = plans.report(plans.config(placement=placement))
    peaks = [[use.usage.components["rollout"].total for use in report.devices[4:]] for report in (spread, first)]
    assert len(set(peaks[0])) == 1
    assert peaks[0][0] > 0
    assert peaks[1] == [peaks[1][0], 0, peaks[1][0], 0]
    assert not any("a rank owns" in warning for warning in spread.warnings)
    assert any("rollout: a rank owns 2 GPUs" in warning for warning in first.warnings)
