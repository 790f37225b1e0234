"""Adapters of LIBERO and Isaac Lab with stand-ins of their interfaces, and all simulators that are not installed."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from rl_platform.config.schema.env import Evaluation
from rl_platform.envs.embodied.descriptions import EnvDescription
from rl_platform.envs.embodied.env_facts import inspect_env
from rl_platform.envs.embodied.suites import isaac_lab
from rl_platform.envs.embodied.suites.egl import select_egl_device
from rl_platform.envs.embodied.suites.isaac_lab import IsaacLab
from rl_platform.envs.embodied.suites.libero import LiberoTask, axis_angle
from rl_platform.envs.embodied.suites.playground import Playground
from rl_platform.envs.embodied.user_envs.user_envs import try_backend
from rl_platform.envs.embodied.vector import VectorEnv
from rl_platform.errors import ConfigError

SUITES = "rl_platform.envs.embodied.suites"
LIBERO, ISAAC = f"{SUITES}.libero:LiberoTask", f"{SUITES}.isaac_lab:IsaacLab"


def module(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    made = ModuleType(name)
    vars(made).update(content)
    monkeypatch.setitem(sys.modules, name, made)


class LiberoSimulator:
    """Counts its steps. Its images have a bright first row; the third step of an episode succeeds in task 1."""

    def __init__(self, bddl_file_name: str, camera_names: list[str], camera_heights: int, **_: Any) -> None:
        self.file, self.cameras, self.size, self.count = bddl_file_name, camera_names, camera_heights, 0
        self.sim = SimpleNamespace(render=lambda width, height, camera_name: np.zeros((height, width, 3), np.uint8))

    def seed(self, seed: int) -> None:
        self.furniture = np.random.default_rng(seed)

    def reset(self) -> dict[str, np.ndarray]:
        self.count, self.cabinet = 0, self.furniture.random()
        return self.observed()

    def set_init_state(self, state: np.ndarray) -> dict[str, np.ndarray]:
        self.start = float(state[0])
        return self.observed()

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, dict[str, Any]]:
        assert action.shape == (7,)
        self.count += 1
        return self.observed(), 0.0, False, {}

    def check_success(self) -> bool:
        return self.file.endswith("1") and self.count >= 13  # ten steps let the objects settle

    def close(self) -> None:
        pass

    def observed(self) -> dict[str, np.ndarray]:
        image = np.zeros((self.size, self.size, 3), np.uint8)
        image[0, 0] = 255
        hand = {
            "robot0_eef_pos": [self.start, self.count, self.cabinet] if self.count else [0, 0, 0],
            "robot0_eef_quat": [0] * 4,
        }
        arrays = {name: np.array(values, float) for name, values in (hand | {"robot0_gripper_qpos": [0] * 2}).items()}
        return {f"{camera}_image": image for camera in self.cameras} | arrays


@pytest.fixture
def libero(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = SimpleNamespace(
        n_tasks=2,
        get_task=lambda number: SimpleNamespace(language=f"do task {number}"),
        get_task_init_states=lambda number: np.arange(50.0)[:, None],
        get_task_bddl_file_path=lambda number: f"/tasks/{number}",
    )
    benchmark = SimpleNamespace(get_benchmark_dict=lambda: {"libero_spatial": lambda: tasks})
    module(monkeypatch, "libero")
    module(monkeypatch, "libero.libero", benchmark=benchmark)
    module(monkeypatch, "libero.libero.envs", OffScreenRenderEnv=LiberoSimulator)


def test_libero_is_seen_upright_and_ends_at_success(libero: None) -> None:
    envs = VectorEnv(EnvDescription(LIBERO, {"number": 1, "size": 8}, max_episode_steps=20), 1)
    assert (envs.spaces.observation_shape, envs.spaces.images) == ((8, 8, 3), True)
    image = envs.reset([3]).reshape(8, 8, 3)
    assert (image[7, 7].tolist(), image.sum()) == ([255] * 3, 3 * 255)
    results = [envs.step(np.zeros((1, 7), np.float32)) for _ in range(3)]
    assert [float(result.rewards[0]) for result in results] == [0, 0, 1]
    assert [bool(result.terminated[0]) for result in results] == [False, False, True]
    assert results[-1].episodes[0].success == (True, True)


def test_a_seed_chooses_an_initial_state_of_libero(libero: None) -> None:
    kwargs = {"number": 0, "size": 8, "cameras": ["agentview", "robot0_eye_in_hand"], "state": True}
    envs = VectorEnv(EnvDescription(LIBERO, kwargs, max_episode_steps=20), 2)
    assert [part.name for part in envs.spaces.parts] == ["agentview", "robot0_eye_in_hand", "state"]
    state = slice(2 * 8 * 8 * 3, None)
    first, again, others = (envs.reset(seeds)[:, state] for seeds in ([3, 4], [3, 4], [5, 6]))
    assert first.shape == (2, 8)
    assert np.array_equal(first, again)
    assert not np.array_equal(first[0], others[0])
    assert first[0, 1] == 10, "the objects have settled"


@pytest.mark.parametrize("step", [1, 10])
def test_an_evaluation_begins_once_in_each_state_of_libero(step: int, libero: None) -> None:
    """step: the number of tasks, each of which has every step-th seed."""
    env, first = LiberoTask(size=8), Evaluation().seed
    for task in range(step):
        starts = []
        for seed in range(first + task, first + 50 * step, step):
            env.reset(seed=seed)
            starts.append(env._env.start)
        assert sorted(starts) == list(range(50))


def test_the_hand_of_libero_is_turned_by_axis_times_angle() -> None:
    half = np.sqrt(0.5)
    for quaternion, expected in (
        ([0, 0, 0, 1], [0, 0, 0]),
        ([0, 0, half, half], [0, 0, np.pi / 2]),
        ([1, 0, 0, 0], [np.pi, 0, 0]),  # the gripper points down
        ([0, half, 0, -half], [0, 1.5 * np.pi, 0]),
    ):
        np.testing.assert_allclose(axis_angle(np.array(quaternion, float)), expected, atol=1e-12)


@pytest.mark.parametrize(
    ("visible", "device"), [(None, None), ("0,1", None), ("", "0"), ("GPU-1f", "0"), ("-1", "0"), ("GPU-1f", "2")]
)
def test_robosuite_reads_a_device_that_is_a_number(
    visible: str | None, device: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("CUDA_VISIBLE_DEVICES", visible), ("MUJOCO_EGL_DEVICE_ID", device if device == "2" else None)):
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)
    select_egl_device()
    assert os.environ.get("MUJOCO_EGL_DEVICE_ID") == device


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [({"suite": "libero_spatal"}, "did you mean libero_spatial"), ({"number": 2}, "allowed: 0 to 1")],
)
def test_unknown_tasks_of_libero_are_refused(kwargs: dict[str, Any], text: str, libero: None) -> None:
    with pytest.raises(ConfigError, match=text):
        inspect_env(EnvDescription(LIBERO, kwargs, max_episode_steps=20))


def test_playground_saves_no_state_on_a_gpu() -> None:
    backend = object.__new__(Playground)
    backend._exact = False
    assert backend.save(0) is None


class IsaacSimulator(gymnasium.Env[Any, Any]):
    """As an environment of Isaac Lab: tensors, a group of observations, resets in `step`.

    Observes the number of the episode and its steps. An episode is truncated after 3 steps; a negative action ends it.
    """

    single_action_space = action_space = observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,))

    def __init__(self, cfg: Any) -> None:
        numbers = 10.0 * torch.arange(cfg.num_envs)  # environments differ, whatever their seeds
        self.observed = {"policy": torch.stack([numbers, torch.zeros(cfg.num_envs)], dim=1)}
        self.seeds: list[int | None] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        self.seeds.append(seed)
        self.observed["policy"][:, 0] += 1
        self.observed["policy"][:, 1] = 0
        return self.observed, {}

    def step(self, action: torch.Tensor) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
        assert action.dtype == torch.float32
        state = self.observed["policy"]
        state[:, 1] += 1
        terminated, truncated, rewards = action[:, 0] < 0, state[:, 1] >= 3, state[:, 1].clone()
        state[terminated | truncated] *= torch.tensor([1.0, 0.0])
        state[terminated | truncated] += torch.tensor([1.0, 0.0])
        return self.observed, rewards, terminated, truncated, {}


@pytest.fixture
def isaac(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    def parse_env_cfg(task: str, device: str, num_envs: int) -> Any:
        return SimpleNamespace(num_envs=num_envs, device=device)

    monkeypatch.setitem(
        gymnasium.registry,
        "Isaac-Stand-In-v0",
        gymnasium.envs.registration.EnvSpec("Isaac-Stand-In-v0", IsaacSimulator),
    )
    isaac_lab._launch.cache_clear()
    launched: list[dict[str, Any]] = []
    module(monkeypatch, "isaaclab")
    module(monkeypatch, "isaaclab.app", AppLauncher=lambda **given: launched.append(given) or SimpleNamespace(app=0))
    module(monkeypatch, "isaaclab_tasks")
    module(monkeypatch, "isaaclab_tasks.utils", parse_env_cfg=parse_env_cfg)
    yield {"task": "Isaac-Stand-In-v0", "observation_size": 2, "action_size": 2, "device": "cpu"}
    assert launched == [{"headless": True, "device": "cpu"}]
    isaac_lab._launch.cache_clear()


def described(kwargs: dict[str, Any], limit: int = 3) -> EnvDescription:
    return EnvDescription(ISAAC, kwargs, max_episode_steps=limit, backend=ISAAC)


def test_isaac_lab_resets_its_episodes_itself(isaac: dict[str, Any]) -> None:
    assert try_backend(described(isaac)).observation_shape == (2,)
    envs = VectorEnv(described(isaac), 2)
    assert envs.reset([7, 8]).tolist() == [[2, 0], [12, 0]]
    assert envs._blocks[0]._native._backend._env.seeds == [None, 7]
    result = envs.step(np.array([[0, 0], [-1, 0]]))
    assert result.observations.tolist() == [[2, 1], [13, 0]]
    assert (result.terminated.tolist(), result.rewards.tolist()) == ([False, True], [1, 1])
    assert result.final_observations.tolist() == [[12, 0]], "the one before the last"
    envs.step(np.zeros((2, 2)))
    result = envs.step(np.zeros((2, 2)))
    assert (result.truncated.tolist(), result.observations.tolist()) == ([True, False], [[3, 0], [13, 2]])
    assert [episode.length for episode in result.episodes] == [3]
    assert envs.reset([9, 9])[:, 1].tolist() == [0, 0]


def test_a_resumed_run_begins_the_episodes_of_isaac_lab_by_its_seed(isaac: dict[str, Any]) -> None:
    first, resumed = (VectorEnv(described(isaac), 2) for _ in range(2))
    first.reset([7, 8])
    first.step(np.zeros((2, 2)))
    observations = resumed.load_state_dict(first.state_dict())
    assert observations.tolist() == [[2, 0], [12, 0]]
    unseeded, seed = resumed._blocks[0]._native._backend._env.seeds
    assert (unseeded, type(seed)) == (None, int)


def test_what_isaac_lab_cannot_do_ends_the_run_with_the_key(isaac: dict[str, Any]) -> None:
    envs = IsaacLab(2, **isaac)
    envs.reset(np.arange(2), [1, 2])
    envs.step(np.zeros((2, 2)), np.array([False, False]))
    with pytest.raises(ConfigError, match="at least the limit of the task"):
        envs.reset(np.array([0]), [None])
    envs.step(np.zeros((2, 2)), np.array([False, True]))
    with pytest.raises(ConfigError, match="num_action_chunks"):
        envs.step(np.zeros((2, 2)), np.array([False, False]))
    with pytest.raises(ConfigError, match=r"env\.kwargs\.action_size: .*shape \(2,\)"):
        IsaacLab(2, **isaac | {"action_size": 3})


@pytest.mark.parametrize(
    ("description", "text"),
    [
        (EnvDescription(LIBERO, {}, max_episode_steps=9), "pip install hf-libero==0.1.4"),
        (described({}), "https://isaac-sim.github.io/IsaacLab"),
        (
            EnvDescription(name := f"{SUITES}.playground:Playground", {}, max_episode_steps=9, backend=name),
            "pip install playground==0.2.0",
        ),
    ],
)
def test_a_missing_simulator_is_refused_with_the_line_to_type(description: EnvDescription, text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not installed here \(No module named") as refused:
        inspect_env(description)
    assert text in str(refused.value)
    assert "cannot be built" not in str(refused.value), "the problem of the simulator alone"


ROBOTICS = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

class Fetch(CartPoleEnv):
    def __init__(self, reward_type="sparse"):  # as the tasks of Gymnasium-Robotics: all other names are the dense one
        super().__init__()

gymnasium.register("FetchStand-v0", "gymnasium_robotics:Fetch", max_episode_steps=5)
"""


def test_a_misspelt_reward_of_gymnasium_robotics(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gymnasium_robotics.py").write_text(ROBOTICS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "gymnasium_robotics", raising=False)
    name = "gymnasium_robotics:FetchStand-v0"
    try:
        for reward in ("dense", "sparse"):
            inspect_env(EnvDescription(name, {"reward_type": reward}))
        with pytest.raises(ConfigError) as refused:
            inspect_env(EnvDescription(name, {"reward_type": "dens"}))
    finally:
        gymnasium.registry.pop("FetchStand-v0")
        sys.modules.pop("gymnasium_robotics")
    (problem,) = refused.value.problems
    assert (problem.key, problem.value, problem.allowed) == ("env.kwargs.reward_type", '"dens"', "dense, sparse")
    assert "did you mean dense?" in problem.hint
