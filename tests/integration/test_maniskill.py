"""ManiSkill's tasks as states and images.

Skipped, except for a refusal, unless the variable MANISKILL_PYTHON names the interpreter of docs/maniskill.md.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from rl_platform.config import load_config
from rl_platform.envs.embodied.descriptions import EnvDescription
from rl_platform.envs.embodied.env_facts import inspect_env
from rl_platform.envs.embodied.vector import VectorEnv
from rl_platform.errors import ConfigError
from rl_platform.metrics import read_metrics

PYTHON = os.environ.get("MANISKILL_PYTHON")
ID = "rl_platform.envs.embodied.suites.maniskill:ManiSkillTask"
CONFIG = Path(__file__).parents[2] / "configs" / "embodied" / "maniskill_push.yaml"


def described(**kwargs: object) -> EnvDescription:
    """Returns PushCube in its interpreter. Skips the test if the interpreter or Vulkan is missing."""
    if PYTHON is None:
        pytest.skip("MANISKILL_PYTHON names no interpreter, see docs/maniskill.md")
    description = EnvDescription(ID, {"task": "PushCube-v1", "control_mode": "pd_ee_delta_pos"} | kwargs, python=PYTHON)
    try:
        inspect_env(description)
    except ConfigError as error:
        if "needs Vulkan" in str(error):
            pytest.skip(f"no Vulkan: {error}")
        raise
    return description


@pytest.mark.parametrize("path", sorted(CONFIG.parent.glob("maniskill_*.yaml")), ids=lambda path: path.stem)
def test_a_success_that_ends_an_episode_pays_more_than_waiting_beside_the_goal(path: Path) -> None:
    """With the value 0 after a success, PushCube pays 1 for it and 0.5 / (1 - 0.8) for a cube beside the goal."""
    config = load_config(path).config
    assert config.env.id == ID
    assert config.env.kwargs.get("reward_mode", "normalized_dense") == "normalized_dense"
    assert config.algorithm.bootstrap_type == "always"


def test_the_scripted_expert_picks_the_cube(script: Callable[[Path], ModuleType], folder: Path) -> None:
    described(task="PickCube-v1")
    pytest.importorskip("h5py")
    example = script(CONFIG.parents[2] / "examples" / "demonstrations.py")
    task = example.TASKS["maniskill_pick"]
    task = task._replace(env=replace(task.env, python=PYTHON))
    assert example.record("maniskill_pick.hdf5", task, 4, task.noise, 1) >= 0.75


def test_a_seed_determines_the_episode_which_ends_by_the_limit_of_the_task(closes) -> None:
    first, second = (closes(VectorEnv(described(), 2, workers)) for workers in (1, 2))
    starts = [envs.reset([5, 6]) for envs in (first, first, second)]
    assert starts[0].shape == (2, 35)
    assert np.array_equal(starts[0], starts[1])
    assert np.array_equal(starts[0], starts[2])
    assert not np.array_equal(starts[0][0], starts[0][1])
    draw = np.random.default_rng(0)
    for step in range(50):
        actions = draw.uniform(-0.1, 0.1, (2, 4)).astype(np.float32)
        results = [envs.step(actions) for envs in (first, second)]
        assert np.array_equal(results[0].observations, results[1].observations)
        assert results[0].ended.all() == (step == 49)
    assert [(episode.length, episode.terminated) for episode in results[0].episodes] == [(50, False)] * 2
    assert all(episode.success is not None and not episode.success.once for episode in results[0].episodes)
    states = first.state_dict()["envs"]
    assert [pickle.loads(state)[0] for state in states] == [None, None], "a resumed run begins new episodes"


def test_images_and_the_state_of_the_robot() -> None:
    with closing(VectorEnv(described(observations="rgb", size=32), 1, 1)) as envs:
        assert [(part.name, part.shape, part.image) for part in envs.spaces.parts] == [
            ("state", (25,), False),
            ("rgb", (32, 32, 3), True),
        ]
        first = envs.reset([3])
        assert np.array_equal(first, envs.reset([3]))
        image = np.round(255 * first[0, 25:])
        assert image.std() > 10, "a picture"
        moved = envs.step(np.full((1, 4), 0.5, np.float32)).observations
        assert not np.array_equal(moved[0, 25:], first[0, 25:])


def test_the_shipped_config_trains_and_resumes(command, folder: Path) -> None:
    described()
    run = [
        CONFIG,
        f"env.python={PYTHON}",
        "env.num_envs=2",
        "env.num_workers=1",
        "data.mini_batch_size=50",
        "env.evaluation.episodes=2",
    ]
    ended = command(*run, "runner.max_steps=1", "runner.output_dir=out")
    assert ended.code == 0, ended.err
    ended = command(*run, "runner.max_steps=2", "runner.output_dir=out")
    assert ended.code == 0, ended.err
    rows = read_metrics("out")
    assert [row["step"] for row in rows] == [0, 1, 2]
    evaluated = [row for row in rows if "val/return" in row]
    assert evaluated
    assert all(0 <= row["val/success_at_end"] <= row["val/success_once"] <= 1 for row in evaluated)


def test_an_unknown_task_is_refused(command, folder: Path) -> None:
    described()
    ended = command(CONFIG, f"env.python={PYTHON}", "env.kwargs.task=PushCub-v1", "runner.output_dir=out")
    assert (ended.code, "env.kwargs.task=PushCube-v1" in ended.err) == (2, True), ended.err


@pytest.mark.skipif(importlib.util.find_spec("mani_skill") is not None, reason="ManiSkill is installed here")
def test_a_missing_package_is_refused_with_the_line_to_type(command, folder: Path) -> None:
    ended = command(CONFIG, "env.python=null", "env.num_workers=0", "runner.output_dir=out")
    assert ended.code == 2, ended.err
    told = " ".join(ended.err.split())
    assert "ManiSkill is not installed here (No module named 'mani_skill')" in told
    assert "pip install mani-skill==3.0.1" in told
