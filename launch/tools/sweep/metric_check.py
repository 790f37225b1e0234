"""Checks the metric of a sweep before its first point starts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from rl_platform.config.schema import Config
from rl_platform.errors import ConfigError, Problem
from rl_platform.launch.tools.report.definitions import definitions
from rl_platform.launch.tools.sweep.summary import steps_of
from rl_platform.suggest import did_you_mean

_OF_TASK = {
    "embodied": ("envs/embodied/", "platform/runners/embodied", "platform/components/env"),
    "reasoning": ("platform/runners/trajectories", "platform/runners/reasoning", "platform/algorithms/shaping"),
}
"""Files whose metrics only this task reports."""


def check_metric(key: str, metric: str, config: Config, runs: Sequence[Path]) -> None:
    """Raises ConfigError if a run of `config` cannot report the metric and none of the existing `runs` has it.

    key: of the problem. A policy loss of the user may report any metric.
    """
    patterns = list(_patterns(config))
    if ":" in config.algorithm.policy_loss or any(re.fullmatch(each, metric) for each in patterns):
        return
    if not any(metric in row for run in runs for row in steps_of(run)):
        known = (each.replace("\\", "") for each in patterns if "[" not in each)
        hint = did_you_mean(metric, known) or "rl-platform metrics explains all"
        problem = Problem(key, "a run of this config does not report this metric", value=metric, hint=hint)
        raise ConfigError([problem])


def _patterns(config: Config) -> Iterator[str]:
    """Yields regular expressions of the metrics of a config; of several functions and tasks, one per name."""
    names = {"<function>": config.reward.labels, "<task>": [task.name for task in config.env.tasks]}
    others = tuple(file for task, files in _OF_TASK.items() if task != config.runner.task_type for file in files)
    for each in definitions():
        if each.source.startswith(others):
            continue
        listed = next((part for part in names if part in each.name), None)
        for name in names[listed] if listed else [""]:
            filled = each.name.replace(listed, name) if listed else each.name
            yield "".join("[^/]+" if part.startswith("<") else re.escape(part) for part in re.split(r"(<\w+>)", filled))
