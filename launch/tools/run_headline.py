"""The headline of a finished run."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

import yaml

from rl_platform.launch.views.headline import HEADLINES, OWN_REWARD, Headline, headline_of


def headline_of_run(run: Path, metrics: Container[str]) -> Headline:
    """Returns the headline of a run from its `config.yaml`, or else from the names of its metrics.

    run: its folder or a file in it.
    """
    folder = run if run.is_dir() else run.parent
    try:
        return headline_of(yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError, yaml.YAMLError):
        if any(name in metrics for name in ("perf/env_steps", "episode/return", "val/return")):
            return HEADLINES["embodied"]
        return OWN_REWARD if "val/score" in metrics else HEADLINES["reasoning"]


def task_of_run(run: Path, metrics: Container[str]) -> str:
    """Returns `runner.task_type` of a run, read as `headline_of_run` reads its headline."""
    return "embodied" if headline_of_run(run, metrics) == HEADLINES["embodied"] else "reasoning"
