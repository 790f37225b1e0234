"""Evaluation counts each seed once; videos are written or their absence explained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest

from rl_platform.envs.embodied.descriptions import EnvDescription, make_env
from rl_platform.envs.embodied.evaluate import PolicyFunction, evaluate
from rl_platform.envs.embodied.pictures.drawing import with_caption, with_captions
from rl_platform.envs.embodied.pictures.video import RecordedEpisode, Video, caption, play
from rl_platform.envs.embodied.success import Success
from rl_platform.envs.embodied.vector import VectorEnv


def _lean(observations: np.ndarray) -> np.ndarray:
    return (observations[:, 2] > 0).astype(int)


def lengths_of_episodes(act: Callable[[int, np.ndarray], int]) -> list[int]:
    """Of seven episodes of gymnasium's CartPole, with the actions act(length so far, observation)."""
    import gymnasium

    env = gymnasium.make("CartPole-v1")
    lengths = []
    for seed in range(50, 57):
        observation, _ = env.reset(seed=seed)
        length, done = 0, False
        while not done:
            observation, _, terminated, truncated, _ = env.step(act(length, observation))
            length, done = length + 1, terminated or truncated
        lengths.append(length)
    return lengths


@pytest.mark.parametrize("num_envs", [1, 3, 8])
def test_every_seed_once_whatever_the_number_of_envs(num_envs: int) -> None:
    lengths = lengths_of_episodes(lambda length, observation: int(observation[2] > 0))
    result = evaluate(VectorEnv(EnvDescription("CartPole-v1"), num_envs), _lean, episodes=7, seed=50)
    assert result.lengths == lengths
    assert result.returns == [float(length) for length in lengths]
    assert result.invalid == 0


def test_invalid_episodes_are_counted_and_left_out() -> None:
    envs = VectorEnv(EnvDescription("toy_envs:Toy-v0", {"fault": "nan reward", "which": 2}), 2)
    result = evaluate(envs, lambda observations: np.ones((2, 2)), episodes=5, seed=0)
    assert result.invalid == 1
    assert result.returns == [5.0] * 4


def still(observations: np.ndarray) -> np.ndarray:
    return np.zeros((1, 6))


def drawn(description: EnvDescription, path: Path, policy: PolicyFunction, *, chunked: bool = False) -> str:
    """Why there is no video of the episode of seed 3."""
    video = Video(description)
    if not video.refusal:
        video.start({path: play(description, policy, 3, chunked=chunked)}, {"step": 7})
    return video.wait()


def test_an_env_without_pictures_says_so(tmp_path: Path) -> None:
    assert "cannot draw" in drawn(EnvDescription("toy_envs:Toy-v0"), tmp_path / "a.mp4", still)


@pytest.mark.parametrize(("env_id", "steps_per_picture"), [("HalfCheetah-v5", 2), ("Walker2d-v5", 5)])
def test_a_video_or_the_reason_why_not(env_id: str, steps_per_picture: int, tmp_path: Path) -> None:
    path = tmp_path / "videos" / "episode.mp4"
    failure = drawn(EnvDescription(env_id, max_episode_steps=5), path, still)
    assert path.exists() == (not failure)
    if failure:
        assert env_id in failure
    else:
        assert b"ftyp" in path.read_bytes()[:16]
        facts = json.loads(path.with_suffix(".json").read_text())
        assert (facts["step"], facts["seed"], facts["steps_per_picture"]) == (7, 3, steps_per_picture)
        assert len(facts["rewards"]) == 5
    assert list(tmp_path.rglob("*.unfinished.mp4")) == []


