"""MuJoCo environments that are observed as pictures."""

from __future__ import annotations

from dataclasses import replace

import gymnasium
import numpy as np
import pytest

from rl_platform.envs.embodied.descriptions import EnvDescription, PixelFormat, make_env
from rl_platform.envs.embodied.pictures.drawing import CannotDraw, with_drawing
from rl_platform.envs.embodied.pictures.pixels import PixelObservation
from rl_platform.envs.embodied.spaces import read_spaces
from rl_platform.envs.embodied.vector import VectorEnv
from rl_platform.errors import ConfigError, WorkerError

PENDULUM = EnvDescription("InvertedPendulum-v5", pixels=PixelFormat(24, 20, frame_stack=2))
GRAY = replace(PENDULUM, pixels=PixelFormat(24, 20, frame_stack=3, grayscale=True))


class Counting(gymnasium.Env):
    """Draws its number of steps, with another value in each channel."""

    def reset(self, *, seed=None, options=None):
        self.steps = 1
        return None, {}

    def step(self, action):
        self.steps += 1
        return None, 0.0, False, False, {}

    def render(self):
        return np.tile(np.uint8([self.steps, 10 * self.steps, 0]), (20, 24, 1))

    class mujoco_renderer:
        viewer = "open"

    class model:
        ncam = 0

        class vis:
            class quality:
                shadowsize = 4096

            class global_:
                offwidth = offheight = 480


def test_the_latest_pictures_stand_side_by_side_the_oldest_first() -> None:
    env = PixelObservation(Counting(), PixelFormat(24, 20, frame_stack=3))
    assert env.observation_space.shape == (20, 24, 9)
    first, _ = env.reset()
    assert first[5, 5].tolist() == [1, 10, 0] * 3
    for _ in range(3):
        last = env.step(0)[0]
    assert last.dtype == np.uint8
    assert last[5, 5].tolist() == [2, 20, 0, 3, 30, 0, 4, 40, 0]
    assert first[5, 5].tolist() == [1, 10, 0] * 3
    assert env.reset()[0][5, 5].tolist() == [1, 10, 0] * 3


def test_gray_is_what_an_eye_makes_of_colours() -> None:
    env = PixelObservation(Counting(), PixelFormat(24, 20, frame_stack=2, grayscale=True))
    env.reset()
    env.step(0)
    assert env.step(0)[0][0, 0].tolist() == [round(0.299 * 2 + 0.587 * 20), round(0.299 * 3 + 0.587 * 30)]


def test_spaces_need_no_picture() -> None:
    env = make_env(PENDULUM)
    spaces = read_spaces(env, PENDULUM.id)
    env.close()
    assert spaces.images
    assert (spaces.observation_shape, spaces.observation_size) == ((20, 24, 6), 20 * 24 * 6)


def test_pictures_of_the_simulation_arrive_as_bytes_and_show_that_it_moves(drawing, capfd) -> None:
    envs = VectorEnv(GRAY, 3, 2, worker_variables=drawing)
    first = envs.reset([1, 2, 3])
    assert (first.dtype, first.shape) == (np.uint8, (3, 20 * 24 * 3))
    assert first.std() > 5
    episodes = []
    for _ in range(40):
        result = envs.step(np.full((3, 1), 2.0, np.float32))
        episodes += result.episodes
    assert result.observations.dtype == result.final_observations.dtype == np.uint8
    moved = result.observations.reshape(3, 20, 24, 3).astype(int)
    assert np.abs(moved[..., 0] - moved[..., 2]).max() > 20
    envs.close()
    plain = VectorEnv(replace(GRAY, pixels=None), 3)
    plain.reset([1, 2, 3])
    expected = [episode for _ in range(40) for episode in plain.step(np.full((3, 1), 2.0, np.float32)).episodes]
    assert episodes == expected
    assert episodes
    plain.close()
    assert capfd.readouterr().err == ""


def test_a_resumed_environment_shows_the_same_pictures(drawing) -> None:
    first, second = (VectorEnv(GRAY, 2, 2, worker_variables=drawing) for _ in range(2))
    actions = np.random.default_rng(0).normal(size=(20, 2, 1)).astype(np.float32)
    first.reset([1, 2])
    for action in actions[:9]:
        first.step(action)
    second.reset([7, 8])
    assert np.array_equal(second.load_state_dict(first.state_dict()), first.observations)
    for action in actions[9:]:
        ours, theirs = first.step(action), second.step(action)
        assert np.array_equal(ours.observations, theirs.observations)
        assert np.array_equal(ours.rewards, theirs.rewards)
    first.close()
    second.close()


def test_all_environments_are_seen_from_the_same_place(drawing) -> None:
    """The same state, whichever state an environment was first drawn in."""
    pictures = []
    for seed in (1, 2):
        envs = VectorEnv(GRAY, 1, 1, worker_variables=drawing)
        envs.reset([seed])
        pictures.append(envs.reset([3]))
        envs.close()
    assert np.array_equal(*pictures)


def test_a_camera_of_the_model(drawing) -> None:
    views = []
    for camera in (None, "track"):
        pixels = PixelFormat(24, 20, camera=camera)
        envs = VectorEnv(EnvDescription("Walker2d-v5", pixels=pixels), 1, 1, worker_variables=drawing)
        views.append(envs.reset([0]))
        envs.close()
    assert views[0].std() > 5
    with pytest.raises(ConfigError, match=r"env.pixels.camera: the model has no such camera[\s\S]*allowed: track"):
        make_env(EnvDescription("Walker2d-v5", pixels=PixelFormat(24, 20, camera="front")))


def test_what_mujoco_does_not_draw_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"env.pixels: CartPole-v1 is none of Gymnasium's MuJoCo tasks"):
        make_env(EnvDescription("CartPole-v1", pixels=PixelFormat(24, 20)))
    with pytest.raises(ConfigError, match=r"env.kwargs: width: env.pixels says it"):
        make_env(replace(PENDULUM, kwargs={"width": 100}))


def test_the_first_library_that_draws_is_taken_and_without_one_each_tells_why(monkeypatch) -> None:
    tried = []

    def start(variables: dict[str, str]) -> str:
        tried.append(variables["MUJOCO_GL"])
        if variables["MUJOCO_GL"] == "egl":
            raise WorkerError("a long story\nno display")
        return "drawn"

    monkeypatch.delenv("MUJOCO_GL", raising=False)
    assert with_drawing(True, start) == "drawn"
    assert tried == ["egl", "osmesa"]
    monkeypatch.setenv("MUJOCO_GL", "egl")
    with pytest.raises(CannotDraw, match="MUJOCO_GL=egl: no display"):
        with_drawing(True, start)


def test_images_of_an_environment_of_its_own_are_images_and_other_bytes_are_numbers() -> None:
    class Bytes(gymnasium.Env):
        action_space = gymnasium.spaces.Discrete(2)

        def __init__(self, *shape: int) -> None:
            self.observation_space = gymnasium.spaces.Box(0, 255, shape, np.uint8)

    assert read_spaces(Bytes(8, 8, 3), "Bytes").observation_dtype == "uint8"
    assert read_spaces(Bytes(4, 8, 8, 3), "Bytes").observation_dtype == "uint8"
    assert read_spaces(Bytes(128), "Bytes").observation_dtype == "float32"
