"""The simulated run: the plan without noise, and closed forms of pipelines, stragglers, failures and back-pressure."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from rl_platform.planner.discrete_events import Clock, Process
from rl_platform.planner.simulation import Noise, RunModel, Work, model_of, simulate

ROOT = Path(__file__).resolve().parents[3]
NONE: frozenset[str] = frozenset()
APART = {"actor,critic": "0-7", "rollout": "8-14", "reward": {"node_group": "node", "placement": "0-1:0-15"}}
EACH = {"actor": "0-3", "critic": "4-7", "rollout,reward": "8-15"}
BATCH = ("data.train_batch_size=1024", "data.mini_batch_size=256")


def two_stages(generate: float, train: float, **changes: object) -> RunModel:
    """A rollout and an actor on devices and nodes of their own."""
    model = RunModel(
        works={"generate": Work("rollout", generate), "train actor": Work("actor", train)},
        sharing={"actor": NONE, "rollout": NONE},
        ranks={"actor": 1, "rollout": 1},
        nodes={"actor": frozenset({0}), "rollout": frozenset({1})},
        useful=generate + train,
        steps=100,
    )
    return replace(model, **changes)


def test_processes_wait_for_seconds_for_conditions_and_for_one_another():
    clock, seen = Clock(), []

    def first() -> Process:
        yield 2
        seen.append(("first", clock.now))

    def second() -> Process:
        yield lambda: bool(seen)
        seen.append(("second", clock.now))
        yield 1.5
        seen.append(("second", clock.now))

    def both() -> Process:
        yield from clock.together([second(), first()])
        seen.append(("both", clock.now))

    clock.start(both())
    clock.run(3)
    assert (clock.now, seen) == (3, [("first", 2), ("second", 2)])
    clock.run()
    assert seen[2:] == [("second", 3.5), ("both", 3.5)]


@pytest.mark.parametrize(
    ("placement", "nodes", "overrides"),
    [
        ({"actor,critic,rollout,reward": "all"}, 1, ()),
        (APART, 2, BATCH),
        (EACH, 2, BATCH),
        (APART, 2, (*BATCH, "algorithm.use_kl_in_reward=true", "cluster.component_placement.reference=15")),
    ],
)
def test_without_noise_and_failures_a_step_is_that_of_the_plan(plans, placement, nodes, overrides):
    report = plans.report(plans.config(*overrides, placement=placement, nodes=nodes))
    outcome = simulate(replace(model_of(report), mtbf=math.inf), 1)
    begins = {event.step: event.start for event in outcome.events if event.phase == "generate"}
    found = {event.phase: event for event in outcome.events if event.step == 3}
    planned = {span.phase: span for span in report.spans if span.phase in report.works and span.phase != "sync weights"}
    assert found.keys() - {"sync weights"} == planned.keys()
    for phase, span in planned.items():
        begin = begins[3] - planned["generate"].start
        assert found[phase].stop - begin == pytest.approx(span.stop), phase
        if not span.note:  # of two streams on one device the plan draws both from the first part on
            assert found[phase].start - begin == pytest.approx(span.start), phase
    assert begins[3] - begins[2] == pytest.approx(report.seconds)


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_with_staleness_a_step_is_that_of_the_plan(plans, staleness: int):
    changes = (f"runner.max_staleness={staleness}", "algorithm.rollout_is={}", *BATCH)
    report = plans.report(plans.config(*changes, placement=APART, nodes=2))
    ends = simulate(replace(model_of(report), mtbf=math.inf, validation=0.0, checkpoint=0.0), 1).ends
    assert report.overlap is not None
    assert ends[15] - ends[14] == pytest.approx(report.overlap.seconds)


@pytest.mark.parametrize(("generate", "train"), [(3.0, 2.0), (2.0, 3.0)])
def test_a_queue_hides_the_shorter_of_two_stages(generate: float, train: float):
    assert simulate(two_stages(generate, train), 1).seconds == pytest.approx(100 * (generate + train))
    for staleness in (1, 2, 5):
        seconds = simulate(two_stages(generate, train, staleness=staleness), 1).seconds
        assert seconds == pytest.approx(generate + train + 99 * max(generate, train))


def test_a_longer_queue_hides_what_varies():
    model = two_stages(0, 0, steps=200)

    def seconds(phase: str, step: int) -> float:
        return 2.0 if phase == "train actor" else (1.0, 3.0)[step % 2]  # 2 s on average, as training

    paces = [simulate(replace(model, staleness=k), 1, seconds).seconds / 200 for k in (0, 1, 2)]
    # alternating: 2 + 2 s; a queue of one: max(1, 2) and max(3, 2) s; of two: 2 s
    assert paces == pytest.approx([4.0, 2.5, 2.0], rel=0.02)


def test_a_slow_node_slows_the_phases_of_its_components():
    model = two_stages(3.0, 2.0, slow_nodes=1.0, slow_factor=1.5)
    assert simulate(model, 1).seconds == pytest.approx(100 * 1.5 * 5)
    half = {simulate(replace(model, slow_nodes=0.5), seed).seconds for seed in range(20)}
    assert sorted(half) == pytest.approx([100 * (3 + 1.5 * 2), 100 * (1.5 * 3 + 2)])


def test_a_phase_takes_as_long_as_the_slowest_of_its_ranks():
    ranks, spread, generator = 64, 0.2, random.Random(3)
    work = Work("actor", 1.0, barriers=4)
    model = replace(two_stages(0, 0), works={"train actor": work}, ranks={"actor": ranks, "rollout": 1}, spread=spread)
    noise = Noise(model, random.Random(1))
    drawn = statistics.mean(noise.seconds("train actor", 0) for _ in range(2000))
    each = [max(generator.lognormvariate(0, spread) for _ in range(ranks)) for _ in range(4000)]
    assert drawn == pytest.approx(statistics.mean(each), rel=0.01)
    alone = replace(model, ranks={"actor": 1, "rollout": 1})
    medians = statistics.median(Noise(alone, random.Random(1)).seconds("train actor", 0) for _ in range(2000))
    assert medians == pytest.approx(1.0, rel=0.03)


@pytest.mark.parametrize(("mtbf", "interval"), [(20_000, 20), (5_000, 20), (5_000, 5), (2_000, 20)])
def test_goodput_with_failures_is_that_of_daly(mtbf: float, interval: int):
    work, checkpoint, restart, steps = 10.0, 30.0, 60.0, 4000
    model = RunModel(
        works={"train actor": Work("actor", work)},
        sharing={"actor": NONE, "rollout": NONE},
        ranks={"actor": 8, "rollout": 8},
        nodes={"actor": frozenset(range(4)), "rollout": frozenset(range(4))},
        useful=work,
        steps=steps,
        start=restart,
        checkpoint=checkpoint,
        checkpoint_every=interval,
        mtbf=4 * mtbf,  # of one of four nodes
        restarts=1_000_000,
        backoff=0.0,
    )
    runs = [simulate(model, seed) for seed in range(8)]
    goodput = 8 * steps * work / sum(run.seconds for run in runs)
    # Daly (2006): M e^(R/M) (e^((tau + C)/M) - 1) seconds for tau seconds of work
    tau = interval * work
    expected = tau / (mtbf * math.exp(restart / mtbf) * (math.exp((tau + checkpoint) / mtbf) - 1))
    assert all(run.finished and run.kept == steps for run in runs)
    assert goodput == pytest.approx(expected, rel=0.02)
    best = replace(model, checkpoint_every=1).best_interval  # Young: sqrt(2 C M) s
    assert best * work == pytest.approx(math.sqrt(2 * checkpoint * mtbf))


def test_without_restarts_a_run_ends_with_the_first_failure():
    model = two_stages(1.0, 1.0, mtbf=400.0, restarts=0, checkpoint_every=10, checkpoint=1.0, start=5.0)
    runs = [simulate(model, seed) for seed in range(400)]
    # P(no failure of two nodes in 5 + 100 x 2 + 10 s) = e^(-2 x 215 / 400)
    assert statistics.mean(run.finished for run in runs) == pytest.approx(math.exp(-2 * 215 / 400), abs=0.06)
    assert all(run.failures == (not run.finished) and run.kept % 10 == 0 for run in runs)
    again = simulate(replace(model, restarts=1000, backoff=0.0), 1)
    assert again.finished
    assert again.seconds > 215


def test_a_failed_generator_repeats_its_part_and_costs_no_step():
    restarts = {"restarts": 1_000_000, "backoff": 0.0, "start": 2.0, "checkpoint_every": 1}
    apart = two_stages(4.0, 1.0, mtbf=200.0, **restarts, nodes={"actor": NONE, "rollout": frozenset({1})})
    whole = replace(apart, nodes={"actor": frozenset({1}), "rollout": frozenset({1})})
    runs, again = ([simulate(model, seed) for seed in range(30)] for model in (apart, whole))
    assert all(run.finished and run.lost["failures"] == 0 for run in runs)
    # 2 s of start and 100 x 5 s; each failure costs a start and at most the part that was lost
    assert all(502 <= round(run.seconds, 6) <= 502 + run.failures * (2 + 4) for run in runs)
    assert sum(run.seconds > 502 for run in runs) > 20  # P(no failure in 500 s) = e^-2.5
    assert sum(run.seconds for run in runs) < sum(run.seconds for run in again)


@pytest.mark.parametrize("waiting", [1, 3, 20])
def test_generation_waits_for_a_slow_reward(waiting: int):
    parts, generated, scored = 10, 1.0, 2.0
    model = RunModel(
        works={
            "generate": Work("rollout", parts * generated),
            "score": Work("reward", parts * scored),
            "train actor": Work("actor", 5.0),
        },
        sharing=dict.fromkeys(("actor", "rollout", "reward"), NONE),
        ranks=dict.fromkeys(("actor", "rollout", "reward"), 1),
        nodes=dict.fromkeys(("actor", "rollout", "reward"), frozenset({0})),
        useful=26.0,
        steps=2,
        parts=parts,
        waiting=waiting,
        score_beside=True,
    )
    outcome = simulate(model, 1)
    found = {event.phase: event for event in outcome.events if event.step == 0}
    assert found["score"].stop == generated + parts * scored  # the first part, then at the pace of the reward
    # the last part leaves when all but `waiting` are scored
    assert found["generate"].stop == max(parts * generated, generated + (parts - waiting) * scored)
    assert outcome.seconds == 2 * (generated + parts * scored + 5)


def test_equal_seeds_give_equal_runs():
    model = two_stages(2.0, 3.0, spread=0.3, mtbf=200.0, start=1.0, checkpoint_every=5, staleness=1)
    first, second, other = (simulate(model, seed) for seed in (7, 7, 8))
    assert (first.seconds, first.kept, first.events) == (second.seconds, second.kept, second.events)
    assert first.events != other.events


def test_a_run_that_never_advances_is_given_up():
    outcome = simulate(two_stages(1.0, 1.0, mtbf=0.1, start=1.0, restarts=1_000_000_000, backoff=0.0), 1)
    assert not outcome.finished
    assert outcome.kept == 0
