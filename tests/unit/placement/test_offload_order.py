"""Who leaves shared GPUs when: the order of a step, the memory it saves, and when nobody has to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rl_platform.config.schema import Config
from rl_platform.placement.estimates.component_shapes import shapes
from rl_platform.placement.estimates.memory import MemoryModel
from rl_platform.placement.estimates.occupancy import offload_order
from rl_platform.placement.estimates.step_moves import phases_of
from rl_platform.placement.inventory import Inventory, inventory_for
from rl_platform.placement.offload_order import CAN_LEAVE, OffloadOrder, order_with
from rl_platform.placement.scheduler import schedule
from rl_platform.planner.report_json import as_tree
from rl_platform.planner.report_text import report_text
from rl_platform.planner.search import search

ALL = {"actor,critic,reference,rollout,reward": "all"}
PARTLY = {"actor": "0-3", "critic": "2-5", "reference,rollout,reward": "6-7"}
KL = "algorithm.use_kl_loss=true"
EVERYBODY = tuple(f"{name}.offload=true" for name in CAN_LEAVE)


def order_of(config: Config) -> OffloadOrder:
    inventory = inventory_for(config.cluster)
    return offload_order(config, schedule(config.cluster, inventory), inventory)


def moves_of(order: OffloadOrder) -> list[tuple[str, list[str], list[str]]]:
    return [(moves.phase, [*map(str, moves.leaves)], [*map(str, moves.comes)]) for moves in phases_of(order)]


def test_everybody_comes_and_goes_once_per_step(plans: Any) -> None:
    order = order_of(plans.config(KL, *EVERYBODY, placement=ALL))
    assert moves_of(order) == [
        ("sync weights", ["actor (gradients, optimizer)"], ["rollout (weights)"]),
        ("generate", ["actor (weights)"], []),
        ("reference", ["rollout (weights)"], ["reference (weights)"]),
        ("log-probs", ["reference (weights)"], ["actor (weights)"]),
        ("values", [], ["critic (weights)"]),
        ("train critic", [], ["critic (gradients, optimizer)"]),
        ("train actor", ["critic (weights, gradients, optimizer)"], ["actor (gradients, optimizer)"]),
    ]


def test_weights_that_are_the_generators_too_stay(plans: Any) -> None:
    order = order_of(plans.config(KL, *EVERYBODY, gpus=1, placement=ALL))
    assert order.lends_weights
    assert order.leaving == {"actor", "critic", "reference"}
    assert all(moves.held["actor"] != "nothing" for moves in phases_of(order))
    assert ("generate", False) not in [(name, weights) for name, weights in order.leaves_before("generate")]
    assert dict(order.leaves_before("generate"))["actor"] is False
    assert dict(order.leaves_before("generate"))["critic"] is True


@pytest.mark.parametrize("by_ray", ["cluster.runtime=ray", "cluster.address=auto"])
def test_a_generator_in_a_process_of_its_own_has_weights_of_its_own(plans: Any, by_ray: str) -> None:
    """One GPU would allow one process, but Ray starts one for each key."""
    apart = {"actor,critic,reference,reward": "0", "rollout": "0"}
    orders = [order_of(plans.config(KL, *EVERYBODY, *more, gpus=1, placement=apart)) for more in ((), (by_ray,))]
    assert [order.lends_weights for order in orders] == [True, False]
    assert orders[1].leaving == {"actor", "critic", "reference", "rollout"}
    assert ("actor", True) in orders[1].leaves_before("generate")


def test_only_those_who_meet_make_room(plans: Any) -> None:
    order = order_of(plans.config(KL, *EVERYBODY, placement=PARTLY))
    phases = {phase: (leaves, comes) for phase, leaves, comes in moves_of(order)}
    assert phases["generate"] == ([], [])  # on GPUs of its own, with the reference
    assert phases["train critic"][0] == []
    assert phases["train actor"][0] == ["critic (weights, gradients, optimizer)"]
    assert not any("actor" in move for move in phases["generate"][0])


def test_without_log_probs_the_actor_comes_for_its_update(plans: Any) -> None:
    order = order_of(plans.config(KL, "algorithm.old_log_probs=rollout", *EVERYBODY, placement=ALL))
    assert [phase for phase, *_ in moves_of(order)].count("log-probs") == 0
    assert {phase: comes for phase, _, comes in moves_of(order)}["train actor"] == [
        "actor (weights, gradients, optimizer)"
    ]


@pytest.mark.parametrize(
    "overrides", [("runner.max_staleness=1", "algorithm.rollout_is={}"), ()], ids=["ahead", "fits"]
)
def test_nobody_leaves_without_need(plans: Any, overrides: tuple[str, ...]) -> None:
    assert order_of(plans.config(*overrides)).leaving == frozenset()


def crowded(plans: Any, folder: Path, *overrides: str, **options: Any) -> Config:
    """Residents that are too large for the GPUs together, while each fits."""
    model = plans.llama(folder, num_hidden_layers=60)
    small = ("data.mini_batch_size=8", "data.train_batch_size=8")
    return plans.config(model, *small, KL, *overrides, gpus=2, placement=ALL, **options)


def test_auto_leaves_where_the_estimate_says_that_not_all_fit(plans: Any, tmp_path: Path) -> None:
    auto = plans.report(crowded(plans, tmp_path))
    stay = plans.report(crowded(plans, tmp_path, *(f"{name}.offload=false" for name in CAN_LEAVE)))
    assert auto.order.leaving == set(CAN_LEAVE)
    assert stay.order.leaving == frozenset()
    (full,), (eased,) = ({use.usage.peak for use in report.devices if use.ranks} for report in (stay, auto))
    assert eased < auto.device.memory < full
    assert any("cannot hold" in warning for warning in stay.warnings)
    assert not any("cannot hold" in warning for warning in auto.warnings)


def test_auto_knows_nothing_of_a_gpu_without_a_name_or_of_a_cpu(plans: Any, tmp_path: Path) -> None:
    assert order_of(crowded(plans, tmp_path, gpu="")).leaving == frozenset()
    config = crowded(plans, tmp_path)
    laptop = Inventory.declared(1, 0)
    assert (
        offload_order(config, schedule(config.cluster.model_copy(update={"num_nodes": 1}), laptop), laptop).leaving
        == set()
    )


def test_the_peak_is_that_of_the_fullest_phase(plans: Any) -> None:
    config = plans.config(KL, placement=ALL)
    layout = schedule(config.cluster, inventory_for(config.cluster)).layout
    memory = MemoryModel(config, shapes(config)[0], layout, on_gpu=True)
    names = ("actor", "critic", "reference", "rollout")
    actor, critic, reference, rollout = (memory.rank(name) for name in names)
    usage = memory.usage([(name, 1.0, 1) for name in names], order_with(config, layout, frozenset(names)))
    phases = [
        actor.weights + rollout.weights,
        rollout.total,
        reference.total,
        actor.weights + actor.passing,
        actor.weights + critic.weights + critic.passing,
        actor.weights + critic.total,
        actor.total,
    ]
    assert usage.peak == usage.processes + max(phases)
    alone = memory.usage([(name, 1.0, 1) for name in names], order_with(config, layout, frozenset({"critic"})))
    assert alone.peak == alone.processes + actor.lasting + reference.lasting + rollout.lasting + max(
        critic.total, critic.weights + critic.passing, actor.passing, reference.passing, rollout.passing
    )


def test_the_plan_shows_who_leaves_which_gpu_when(plans: Any, tmp_path: Path) -> None:
    report = plans.report(crowded(plans, tmp_path))
    text = report_text(report)
    assert "Offload: components moved to host memory before a phase, and back to the GPU for it:" in text
    lines = text.partition("Offload: ")[2].splitlines()
    first = "GPU 0-1  sync weights  out: actor (gradients, optimizer); in: rollout (weights)"
    assert lines[1].strip() == first
    bars = {line.split(":")[1].split("  ")[0].strip(): line for line in text.splitlines() if "#" in line}
    assert bars["train actor"].endswith("; out: critic; in: actor")
    assert bars["reference"].endswith("; out: rollout; in: reference")
    phases = {phase["phase"]: phase for phase in as_tree(report)["step"]["phases"]}
    assert list(phases["generate"]["leaves"]) == ["actor (weights)"]
    stay = plans.report(crowded(plans, tmp_path, *(f"{name}.offload=false" for name in CAN_LEAVE)))
    assert "Offload: " not in report_text(stay)
    assert report.seconds > stay.seconds, "swaps take time"


APART: dict[str, object] = {"actor": "0-1", "critic": "2-3", "rollout,reward": "4-7"}


@pytest.mark.parametrize(
    ("overrides", "options", "expected"),
    [
        (("critic.offload=true",), {"placement": APART}, "critic.offload: no other component uses its devices"),
        (("rollout.offload=true",), {"gpus": 1}, "rollout.offload: it generates with the actor's own weights"),
        (("actor.offload=true",), {"gpus": 0}, "actor.offload: on a CPU it leaves main memory for main memory"),
    ],
)
def test_where_it_saves_nothing_the_plan_says_so(plans: Any, overrides: Any, options: Any, expected: str) -> None:
    warnings = plans.report(plans.config(*overrides, **options)).warnings
    assert any(warning.startswith(expected) for warning in warnings), warnings


def test_a_search_finds_placements_that_fit_in_turns_only(plans: Any, tmp_path: Path) -> None:
    auto, stay = (
        search(config, inventory_for(config.cluster))
        for config in (
            crowded(plans, tmp_path),
            crowded(plans, tmp_path, *(f"{name}.offload=false" for name in CAN_LEAVE), gpu="b200"),
        )
    )
    assert any(len(candidate.keys) == 1 for candidate in auto.candidates)
    assert stay.device.kind == "b200"


# streaming in the plan


def test_the_plan_shows_evaluations_beside_the_generation(plans: Any) -> None:
    apart: dict[str, object] = {"actor,critic": "0-3", "rollout,reward": "4-7"}
    sizes = ("data.train_batch_size=4096", "data.mini_batch_size=256")
    report = plans.report(plans.config(*sizes, placement=apart))
    spans = {span.phase: span for span in report.spans}
    generation = spans["generate"]
    assert report.streams == {"actor", "critic"}
    for phase in ("log-probs", "values"):
        assert generation.start < spans[phase].start < generation.stop < spans[phase].stop
        assert spans[phase].note == "streams beside generate"
    assert spans["train critic"].start == max(spans["log-probs"].stop, spans["values"].stop)
    assert "  actor, critic stream: every " in report_text(report)
    shared = plans.report(plans.config(*sizes))
    assert shared.streams == frozenset()
    assert "stream" not in report_text(shared)


def test_who_leaves_evaluates_in_a_phase_of_its_own(plans: Any) -> None:
    apart: dict[str, object] = {"actor,critic": "0-3", "rollout,reward": "4-7"}
    assert plans.report(plans.config("critic.offload=true", placement=apart)).streams == {"actor"}


SHORT = "{}.max_tokens_per_micro_batch=80"
REWARD_MODEL = "reward={type: model, model: {path: Qwen/Qwen2.5-0.5B}}"


def test_an_actor_leaves_for_a_reward_model(plans: Any) -> None:
    apart = {"actor,reward": "0-1", "critic": "2-3", "rollout": "4-7"}
    config = plans.config("actor.offload=true", REWARD_MODEL, placement=apart)
    phases = {phase: (leaves, comes) for phase, leaves, comes in moves_of(order_of(config))}
    assert phases["generate"][0] == ["actor (weights)"]
    assert phases["log-probs"][1] == ["actor (weights)"]
    assert not any("offload" in warning for warning in plans.report(config).warnings)
    verifier = plans.config("actor.offload=true", placement=apart)
    assert order_of(verifier).leaving == set()
    assert "actor.offload: no other component uses its devices, so it stays" in plans.report(verifier).warnings


def test_a_reward_model_and_the_generator_work_at_once(plans: Any) -> None:
    for offload in ((), ("critic.offload=true",)):
        report = plans.report(plans.config(REWARD_MODEL, SHORT.format("actor"), SHORT.format("critic"), *offload))
        parts = report.devices[0].usage.components
        lasting = sum(parts[name].lasting for name in ("actor", "rollout", "reward"))
        both = parts["rollout"].passing + parts["reward"].passing
        assert both > max(parts["actor"].passing, parts["reward"].passing)
        assert report.devices[0].usage.peak >= report.devices[0].usage.processes + lasting + both
