"""Predicted times: the laws they obey, the order of phases, and the calibration by a run."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from rl_platform.config import load_config
from rl_platform.errors import ConfigError
from rl_platform.placement.inventory import Inventory, Node, inventory_for
from rl_platform.placement.scheduler import schedule
from rl_platform.planner.basis import Basis, Correction
from rl_platform.planner.calibration import corrections, read_measured
from rl_platform.planner.rates import ENV_STEP_S
from rl_platform.planner.report import Report, plan_report
from rl_platform.planner.search import search
from rl_platform.planner.step_timeline import duration, gantt

ROOT = Path(__file__).parents[3]
APART: dict[str, object] = {"actor": "0-3", "critic": "4-5", "rollout,reward": "6-7"}
PHASES = ["sync weights", "generate", "score", "log-probs", "values", "train critic", "train actor"]


def seconds(report: Report) -> dict[str, float]:
    return {span.phase: span.seconds for span in report.spans}


@pytest.mark.parametrize("placement", ["shared", "apart"])
def test_more_gpus_of_a_node_are_never_slower(tmp_path: Path, placement: str, plans: Any) -> None:
    model = plans.llama(tmp_path)
    times = []
    for gpus in (2, 4, 8, 16, 32, 64):
        half = gpus // 2
        apart = {"actor,critic": f"0-{half - 1}", "rollout,reward": f"{half}-{gpus - 1}"}
        where: dict[str, object] | None = None if placement == "shared" else {**apart}
        times.append(seconds(plans.report(plans.config(*plans.large, model, gpus=gpus, placement=where))))
    for fewer, more in itertools.pairwise(times):
        assert all(more[phase] <= fewer[phase] for phase in PHASES if phase != "sync weights")
        assert sum(more.values()) < sum(fewer.values())


def test_more_nodes_are_never_slower(tmp_path: Path, plans: Any) -> None:
    reports = [plans.report(plans.config(*plans.large, plans.llama(tmp_path), nodes=nodes)) for nodes in (2, 4, 8, 16)]
    totals = [report.seconds for report in reports]
    assert totals == sorted(totals, reverse=True)


def test_a_larger_model_is_slower_in_every_phase(tmp_path: Path, plans: Any) -> None:
    small = seconds(plans.report(plans.config(*plans.large, plans.llama(tmp_path / "small"), placement=APART)))
    for change in ({"num_hidden_layers": 32}, {"intermediate_size": 16384}, {"hidden_size": 4096}):
        larger = seconds(
            plans.report(plans.config(*plans.large, plans.llama(tmp_path / "large", **change), placement=APART))
        )
        assert all(larger[phase] > small[phase] for phase in PHASES), change


@pytest.mark.parametrize(
    ("change", "slower"),
    [
        ("data.max_response_length=4096", {"generate", "score", "log-probs", "values", "train critic", "train actor"}),
        ("algorithm.ppo_epochs=2", {"train critic", "train actor"}),
        ("algorithm.critic_ppo_epochs=3", {"train critic"}),
        ("critic.mini_batch_size=8", {"values", "train critic"}),
        ("actor.model.dtype=float32", {"generate", "score", "log-probs", "values", "train critic", "train actor"}),
        ("rollout.max_running_requests=32", {"generate", "score"}),
    ],
)
def test_what_a_key_makes_slower(tmp_path: Path, change: str, slower: set[str], plans: Any) -> None:
    model = plans.llama(tmp_path)
    before, after = (seconds(plans.report(plans.config(*plans.large, model, *more))) for more in ((), (change,)))
    assert {phase for phase in PHASES if after[phase] > before[phase] * 1.001} == slower


def test_weights_cost_nothing_in_one_process_and_the_network_between_nodes(tmp_path: Path, plans: Any) -> None:
    model = plans.llama(tmp_path)
    placements: list[tuple[int, dict[str, object]]] = [
        (1, {"actor,critic,rollout,reward": "0"}),
        (1, {"actor,critic": "0-3", "rollout,reward": "4-7"}),
        (2, {"actor,critic": "0-7", "rollout,reward": "8-15"}),
    ]
    sync = [
        seconds(plans.report(plans.config(model, nodes=nodes, placement=placement)))["sync weights"]
        for nodes, placement in placements
    ]
    assert sync[0] < 0.001 < sync[1] < sync[2]
    assert sync[2] == pytest.approx(1.236e9 * 4 / (50e9 * 0.7), rel=0.05)


def test_phases_of_shared_gpus_follow_one_another_in_the_order_of_the_step(plans: Any) -> None:
    config = plans.config("algorithm.use_kl_loss=true", placement={"actor,critic,reference,rollout,reward": "all"})
    spans = [span for span in plans.report(config).spans if not span.note]
    order = ["sync weights", "generate", "reference", "log-probs", "values", "train critic", "train actor"]
    assert [span.phase for span in spans] == order
    for before, after in itertools.pairwise(spans):
        assert after.start == before.stop


def test_components_on_gpus_of_their_own_work_side_by_side(plans: Any) -> None:
    report = plans.report(plans.config(placement=APART))
    spans = {span.phase: span for span in report.spans}
    assert spans["log-probs"].start == spans["values"].start == spans["generate"].stop
    assert spans["train critic"].start == spans["train actor"].start
    assert spans["train actor"].start == max(spans["log-probs"].stop, spans["values"].stop)
    assert report.seconds < sum(span.seconds for span in report.spans if not span.note)
    assert (spans["score"].start, spans["score"].stop) == (spans["generate"].start, spans["generate"].stop)
    assert spans["score"].component == "reward"


def test_partly_shared_gpus_serialise_those_who_share(plans: Any) -> None:
    spans = {
        span.phase: span
        for span in plans.report(
            plans.config(placement={"actor": "0-3", "critic": "2-5", "rollout,reward": "6-7"})
        ).spans
    }
    assert spans["values"].start == spans["log-probs"].stop
    assert spans["train actor"].start == spans["train critic"].stop


def test_a_reward_model_takes_turns_with_the_rollout_on_its_gpus_and_streams_on_its_own(
    plans: Any, tmp_path: Path
) -> None:
    plans.llama(tmp_path)
    reward = f"reward={{type: model, model: {{path: {tmp_path}}}}}", "data.train_batch_size=1024"
    apart: dict[str, object] = {"actor,critic": "0-3", "rollout": "4-5", "reward": "6-7"}
    shared: dict[str, object] = {"actor,critic": "0-3", "rollout,reward": "4-7"}
    for placement in (apart, shared, {"actor,critic": "0-3", "rollout": "4-7", "reward": "4-5"}):
        report = plans.report(plans.config(*reward, placement=placement))
        spans = {span.phase: span for span in report.spans}
        generate, score = spans["generate"], spans["score"]
        assert score.component == "reward"
        if placement is apart:
            assert generate.start < score.start < generate.stop < score.stop
        else:
            assert score.start == generate.stop
            assert not score.note
        assert spans["train actor"].start > score.stop
    faster, slower = (
        seconds(plans.report(plans.config(*reward, placement=apart | {"reward": ranks})))["score"]
        for ranks in ("6-7", "6")
    )
    assert faster < slower
    candidates = search(config := plans.config(*reward), inventory_for(config.cluster)).candidates
    assert all("score" in {span.phase for span in candidate.spans} for candidate in candidates)


@pytest.mark.parametrize("penalty", ["k1", "full"])
def test_a_full_kl_waits_for_the_reference(plans: Any, penalty: str) -> None:
    """Which the actor compares to, on devices of its own; the values wait for nobody."""
    spans = kl_spans(plans, penalty, rows=64)
    assert not spans["reference"].note
    assert spans["values"].start == spans["reference"].start == spans["generate"].stop
    assert spans["log-probs"].start == (spans["reference"].stop if penalty == "full" else spans["values"].start)


def test_a_part_that_streams_waits_as_well(plans: Any) -> None:
    compared, alone = kl_spans(plans, "full", rows=1024), kl_spans(plans, "k1", rows=1024)
    assert compared["reference"].note
    assert compared["log-probs"].note
    assert compared["log-probs"].stop > alone["log-probs"].stop
    assert compared["values"] == alone["values"]


def kl_spans(plans: Any, penalty: str, rows: int) -> dict[str, Any]:
    """By phase, with a reference on GPUs of its own whose KL is in the rewards."""
    keys = ("algorithm.use_kl_in_reward=true", "algorithm.use_kl_loss=false", f"algorithm.kl_penalty={penalty}")
    sizes = (f"data.train_batch_size={rows}", f"data.mini_batch_size={rows}", "rollout.max_running_requests=64")
    apart = {"actor": "0-1", "critic": "2-3", "reference": "4-5", "rollout,reward": "6-7"}
    return {span.phase: span for span in plans.report(plans.config(*keys, *sizes, placement=apart)).spans}


def test_the_gantt_draws_bars_to_scale(plans: Any) -> None:
    report = plans.report(plans.config(placement=APART))
    lines = gantt(report.spans)
    assert len(lines) == 1 + len(report.spans)
    bars = {line.partition(":")[2].split("  ")[0].strip(): line for line in lines[1:]}
    generate, actor = bars["generate"], bars["train actor"]
    share = next(span.seconds for span in report.spans if span.phase == "generate") / report.seconds
    assert generate.count("#") == pytest.approx(share * 64, abs=1)
    assert generate.rindex("#") <= actor.index("#")
    assert f"{share:.0%}" in generate
    assert max(map(len, lines)) <= 130


@pytest.mark.parametrize(
    ("value", "text"), [(3e-6, "3 us"), (0.0456, "45.6 ms"), (3.21, "3.21 s"), (600, "10 min"), (9000, "2.5 h")]
)
def test_durations(value: float, text: str) -> None:
    assert duration(value) == text


# calibration


def timings(folder: Path, rows: list[dict[str, float]]) -> Path:
    file = folder / "metrics.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


MEASURED = {
    "sync weights": 0.002,
    "generate": 40.0,
    "log-probs": 0.9,
    "values": 0.001,
    "train critic": 3.0,
    "train actor": 70.0,
}


def row(step: int, factor: float = 1.0) -> dict[str, float]:
    times = {f"time/{phase}": value * factor for phase, value in MEASURED.items()}
    return {"step": step, **times, "time/step": 200.0, "time/advantages": 0.1, "time/actor.update": 3.0}


def test_a_calibrated_model_reproduces_the_runs_phases(tmp_path: Path, plans: Any) -> None:
    config = plans.config(placement=APART)
    earlier = plans.report(config)
    file = timings(tmp_path, [{"step": 0, "time/step": 9.0}, row(1, 10), row(2), row(3, 1.1), row(4, 0.9)])
    measured = read_measured(file)
    assert len(measured.rows) == 3  # without validation before the first step, and without the first, which warms up
    factors = corrections(measured, earlier, earlier.device)
    again = plans.report(config, Basis(corrections=factors))
    assert {phase: seconds(again)[phase] for phase in MEASURED} == pytest.approx(MEASURED)


def test_slow_phases_of_single_steps_are_no_time_between_the_phases(tmp_path: Path) -> None:
    """Every second step is 5 s longer, in one phase or in the other or because of its validation."""
    usual = {"time/generate": 1.0, "time/train actor": 2.0, "time/step": 3.25}
    longer = [usual | {name: usual.get(name, 0.0) + 5, "time/step": 8.25} for name in usual if name != "time/step"]
    longer.append(usual | {"time/validate": 5.0, "time/step": 8.25})
    rows = [{"step": step, **times} for step, times in enumerate([usual, usual, *longer, usual], 1)]
    measured = read_measured(timings(tmp_path, rows))
    assert measured.seconds["step"] == 8.25
    assert measured.rest(["generate", "train actor"]) == 0.25


def test_work_outside_the_phases_is_corrected_for_the_new_config(tmp_path: Path, plans: Any) -> None:
    config, smaller = plans.config(gpus=0), plans.config("data.val_size=64", gpus=0)
    earlier = plans.report(config)
    times = {"time/validate": 5.0, "time/checkpoint": 7.0}
    measured = read_measured(timings(tmp_path, [row(1) | times]))
    basis = Basis(corrections=corrections(measured, earlier, earlier.device))

    def other_work(config: Any, basis: Basis | None = None) -> dict[str, float]:
        return {work.name: work.seconds for work in plans.report(config, basis).other_work}

    assert other_work(config, basis) == pytest.approx(other_work(config) | {"validation": 5.0, "checkpoint": 7.0})
    ratio = other_work(smaller)["validation"] / other_work(config)["validation"]
    assert other_work(smaller, basis)["validation"] == pytest.approx(5.0 * ratio)
    assert ratio < 0.5


def test_a_slow_phase_is_slower_where_it_was_bound_only() -> None:
    bounds = {"arithmetic": 2.0, "transfers": 1.0}
    assert Correction(5.0, "arithmetic").apply(bounds) == {"arithmetic": 10.0, "transfers": 1.0}
    assert Correction(0.25, "arithmetic").apply(bounds) == {"arithmetic": 0.5, "transfers": 0.25}


def test_a_run_on_another_kind_of_device_does_not_calibrate(tmp_path: Path, plans: Any) -> None:
    measured = read_measured(timings(tmp_path, [row(1)]))
    on_cpu, on_gpu = plans.report(plans.config(gpus=0)), plans.report(plans.config())
    with pytest.raises(ConfigError, match="the run was timed on cpu, the plan is for h100"):
        corrections(measured, on_cpu, on_gpu.device)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "contains no timings of a step"),
        ('{"step": 0, "time/step": 3}\n', "contains no timings of a step"),
        ('{"step": 1, "reward/mean": 3}\n', "contains no timings of a step"),
        ("no json\n", "cannot be read"),
    ],
)
def test_files_without_timings(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_measured(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_measured(tmp_path / "nowhere.jsonl")


def test_timings_of_other_phases_do_not_calibrate(tmp_path: Path, plans: Any) -> None:
    report = plans.report(plans.config())
    measured = read_measured(timings(tmp_path, [{"step": 1, "time/step": 1.0, "time/collect": 1.0}]))
    with pytest.raises(ConfigError, match="none of its phases is one of a plan"):
        corrections(measured, report, report.device)


def test_fsdp_gathers_for_every_micro_batch_and_megatron_does_not(tmp_path: Path, plans: Any) -> None:
    model, times = plans.llama(tmp_path, num_hidden_layers=60), {}
    for backend in ("fsdp", "megatron"):
        for tokens in (2560, 10240):
            keys = (f"actor.training_backend={backend}", f"actor.max_tokens_per_micro_batch={tokens}")
            critic = f"critic.training_backend={backend}"
            times[backend, tokens] = seconds(plans.report(plans.config(*plans.large, model, *keys, critic, nodes=2)))
    assert times["fsdp", 2560]["train actor"] > 2 * times["fsdp", 10240]["train actor"]
    assert times["megatron", 2560]["train actor"] < 1.2 * times["megatron", 10240]["train actor"]


def test_tensor_ranks_add_up_two_results_of_each_layer(tmp_path: Path, plans: Any) -> None:
    megatron = [
        f"{role}.{key}" for role in ("actor", "critic") for key in ("training_backend=megatron", "parallel.tensor=8")
    ]
    config = plans.config(*plans.large, plans.llama(tmp_path), *megatron, gpu="a10")
    sums, size = 3 * 16 * 2, 16384 * 2304 * 2048 * 2  # passes, layers; tokens, width, bytes
    found = seconds(plans.report(config))["train actor"]
    assert found == pytest.approx(sums * 2 * 7 / 8 * size / (0.7 * 32e9), rel=0.03)  # a ring, at 32 GB/s


def test_environments_in_other_processes_cost_a_message_in_every_step() -> None:
    def collect(*placement: str, nodes: int = 1) -> float:
        overrides = [f"cluster.num_nodes={nodes}", f"cluster.component_placement={{{', '.join(placement)}}}"]
        config = load_config(ROOT / "configs/embodied/cartpole.yaml", overrides).config
        machines = Inventory(tuple(Node(f"node-{index}", 0, cpus=4) for index in range(nodes)))
        report = plan_report(config, schedule(config.cluster, machines), machines)
        return seconds(report)["collect"] / config.env.rollout_steps

    together = collect("'actor_critic,env,rollout': 0")
    half = 4 * ENV_STEP_S  # of the eight environments
    assert collect("'actor_critic,rollout': 0", "env: '0:0-1'") == pytest.approx(together - half + 5e-4)
    assert collect("'actor_critic,rollout': 0", "env: 1", nodes=2) == pytest.approx(together + 3e-3)