def test_the_drawn_episode_is_the_played_one(tmp_path: Path) -> None:
    """The last picture of the video is that of an environment that the policy moved."""
    import gymnasium
    import imageio.v2 as imageio

    path, description = tmp_path / "episode.mp4", EnvDescription("CartPole-v1", max_episode_steps=31)
    if drawn(description, path, _lean):
        pytest.skip("nothing can be drawn here")
    env = gymnasium.make("CartPole-v1", render_mode="rgb_array")
    observation, _ = env.reset(seed=3)
    for _ in range(30):
        observation, *_ = env.step(int(_lean(observation[None])[0]))
    pictures = imageio.mimread(path)
    assert len(pictures) == 16
    expected = np.asarray(env.render(), float)
    differences = [np.abs(picture[: len(expected), : expected.shape[1]] - expected).mean() for picture in pictures]
    assert np.argmin(differences) == 15


def test_a_video_of_chunks(tmp_path: Path) -> None:
    asked = []

    def policy(observations: np.ndarray) -> np.ndarray:
        asked.append(observations)
        return np.zeros((1, 3), np.int64)

    path, description = tmp_path / "episode.mp4", EnvDescription("CartPole-v1", max_episode_steps=5)
    failure = drawn(description, path, policy, chunked=True)
    assert path.exists() == (not failure)
    assert len(asked) == 2


@pytest.mark.parametrize(("env_id", "camera"), [("HalfCheetah-v5", "track"), ("Ant-v5", "track"), ("Hopper-v5", None)])
def test_the_camera_follows_the_robot(env_id: str, camera: str | None) -> None:
    """Hopper's default camera follows it; those of the others would stand still."""
    env = make_env(EnvDescription(env_id), render_mode="rgb_array").unwrapped
    chosen = env.mujoco_renderer.camera_id
    assert (env.model.camera(chosen).name if chosen >= 0 else None) == camera


def test_a_newer_video_takes_the_place_of_the_one_under_way(tmp_path: Path) -> None:
    description = EnvDescription("CartPole-v1")
    video, episode = Video(description), play(description, _lean, 3)
    video.start({tmp_path / "first.mp4": episode}, {})
    video.start({tmp_path / "second.mp4": episode}, {})
    failure = video.wait()
    assert not (tmp_path / "first.mp4").exists()
    assert (tmp_path / "second.mp4").exists() == (not failure)


def test_a_caption_has_what_is_known_of_the_step() -> None:
    episode = RecordedEpisode(3, rewards=[1.5, -1.0], values=[2.0, 0.25], success=Success(once=True, at_end=False))
    assert caption(episode, 1) == "seed 3  step 1  reward -1  return 0.5  value 0.25  success once"
    told = RecordedEpisode(3, rewards=[1.5], instruction="Open the drawer.")
    assert caption(told, 0) == 'seed 3  step 0  reward 1.5  return 1.5  "Open the drawer."'
    assert caption(RecordedEpisode(3, rewards=[1.5]), 0) == "seed 3  step 0  reward 1.5  return 1.5"


def test_a_caption_is_under_the_picture_in_lines_that_fit() -> None:
    picture = np.full((20, 120, 3), 7, np.uint8)
    one, two = with_caption(picture, "seed 3"), with_caption(picture, "reward 0.25  return 0.25  value 1.5")
    for drawn in (one, two):
        assert np.array_equal(drawn[:20], picture)
        assert drawn[20:].max() > 128
        assert drawn.shape[0] % 2 == 0  # as videos need it
    assert len(two) > len(one)
    words = '"Put the red block on the blue plate, then open the drawer."'
    assert len(with_caption(picture, words)) > len(with_caption(picture, words[:15])), "a long part is broken at words"


@pytest.mark.parametrize(
    ("one", "other"),
    [("Öffne", "Äffne"), ("Открой", "Закрой"), ("拿起杯子", "放下杯子"), ("pick 🍎", "pick 🍐"), ("\ud800", "\x00")],
)
def test_instructions_of_every_alphabet_can_be_told_apart(one: str, other: str) -> None:
    picture = np.full((20, 120, 3), 7, np.uint8)
    drawn = [with_caption(picture, f'"{text}"') for text in (one, other)]
    assert all(each[20:].max() > 128 for each in drawn)
    assert drawn[0].shape != drawn[1].shape or not np.array_equal(*drawn)


