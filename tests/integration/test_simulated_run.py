"""The simulated run beside `trace.json` of a real one: with the measured seconds of its phases it gives the same order
of phases and the same times of steps."""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from rl_platform.launch.placed_config import load
from rl_platform.planner.cost import ADVANTAGES
from rl_platform.planner.report import plan_report
from rl_platform.planner.simulation import SYNC, RunModel, model_of, simulate

STEPS = 7
ROOT = Path(__file__).resolve().parents[2]
RUN = (
    *(f"runner.max_steps={STEPS}", f"runner.trace_steps={STEPS}", "runner.output_dir=out", "runner.save_interval=0"),
    *("runner.val_check_interval=0", "runner.logger_backends=[]"),
)
TINY = ROOT / "configs" / "reasoning" / "ppo_tiny.yaml"
THREE = "cluster.devices_per_node=3"
APART = (THREE, "cluster.component_placement={actor: 0, critic: 1, 'rollout,reward': 2}", "algorithm.rollout_is={}")
LONGER = "data.max_response_length=8"  # phases of some hundred milliseconds: a core that is taken away counts for less
LONGER_EMBODIED = ("env.rollout_steps=512", "algorithm.ppo_epochs=20")
Spans = dict[tuple[str, int], tuple[float, float]]  # (phase, step) -> (begin, end) in seconds


def traced(ahead: int) -> Spans:
    """The phases of the steps in the trace; `sync weights` without its wait for the rollout that is collected ahead."""
    events = json.loads(Path("out/trace.json").read_text())["traceEvents"]
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for event in sorted((one for one in events if one.get("cat") == "phase"), key=lambda event: event["ts"]):
        found[event["name"]].append((event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6))
    del found[SYNC][0]  # before the first step
    collected = found["generate"] if "generate" in found else found["collect"]
    if ahead == 1:
        for step, (begin, end) in enumerate(found[SYNC][:-1]):
            found[SYNC][step] = max(begin, min(end, collected[step + 1][1])), end
    return {(phase, step): span for phase, spans in found.items() for step, span in enumerate(spans)}


def model_of_run(config: Path, overrides: tuple[str, ...]) -> RunModel:
    loaded, placement, inventory = load(config, overrides)
    planned = model_of(plan_report(loaded.config, placement, inventory))
    return replace(planned, mtbf=math.inf, start=0.0, validation=0.0, checkpoint=0.0)


@pytest.mark.parametrize(
    ("config", "overrides"),
    [
        (TINY, (LONGER,)),
        (ROOT / "configs" / "embodied" / "cartpole.yaml", LONGER_EMBODIED),
        (TINY, (LONGER, *APART, "runner.max_staleness=1")),
        (TINY, (LONGER, *APART, "runner.max_staleness=2")),
    ],
    ids=["reasoning", "embodied", "one ahead", "two ahead"],
)
def test_phases_follow_one_another_as_in_the_trace(command, joins: str, config, overrides):
    ended = command(config, *RUN, *overrides, *([joins] if THREE in overrides else []))
    assert ended.code == 0, ended.err
    model = model_of_run(config, (*RUN, *overrides))
    measured = traced(model.staleness)

    def seconds(phase: str, step: int) -> float:
        if phase == ADVANTAGES:  # no phase of the trace: the runner's work between evaluation and training
            evaluated = [measured[name, step][1] for name in ("log-probs", "values") if (name, step) in measured]
            trained = [measured[name, step][0] for name in ("train critic", "train actor") if (name, step) in measured]
            return max(0.0, min(trained) - max(evaluated)) if evaluated else 0.0
        begin, end = measured[phase, step]
        return end - begin

    events = simulate(model, 1, seconds).events[1:]  # without the weights before the first step
    found = {(event.phase, event.step): (event.start, event.stop) for event in events if event.phase != ADVANTAGES}
    assert found.keys() == {key for key in measured if key[0] in model.works}

    last = STEPS - 1
    whole = measured[SYNC, last][1] - measured[SYNC, 0][1]
    apart = 0.1 * whole / last
    for one, other in itertools.permutations(found, 2):
        if measured[one][0] + apart < measured[other][0]:  # the same slack: on busy cores transfers take time, too
            assert found[one][0] <= found[other][0] + apart, (one, other)
    for step in range(2, STEPS):  # from the end of the first step, which loads and compiles
        simulated, real = (spans[SYNC, step][1] - spans[SYNC, 0][1] for spans in (found, measured))
        assert simulated == pytest.approx(real, rel=0.1), step
    if model.staleness:  # the rules between the phases matter: one after another they would take longer
        alternating = simulate(replace(model, staleness=0), 1, seconds)
        assert alternating.seconds > 1.15 * found[SYNC, last][1]
