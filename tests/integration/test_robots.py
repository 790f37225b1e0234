"""Meta-World and Gymnasium-Robotics: the shipped configs, seeds and saved states. Skipped where they are not installed.

They come with MuJoCo 3: a virtual environment of their own has `pip install -e '.[metaworld,robotics,test]'`.
"""

from __future__ import annotations

import json
from pathlib import Path

import mujoco
import numpy as np
import pytest

from rl_platform.envs.embodied.descriptions import EnvDescription
from rl_platform.envs.embodied.vector import VectorEnv
from rl_platform.metrics import read_metrics

if mujoco.__version__.startswith("4."):
    pytest.skip("Meta-World and Gymnasium-Robotics do not work with MuJoCo 4", allow_module_level=True)

CONFIGS = Path(__file__).parents[2] / "configs" / "embodied"
TASKS = {
    "metaworld": (
        "metaworld_reach",
        EnvDescription("metaworld:Meta-World/MT1", {"env_name": "reach-v3", "seed": 1}),
        39,
    ),
    "gymnasium_robotics": ("fetch_reach", EnvDescription("gymnasium_robotics:FetchReachDense-v4"), 16),
}
SMALL = (
    "env={num_envs: 2, rollout_steps: 100, num_workers: 0, max_episode_steps: 50, evaluation: {episodes: 2}}",
    "data.mini_batch_size=100",
    "runner.max_steps=1",
    "runner.output_dir=runs/robot",
)


@pytest.mark.parametrize("package", TASKS)
def test_the_shipped_config_trains_and_reports_success(package: str, command, folder: Path) -> None:
    pytest.importorskip(package)
    name, description, _ = TASKS[package]
    env = {"env.id": description.id, "env.kwargs": json.dumps(description.kwargs)}
    changes = [*SMALL, *(f"{key}={value}" for key, value in env.items())]
    ended = command(CONFIGS / f"{name}.yaml", *changes)
    assert ended.code == 0, ended.err
    rows = read_metrics("runs/robot")
    for row, names in ((rows[0], ("val",)), (rows[1], ("val", "env"))):
        for kind in names:
            assert 0.0 <= row[f"{kind}/success_at_end"] <= row[f"{kind}/success_once"] <= 1.0
    ended = command("--eval", "latest", "env.evaluation.video=false")
    assert ended.code == 0, ended.err
    assert "success_once" in ended.out


@pytest.mark.parametrize("package", TASKS)
def test_a_seed_determines_the_episode_and_a_saved_state_continues(package: str) -> None:
    pytest.importorskip(package)
    _, description, width = TASKS[package]
    first, second = VectorEnv(description, 2), VectorEnv(description, 2, 2)
    try:
        starts = [envs.reset([5, 6]) for envs in (first, first, second)]
        assert starts[0].shape == (2, width)
        assert np.array_equal(starts[0], starts[1])
        assert np.array_equal(starts[0], starts[2])
        assert not np.array_equal(starts[0][0], starts[0][1])
        draw = np.random.default_rng(0)
        for _ in range(7):
            first.step(draw.uniform(-1, 1, (2, 4)))
        state = first.state_dict()
        assert max(map(len, state["envs"])) < 100_000  # bytes: without the meshes of the model
        second.load_state_dict(state)
        for _ in range(60):  # of the Fetch arm: through the end of an episode
            actions = draw.uniform(-1, 1, (2, 4))
            results = [envs.step(actions) for envs in (first, second)]
            for name in ("observations", "rewards", "truncated"):
                assert np.array_equal(*(getattr(result, name) for result in results)), name
    finally:
        first.close()
        second.close()
