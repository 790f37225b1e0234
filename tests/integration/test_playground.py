"""Tasks of MuJoCo Playground: seeds, idle environments, saved states, and the shipped config.

Skipped unless the variable PLAYGROUND_PYTHON names an interpreter with `playground` and `gymnasium`.
"""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from rl_platform.envs.embodied.descriptions import EnvDescription
from rl_platform.envs.embodied.env_facts import inspect_env
from rl_platform.envs.embodied.vector import VectorEnv
from rl_platform.errors import ConfigError
from rl_platform.metrics import read_metrics

PYTHON = os.environ.get("PLAYGROUND_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="PLAYGROUND_PYTHON names no interpreter")

NAME = "rl_platform.envs.embodied.suites.playground:Playground"
CONFIG = Path(__file__).parents[2] / "configs" / "embodied" / "playground_cartpole.yaml"


def described(**kwargs: object) -> EnvDescription:
    return EnvDescription(NAME, kwargs, max_episode_steps=20, backend=NAME, python=PYTHON)


def test_a_seed_determines_the_episode_and_a_saved_state_continues() -> None:
    task = described(task="CartpoleBalance")
    with closing(VectorEnv(task, 3, 1)) as first, closing(VectorEnv(task, 3, 1)) as second:
        starts = [envs.reset(seeds) for envs, seeds in ((first, [5, 6, 7]), (second, [5, 8, 7]))]
        assert starts[0].shape == (3, 5)
        assert np.array_equal(starts[0][[0, 2]], starts[1][[0, 2]])
        assert not np.array_equal(starts[0][1], starts[1][1])
        first.send(np.ones((3, 1), np.float32), idle=np.array([False, True, False]))
        moved = first.receive().observations
        assert [np.array_equal(*rows) for rows in zip(moved, starts[0], strict=True)] == [False, True, False]
        second.load_state_dict(first.state_dict())
        for step in range(22):  # through the limit of the episodes
            actions = np.full((3, 1), 0.1 * step - 1, np.float32)
            results = [envs.step(actions) for envs in (first, second)]
            for name in ("observations", "rewards", "truncated"):
                assert np.array_equal(*(getattr(result, name) for result in results)), name


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean CartpoleBalance"):
        inspect_env(described(task="CartpoleBalanc"))


def test_the_shipped_config_is_checked_and_trains(command, folder: Path) -> None:
    small = (f"env.python={PYTHON}", "env.num_envs=4", "env.rollout_steps=25", "data.mini_batch_size=50")
    limits = ("env.max_episode_steps=50", "env.evaluation.episodes=4", "runner.max_steps=1", "runner.output_dir=out")
    ended = command(CONFIG, *small, *limits, "--check")
    assert (ended.code, ", 0 failed, " in ended.out) == (0, True), ended.err
    ended = command(CONFIG, *small, *limits)
    assert ended.code == 0, ended.err
    assert [0 <= row["val/return"] <= 50 for row in read_metrics("out")] == [True, True]
