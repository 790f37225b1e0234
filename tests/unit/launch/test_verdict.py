"""Every rule of the verdict: a run in which it finds something, and one that is near and in which it does not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rl_platform.launch.tools.report.definitions import definition_of
from rl_platform.launch.tools.report.facts import Busy, Facts
from rl_platform.launch.tools.report.verdict import Answer, judge, progress
from rl_platform.launch.tools.report.verdict_rules import RULES, SOURCES
from rl_platform.launch.views.headline import HEADLINES

STEPS = 24
Values = float | Sequence[float]


def facts(
    metrics: Mapping[str, Values], task: str = "reasoning", config: dict[str, Any] | None = None, **more
) -> Facts:
    """A run of 24 steps; a single number is the value of all of them, a shorter list of evenly spread ones."""
    rows: list[dict[str, float]] = [{"step": step} for step in range(1, STEPS + 1)]
    for name, values in metrics.items():
        values = [values] * STEPS if isinstance(values, int | float) else list(values)
        for place, value in enumerate(values):
            rows[place * STEPS // len(values)][name] = value
    return Facts(rows, HEADLINES[task], config or {}, **more)


def line(first: float, last: float, count: int = STEPS) -> list[float]:
    return [first + (last - first) * place / (count - 1) for place in range(count)]


def zigzag(middle: float, size: float) -> list[float]:
    return [middle + size * (-1) ** place for place in range(STEPS)]


FALLEN = [*line(2.0, 0.02, 12), *[0.02] * 12]
RISING = {"reward/mean": line(0.1, 0.9)}
LONG = {"data": {"max_response_length": 512}}
GPUS = ("GPU 0 of node 0", ("rollout",))
EXPLAINED = {"critic/explained_var_valid": 1}
SPIKE = [1.0] * 23
LIMITS = {"mismatch/prob_error": 1.0, "mismatch/k3": 1e-9}

# question, part of the title, a run with it, one without it
CASES = [
    ("finite", "not finite", facts({"actor/loss": [1.0, math.nan] * 12}), facts({"val/accuracy": [0.1, math.nan]})),
    ("finite", "not finite", facts({"actor/skipped_updates": [0, 0, 1]}), facts({"actor/skipped_updates": 0})),
    (
        "rewards differ",
        "All rewards are equal",
        facts({"reward/min": 0, "reward/max": 0}),
        facts({"reward/min": 0, "reward/max": [0] * 5 + [1] * 19}),
    ),
    (
        "keep what",
        "lost what it had learned",
        facts({"reward/mean": [*line(0.1, 0.9, 12), *line(0.8, 0.1, 12)]}),
        facts({"reward/mean": [*line(0.1, 0.9, 12), *line(0.9, 0.7, 12)]}),
    ),
    ("progress", "no progress", facts({"reward/mean": zigzag(0.2, 0.1)}), facts(RISING)),
    # at its ceiling nothing can improve
    (
        "progress",
        "no progress",
        facts({"reward/mean": 0.9, "val/accuracy": [0.9] * 4}),
        facts({"reward/mean": 0.9, "val/accuracy": [0.99] * 4}),
    ),
    (
        "validation follow",
        "validation gets worse",
        facts(RISING | {"val/accuracy": [0.2, 0.6, 0.3]}),
        facts(RISING | {"val/accuracy": [0.2, 0.6, 0.55]}),
    ),
    ("small enough", "moves too far", facts({"actor/approx_kl": 0.2}), facts({"actor/approx_kl": [0.9, *[0.01] * 23]})),
    (
        "Does the policy move",
        "hardly moves",
        facts({"actor/approx_kl": 1e-9}),
        facts({"actor/approx_kl": 1e-9, "actor/approx_kl_last": 0.01}),
    ),
    ("little clipped", "is clipped", facts({"actor/clip_frac": 0.5}), facts({"actor/clip_frac": 0.2})),
    ("explore", "collapsed", facts({"actor/entropy": FALLEN}), facts({"actor/entropy": line(2.0, 0.5)})),
    # a Gaussian policy has no entropy of 0
    ("explore", "collapsed", facts({"actor/entropy": FALLEN}), facts({"actor/entropy": line(2.0, -3.0)})),
    ("ordered", "grows", facts({"actor/entropy": line(0.5, 2.0)}), facts({"actor/entropy": line(0.5, 0.7)})),
    (
        "critic explain",
        "explains nothing",
        facts(EXPLAINED | {"critic/explained_var": 0.0}),
        facts(EXPLAINED | {"critic/explained_var": line(0.0, 0.6)}),
    ),
    (
        "critic explain",
        "worse than a constant",
        facts(EXPLAINED | {"critic/explained_var": -2.0}),
        facts({"critic/explained_var": -2.0, "critic/explained_var_valid": 0}),
    ),
    ("value clipping", "holds the critic back", facts({"critic/clip_frac": 0.6}), facts({"critic/clip_frac": 0.1})),
    (
        "gradient norms",
        "of the critic explode",
        facts({"actor/grad_norm": 1.0, "critic/grad_norm": [*SPIKE, 90.0]}),
        facts({"actor/grad_norm": 1.0, "critic/grad_norm": [*SPIKE, 5.0]}),
    ),
    (
        "end by themselves",
        "cut by the length limit",
        facts({"len/response_clip_frac": 0.7}, config=LONG),
        facts({"len/response_clip_frac": 0.05}, config=LONG),
    ),
    # a task whose answers are one token
    (
        "end by themselves",
        "cut by the length limit",
        facts({"len/response_clip_frac": 1.0}, config=LONG),
        facts({"len/response_clip_frac": 1.0}, config={"data": {"max_response_length": 1}}),
    ),
    (
        "free of length",
        "hacked by length",
        facts(RISING | {"len/response_mean": line(100, 400), "val/accuracy": [0.5, 0.4]}),
        facts(RISING | {"len/response_mean": line(100, 400), "val/accuracy": [0.5, 0.8]}),
    ),
    (
        "responses scored",
        "without a score",
        facts({"reward/unscored": 20, "perf/samples": 100}),
        facts({"reward/unscored": 1, "perf/samples": 100}),
    ),
    ("engine agree", "different probabilities", facts(LIMITS | {"mismatch/prob_error": 1.2}), facts(LIMITS)),
    # old weights make probabilities differ too
    (
        "engine agree",
        "different probabilities",
        facts(LIMITS | {"mismatch/k3": 0.1}),
        facts(LIMITS | {"mismatch/k3": 0.1, "staleness/max": 1}),
    ),
    ("importance weights", "throw most", facts({"is/ess": 0.2}), facts({"is/ess": 0.9})),
    (
        "fresh",
        "are old",
        facts({"staleness/max": 4}, config={"runner": {"max_staleness": 1}}),
        facts({"staleness/max": 1}, config={"runner": {"max_staleness": 1}}),
    ),
    (
        "too easy nor",
        "too hard",
        facts({"dynamic_sampling/generated": 10, "dynamic_sampling/all_wrong": 9}),
        facts({"dynamic_sampling/generated": 10, "dynamic_sampling/all_wrong": 5}),
    ),
    ("target_kl", "ends most updates", facts({"actor/early_stopped": 1.0}), facts({"actor/early_stopped": 0.0})),
    ("share the work", "wait for the busiest", facts({"balance/imbalance": 0.4}), facts({"balance/imbalance": 0.02})),
    (
        "equally fast",
        "much slower",
        facts({}, rank_seconds={"env.simulate": {"env[0]": 1.0, "env[1]": 1.1, "env[2]": 4.0}}),
        facts({}, rank_seconds={"env.simulate": {"env[0]": 1.0, "env[1]": 1.1, "env[2]": 1.2}}),
    ),
    (
        "devices work",
        "GPU 0 of node 0 is idle for 70%",
        facts({}, busy=[Busy(*GPUS, 0.3, {"train actor": 0.6, "values": 0.1})]),
        facts({}, busy=[Busy(*GPUS, 0.9, {"train actor": 0.1})]),
    ),
    (
        "training have the time",
        "take much of the time",
        facts({"time/step": 10, "time/validate": 5}),
        facts({"time/step": 10, "time/validate": 1}),
    ),
    ("without failures", "were replaced", facts({"env/failures": [0, 1]}), facts({"env/failures": 0})),
]


def answer(question: str, run: Facts) -> Answer:
    (found,) = [each for each in judge(run) if question in each.question]
    return found


@pytest.mark.parametrize(
    ("question", "title", "fires", "quiet"), CASES, ids=[f"{case[0]}: {case[1]}" for case in CASES]
)
def test_rules(question: str, title: str, fires: Facts, quiet: Facts) -> None:
    found = answer(question, fires).finding
    assert found is not None
    assert title in found.title
    assert any(character.isdigit() for character in found.evidence) or "not finite" in found.evidence
    assert found.advice
    assert all(definition_of(metric) for metric in found.metrics)
    assert answer(question, quiet).finding is None


def test_every_rule_has_a_case_and_known_metrics() -> None:
    assert [rule.question for rule in RULES if not any(case[0] in rule.question for case in CASES)] == []
    needs = {name for rule in RULES for name in rule.needs}
    assert [name for name in needs - SOURCES.keys() if definition_of(name) is None] == []


def test_a_rule_without_its_metrics_says_so() -> None:
    answers = judge(facts({}))
    assert all(each.finding is None for each in answers)
    assert answer("small enough", facts({})).missing == ("actor/approx_kl",)
    assert answer("devices work", facts({})).missing == ("trace.json",)


def test_a_short_run_has_no_trends() -> None:
    rows = [
        {"step": 1, "reward/mean": 0.0, "actor/entropy": 5.0},
        {"step": 2, "reward/mean": 0.0, "actor/entropy": 0.0},
    ]
    assert all(each.finding is None for each in judge(Facts(rows, HEADLINES["reasoning"])))


def test_the_gravest_finding_is_first() -> None:
    run = facts({"env/failures": 1, "actor/clip_frac": 1, "actor/approx_kl": 1})
    levels = [each.finding.level for each in judge(run) if each.finding]
    assert levels == ["bad", "warning", "note"]


def test_progress_is_one_sentence() -> None:
    run = facts({"val/accuracy": [0.0, 0.8, 0.5], "reward/mean": 0.5})
    assert progress(run).startswith("val/accuracy went from 0.0 to 0.500 (best 0.800 at step 9); reward/mean went")
    assert progress(facts({})) == "There is no objective or validation yet."
