"""examples/demonstrations.py: a recording is complete or leaves no file; wrong usage has no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import mujoco
import numpy as np
import pytest

from rl_platform.envs.embodied.descriptions import EnvDescription

h5py = pytest.importorskip("h5py")
EXAMPLE = Path(__file__).parents[3] / "examples" / "demonstrations.py"
ARM = """
import gymnasium
import numpy as np


class Arm(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        return np.zeros(3, np.float32), {}

    def step(self, action):
        return np.ones(3, np.float32), 1.0, False, False, {"success": True}
"""


@pytest.fixture
def example(script: Callable[[Path], ModuleType]) -> ModuleType:
    return script(EXAMPLE)


def test_a_recording_is_complete_or_leaves_no_file(example: ModuleType, folder: Path) -> None:
    Path("arm.py").write_text(ARM)
    env, parts = EnvDescription("arm.py:Arm", max_episode_steps=3), {"hand": 1, "cube": 2}

    def interrupted(observation: np.ndarray) -> np.ndarray:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        example.record("new/arm.hdf5", example.Task(env, parts, interrupted, slice(2), 2), 2, 0.1, 1)
    assert list(Path("new").iterdir()) == []
    task = example.Task(env, parts, lambda observation: np.ones(2), slice(2), 2)
    assert example.record("new/arm.hdf5", task, 2, 0.1, 1) == 1.0
    assert [each.name for each in Path("new").iterdir()] == ["arm.hdf5"]
    with h5py.File("new/arm.hdf5") as file:
        assert file["data/demo_1/obs/cube"].shape == (3, 2)


def test_no_more_episodes_are_recorded_if_the_workers_do_not_divide_them(example: ModuleType, folder: Path) -> None:
    Path("arm.py").write_text(ARM)
    env, parts = EnvDescription("arm.py:Arm", max_episode_steps=3), {"hand": 1, "cube": 2}
    task = example.Task(env, parts, lambda observation: np.ones(2), slice(2), 3)
    assert example.record("arm.hdf5", task, 3, 0.1, 2) == 1.0
    with h5py.File("arm.hdf5") as file:
        assert sorted(file["data"]) == ["demo_0", "demo_1", "demo_2"]


UNEVEN = """
import gymnasium
import numpy as np


class Arm(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-100, 100, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        self.length, self.steps = 5 if seed is None else 2 + seed, 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        over = self.steps == self.length
        return np.full(1, self.steps, np.float32), 1.0, over, False, {"success": over}
"""


def test_an_episode_that_ends_at_success_is_recorded_to_its_own_end(example: ModuleType, folder: Path) -> None:
    Path("arm.py").write_text(UNEVEN)
    env = EnvDescription("arm.py:Arm", max_episode_steps=9)
    task = example.Task(env, {"hand": 1}, lambda observation: observation / 10, slice(1), 3)
    assert example.record("arm.hdf5", task, 3, 0.0, 2) == 1.0
    with h5py.File("arm.hdf5") as file:
        seen = [file[f"data/demo_{number}/obs/hand"][:, 0].tolist() for number in range(3)]
        assert seen == [[0, 1], [0, 1, 2], [0, 1, 2, 3]]
        assert np.allclose(file["data/demo_2/actions"][:, 0], [0.0, 0.1, 0.2, 0.3])


CAMERA = """
import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict


class Camera(gymnasium.Env):
    observation_space = Dict({"state": Box(-9, 9, (2,), np.float32), "rgb": Box(0, 255, (2, 3, 3), np.uint8)})
    action_space = Box(-1, 1, (2,), np.float32)

    def seen(self):
        return {"state": np.ones(2, np.float32), "rgb": np.arange(237, 255, dtype=np.uint8).reshape(2, 3, 3)}

    def reset(self, *, seed=None, options=None):
        return self.seen(), {}

    def step(self, action):
        return self.seen(), 1.0, False, False, {"success": True}
"""


def test_images_are_recorded_as_pixels(example: ModuleType, folder: Path) -> None:
    Path("camera.py").write_text(CAMERA)
    parts = {"rgb": (2, 3, 3), "state": 2}  # Gymnasium sorts the keys
    env = EnvDescription("camera.py:Camera", max_episode_steps=2)
    task = example.Task(env, parts, lambda observation: observation[-2:], slice(2), 1)
    assert example.record("camera.hdf5", task, 1, 0.1, 1) == 1.0
    with h5py.File("camera.hdf5") as file:
        images = file["data/demo_0/obs/rgb"]
        assert (images.dtype, images[1].reshape(-1).tolist()) == (np.uint8, list(range(237, 255)))
        assert file["data/demo_0/obs/state"][:].tolist() == [[1, 1], [1, 1]]


def test_the_arm_pushes_a_cube_from_behind(example: ModuleType) -> None:
    joints, still = [0.0] * 18, [1.0, 0.0, 0.0, 0.0]
    cube, goal = [0.05, 0.0, 0.02], [0.25, 0.0, 0.0]

    def action(hand: list[float]) -> np.ndarray:
        chosen: np.ndarray = example.maniskill_push(np.array([*joints, *hand, *still, *goal, *cube, *still]))
        return chosen

    assert np.allclose(action([0.01, 0.0, 0.02]), [1.0, 0.0, 0.0, -1.0])
    assert action([0.1, 0.0, 0.1])[2] < 0.0 < action([0.1, 0.0, 0.05])[2], "above the table on the way back"


def test_a_cube_between_the_fingers_is_gripped_and_a_held_one_carried_to_the_goal(example: ModuleType) -> None:
    joints, fingers, speeds, still = [0.0] * 7, [0.04, 0.04], [0.0] * 9, [1.0, 0.0, 0.0, 0.0]
    hand, cube, goal = [0.0, 0.0, 0.02], [0.005, 0.0, 0.02], [0.055, 0.0, 0.12]

    def action(held: float) -> np.ndarray:
        observation = [*joints, *fingers, *speeds, held, *hand, *still, *goal, *cube, *still, *[0.0] * 6]
        chosen: np.ndarray = example.maniskill_pick(np.array(observation))
        return chosen

    assert np.allclose(action(0.0), [0.05, 0.0, 0.0, -1.0])
    assert np.allclose(action(1.0), [0.5, 0.0, 1.0, -1.0])


def test_the_hand_holds_a_cube_that_noise_has_moved_away_from_its_centre(example: ModuleType) -> None:
    hand, downwards, fingers, cube = [0.0, 0.0, 0.84], [1.0, 0.0, 0.0, 0.0], [0.02, -0.02], [0.0, 0.025, 0.83]
    action = example.lift(np.array([*hand, *downwards, *fingers, *cube, *[0.0] * 7]))
    assert (action[6], action[2]) == (example.CLOSE, 1.0)


def test_the_handle_is_turned_before_the_door_is_pulled(example: ModuleType) -> None:
    hand, downwards, fingers = [-0.145, -0.23, 1.075], [1.0, 0.0, 0.0, 0.0], [0.03, -0.003]
    door, handle = [-0.195, -0.348, 1.1], [-0.145, -0.248, 1.075]
    turned = example.door(np.array([*hand, *downwards, *fingers, *door, *handle, 0.0, 0.0]))
    pulled = example.door(np.array([*hand, *downwards, *fingers, *door, *handle, 0.2, 0.0]))
    assert (turned[2], turned[6], pulled[1], pulled[6]) == (-1.0, example.CLOSE, 1.0, example.CLOSE)


def test_the_hand_moves_to_its_target_by_the_jacobian_of_the_arm(example: ModuleType) -> None:
    body, ends = "", ""
    for offset, quaternion in example.JACO:
        place = f'pos="{" ".join(map(str, offset))}" quat="{" ".join(map(str, quaternion))}"'
        body += f'<body {place}><joint axis="0 0 1"/><geom size="0.01"/>'
        ends += "</body>"
    base = " ".join(map(str, example.JACO_BASE))
    arm = f'<body pos="{base}">{body}<site name="hand" pos="0.01 0.02 0.2"/>{ends}</body>'
    model = mujoco.MjModel.from_xml_string(f"<mujoco><worldbody>{arm}</worldbody></mujoco>")
    data = mujoco.MjData(model)
    data.qpos[:] = np.random.default_rng(0).uniform(-3.0, 3.0, 6)
    mujoco.mj_kinematics(model, data)
    mujoco.mj_comPos(model, data)
    expected, angles = np.zeros((3, 6)), np.stack([np.sin(data.qpos), np.cos(data.qpos)], 1)
    mujoco.mj_jacSite(model, data, expected, None, 0)
    hand = data.site("hand").xpos.copy()
    assert np.allclose(example.jaco_jacobian(angles, hand), expected, atol=1e-9)

    observation = np.concatenate([hand + 0.05, angles.reshape(-1), np.zeros(18), hand, np.zeros(9)])
    action = example.dm_reach(observation)
    moved = expected @ action[:6]
    assert moved @ np.full(3, 1 / 3**0.5) > 0.95 * np.linalg.norm(moved) > 0.0
    assert np.abs(action[:6]).max() <= 0.838


def test_a_task_without_success_writes_episodes_of_enough_return(example: ModuleType, folder: Path) -> None:
    Path("arm.py").write_text(UNEVEN.replace('{"success": over}', "{}"))
    env = EnvDescription("arm.py:Arm", max_episode_steps=9)
    task = example.Task(env, {"hand": 1}, lambda observation: observation / 10, slice(1), 3, least_return=3.0)
    assert example.record("arm.hdf5", task, 3, 0.0, 2) == 2 / 3
    with h5py.File("arm.hdf5") as file:
        assert [len(file[f"data/demo_{number}/actions"]) for number in range(2)] == [3, 4]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["lift.hdf5"], "`rl-platform environment manipulation` makes it"),
        (["lift.hdf5", "--workers", "0"], "--episodes and --workers are at least 1"),
        (["maniskill_pick.hdf5", "--python", "maniskill/bin/python"], "pip install mani-skill==3.0.1"),
        (["reach.hdf5"], "names no task: add --task lift"),
    ],
)
def test_wrong_usage_has_no_traceback(words: list[str], text: str, tmp_path: Path) -> None:
    environment = os.environ | {"RL_PLATFORM_CACHE": str(tmp_path)}
    command = [sys.executable, str(EXAMPLE), *words]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert (ended.returncode, text in ended.stderr, "Traceback" in ended.stderr) == (2, True, False), ended.stderr
    assert list(tmp_path.glob("*.hdf5*")) == []
