"""A small valid config of each task, to be broken by the tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rl_platform.config import LoadedConfig, load_config
from rl_platform.errors import ConfigError, Problem

EMBODIED = """\
runner:
  task_type: embodied
cluster:
  component_placement:
    actor_critic,env,rollout: all
algorithm:
  loss_type: actor_critic
env:
  id: CartPole-v1
"""

REASONING = """\
runner:
  task_type: reasoning
cluster:
  component_placement:
    actor,critic,rollout,reward: all
data:
  task: {type: digits}
actor:
  model: {path: folder}
critic:
  use_critic_model: true
"""

Load = Callable[..., LoadedConfig]
Problems = Callable[..., dict[str, Problem]]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """load(text or "embodied" or "reasoning", *overrides)."""

    def load(text: str, *overrides: str) -> LoadedConfig:
        path = tmp_path / "run.yaml"
        path.write_text({"embodied": EMBODIED, "reasoning": REASONING}.get(text, text))
        return load_config(path, overrides)

    return load


@pytest.fixture
def problems(load: Load) -> Problems:
    """The problems of such a load by key, at most one for each; empty if it succeeds."""

    def problems(text: str, *overrides: str) -> dict[str, Problem]:
        reported: list[Problem] = []
        try:
            load(text, *overrides)
        except ConfigError as error:
            reported = error.problems
        by_key = {problem.key: problem for problem in reported}
        assert len(by_key) == len(reported), f"two problems of one key: {reported}"
        return by_key

    return problems
