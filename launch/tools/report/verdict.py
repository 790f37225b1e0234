"""The verdict: what is wrong with a run, each finding with its evidence, and how far it came.

Not covered: the rules (`verdict_rules`), reading the files of a run (`collect`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from rl_platform.launch.tools.report.facts import LEVELS, Facts, Finding
from rl_platform.launch.tools.report.verdict_rules import RULES, SOURCES
from rl_platform.launch.views.headline import number


@dataclass(frozen=True)
class Answer:
    """The answer of a rule. missing: what the run lacks, so that the rule was not checked."""

    question: str
    finding: Finding | None
    missing: tuple[str, ...] = ()


def judge(facts: Facts) -> list[Answer]:
    """Returns the answers of all rules, the gravest findings first."""
    answers = []
    for rule in RULES:
        missing = tuple(name for name in rule.needs if not SOURCES.get(name, partial(Facts.values, metric=name))(facts))
        answers.append(Answer(rule.question, None if missing else rule.check(facts), missing))

    def rank(answer: Answer) -> int:
        return len(LEVELS) if answer.finding is None else LEVELS.index(answer.finding.level)

    return sorted(answers, key=rank)


def progress(facts: Facts) -> str:
    """Returns one sentence on how objective and validation moved."""
    parts = []
    for metric in dict.fromkeys((facts.headline.validation, facts.headline.objective)):
        series = facts.series(metric)
        if len(series) > 1:
            best = max(series, key=lambda point: point[1])
            moved = f"{metric} went from {number(series[0][1])} to {number(series[-1][1])}"
            parts.append(f"{moved} (best {number(best[1])} at step {best[0]})")
        elif series:
            parts.append(f"{metric} is {number(series[0][1])} at step {series[0][0]}")
    return "; ".join(parts) + "." if parts else "There is no objective or validation yet."
