"""Environments that a step leaves out: nothing happens to them, and they go on as if there had been no such step."""

from __future__ import annotations

import numpy as np
import pytest

from rl_platform.envs.embodied.descriptions import EnvDescription
from rl_platform.envs.embodied.vector import VectorEnv


def actions(envs: VectorEnv, step: int) -> np.ndarray:
    draw = np.random.default_rng(step)
    if envs.action_space.kind == "discrete":
        return draw.integers(envs.action_space.size, size=envs.num_envs)
    return draw.uniform(-1, 1, (envs.num_envs, envs.action_space.size)).astype(np.float32)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("env_id", ["CartPole-v1", "HalfCheetah-v5", "Ant-v5"])
def test_idle_environments_stand_still(make, env_id: str, num_workers: int) -> None:
    description = EnvDescription(env_id, max_episode_steps=4)
    idle = np.array([True, False, False, True])
    waited, went = (make(description, 4, num_workers) for _ in range(2))
    first = waited.reset(range(4))
    went.reset(range(4))
    for step in range(3):
        waited.send(actions(waited, step), idle=idle)
        actual, expected = waited.receive(), went.step(actions(went, step))
        assert np.array_equal(actual.observations[idle], first[idle])
        assert np.array_equal(actual.observations[~idle], expected.observations[~idle])
        assert not actual.rewards[idle].any()
        assert not actual.ended[idle].any()
    waited_for = waited.step(actions(waited, 0))  # the first step of those that waited, as of those that did not
    went.reset(range(4))
    at_once = went.step(actions(went, 0))
    assert np.array_equal(waited_for.observations[idle], at_once.observations[idle])
    assert np.array_equal(waited_for.rewards[idle], at_once.rewards[idle])
    assert waited_for.truncated.tolist() == [False, True, True, False]
    ended = [waited.step(actions(waited, step)).episodes for step in (1, 2, 3)]
    assert [(episode.env_index, episode.length) for episode in ended[2]] == [(0, 4), (3, 4)]
