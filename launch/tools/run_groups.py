"""Groups of runs: those whose configs differ in nothing but the seed, named by the keys in which groups differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from rl_platform.config.differences import flat_values, shown
from rl_platform.errors import DataError
from rl_platform.launch.tools.run_headline import task_of_run
from rl_platform.run_files import CONFIG

SEED = "runner.seed"
IGNORED = {SEED, "runner.output_dir", "runner.experiment_name", "runner.resume"}
LONGEST = 60  # characters of a name

Rows = Sequence[dict[str, float]]
"""The metrics of a run's steps."""


def group_by_config(runs: Sequence[Path]) -> dict[str, list[Path]]:
    """Returns the runs of each group by its name, as `lr=0.0003`; one group has the name `all runs`.

    Raises DataError with all runs whose config cannot be read.
    """
    groups: dict[str, tuple[dict[str, object], list[Path]]] = {}
    unreadable = []
    for run in runs:
        path = (run if run.is_dir() else run.parent) / CONFIG
        try:
            values = {key: value for key, value in flat_values(path.read_text("utf-8")).items() if key not in IGNORED}
        except (OSError, ValueError, yaml.YAMLError, AttributeError) as error:
            unreadable.append(f"{path}: {getattr(error, 'strerror', None) or 'is no config'}")
            continue
        groups.setdefault(repr(sorted(values.items())), (values, []))[1].append(run)
    if unreadable:
        raise DataError("\n".join(["runs are compared by their configs, and these cannot be read:", *unreadable]))
    configs = [values for values, _ in groups.values()]
    keys = list(dict.fromkeys(key for values in configs for key in values))
    differing = [key for key in keys if any(values.get(key) != configs[0].get(key) for values in configs)]
    labels = short_names(differing)
    named: dict[str, list[Path]] = {}
    for values, members in groups.values():
        name = ", ".join(f"{labels[key]}={shown(values, key)}" for key in differing) or "all runs"
        name = name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"
        named[name if name not in named else f"{name} [{len(named) + 1}]"] = members
    return named


def group_by_task(metrics: Mapping[Path, Rows]) -> dict[str, list[Path]]:
    """Returns the runs of each `runner.task_type` by its name; one group without a name if all have the same.

    metrics: of each run. They determine its task if its config cannot be read.
    """
    groups: dict[str, list[Path]] = {}
    for run, rows in metrics.items():
        groups.setdefault(task_of_run(run, {name for row in rows for name in row}), []).append(run)
    return groups if len(groups) > 1 else {"": list(metrics)}


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Returns for each key its shortest end that no other key has: `lr`, or `actor.optim.lr` beside another `lr`."""
    names = {}
    for key in keys:
        steps = key.split(".")
        ends = [".".join(steps[start:]) for start in range(len(steps) - 1, -1, -1)]
        others = [f".{other}" for other in keys if other != key]
        names[key] = next((end for end in ends if not any(other.endswith(f".{end}") for other in others)), key)
    return names