def test_an_instruction_of_several_lines_or_without_spaces_fits() -> None:
    picture = np.full((20, 120, 3), 7, np.uint8)
    several = RecordedEpisode(3, rewards=[1.5], instruction="Open the drawer,\n  then\tclose it.\n")
    assert caption(several, 0).endswith('  "Open the drawer, then close it."')
    assert with_caption(picture, caption(several, 0))[20:].max() > 128
    for word in ("m" * 300, "мы" * 150, "杯子" * 150):
        drawn = with_caption(picture, word)[20:]
        assert drawn[:-18].max() > 128
        assert drawn[:, -4:].max() == 0, "nothing ends at the edge"


@pytest.mark.parametrize("width", [1, 32, 45, 64, 99, 100, 131])
def test_pictures_with_captions_of_different_lengths_make_a_video(width: int, tmp_path: Path) -> None:
    import imageio.v2 as imageio

    picture = np.full((33, width, 3), 7, np.uint8)
    texts = ["seed 3  step 0  reward 0  return 0", 'seed 3  step 1  reward -0.00123  return -1.235e+04  "Open it."']
    drawn = list(with_captions([picture, picture], texts))
    assert drawn[0].shape == drawn[1].shape
    assert all(np.array_equal(each[:33, :width], picture) for each in drawn)
    with imageio.get_writer(tmp_path / "a.mp4", format="FFMPEG", fps=10, macro_block_size=2) as writer:  # type: ignore[arg-type]
        for each in drawn:
            writer.append_data(each)
    assert (tmp_path / "a.mp4").stat().st_size > 0


def test_a_drawing_library_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "no-such-library")
    description = EnvDescription("HalfCheetah-v5", max_episode_steps=5)
    assert "no-such-library" in drawn(description, tmp_path / "a.mp4", still)


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"dtype": "float64"}, "render() returned an array of type float64 and shape (32, 32, 3)"),
        ({"shape": [32, 32]}, "render() returned an array of type uint8 and shape (32, 32)"),
        ({"shape": [32, 32, 4]}, "render() returned an array of type uint8 and shape (32, 32, 4)"),
        ({}, "same size"),
    ],
)
def test_pictures_that_make_no_video_are_the_reason_why_there_is_none(
    kwargs: dict[str, object], reason: str, tmp_path: Path
) -> None:
    description = EnvDescription("toy_envs:Pictures-v0", kwargs)
    assert reason in drawn(description, tmp_path / "a.mp4", lambda _: np.zeros((1, 2)))
    assert list(tmp_path.iterdir()) == []


def test_an_encoder_that_starts_slowly_leaves_no_file(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path_factory.mktemp("encoder") / "ffmpeg"
    slow.write_text(f'#!/bin/sh\nsleep 0.5\nexec {imageio_ffmpeg.get_ffmpeg_exe()} "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(slow))
    assert "same size" in drawn(EnvDescription("toy_envs:Pictures-v0"), tmp_path / "a.mp4", lambda _: np.zeros((1, 2)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("num_envs", [1, 3, 8])
def test_chunks_begin_with_episodes(num_envs: int) -> None:
    """Three actions from one look, executed to the end of the episode and no further."""
    choice = 0

    def act(length: int, observation: np.ndarray) -> int:
        nonlocal choice
        choice = int(observation[2] > 0) if length % 3 == 0 else choice
        return (choice, choice, 1 - choice)[length % 3]

    lengths = lengths_of_episodes(act)

    def policy(observations: np.ndarray) -> np.ndarray:
        choices = _lean(observations)
        return np.stack((choices, choices, 1 - choices), axis=1)

    envs = VectorEnv(EnvDescription("CartPole-v1"), num_envs)
    assert evaluate(envs, policy, episodes=7, seed=50, chunked=True).lengths == lengths
    assert len({length % 3 for length in lengths}) > 1
