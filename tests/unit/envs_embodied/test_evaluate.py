"""Evaluation counts each seed once; videos are written or their absence explained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rl_platform.envs.embodied.evaluate import evaluate
from rl_platform.envs.embodied.spaces import EnvDescription
from rl_platform.envs.embodied.vector import VectorEnv
from rl_platform.envs.embodied.video import record_video


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


def test_an_env_without_pictures_gives_a_note(tmp_path: Path) -> None:
    note = record_video(EnvDescription("toy_envs:Toy-v0"), lambda _: np.zeros((1, 2)), tmp_path / "a.mp4", seed=0)
    assert note is not None
    assert "cannot draw" in note


@pytest.mark.parametrize("env_id", ["HalfCheetah-v5", "CartPole-v1"])
def test_a_video_or_the_reason_why_not(env_id: str, tmp_path: Path) -> None:
    def still(observations: np.ndarray) -> np.ndarray:
        return np.zeros((1, 6)) if env_id == "HalfCheetah-v5" else np.zeros(1, np.int64)

    path = tmp_path / "videos" / "episode.mp4"
    note = record_video(EnvDescription(env_id, max_episode_steps=5), still, path, seed=0)
    assert path.exists() == (note is None)
    if note is None:
        assert b"ftyp" in path.read_bytes()[:16]
    else:
        assert env_id in note
    assert list(tmp_path.rglob("*.unfinished.mp4")) == []


def test_a_video_of_chunks(tmp_path: Path) -> None:
    asked = []

    def still(observations: np.ndarray) -> np.ndarray:
        asked.append(observations)
        return np.zeros((1, 3), np.int64)

    path, description = tmp_path / "episode.mp4", EnvDescription("CartPole-v1", max_episode_steps=5)
    note = record_video(description, still, path, seed=0, chunked=True)
    assert path.exists() == (note is None)
    assert len(asked) == (2 if note is None else 0)


def test_a_drawing_library_that_is_not_there_gives_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "no-such-library")
    description = EnvDescription("HalfCheetah-v5", max_episode_steps=5)
    note = record_video(description, lambda _: np.zeros((1, 6)), tmp_path / "a.mp4", seed=0)
    assert note is not None
    assert "no-such-library" in note


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
