"""An environment of which less is seen: what is left, and what cannot be hidden."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest

from rl_platform.envs.embodied.descriptions import EnvDescription
from rl_platform.envs.embodied.vector import VectorEnv
from rl_platform.errors import ConfigError

MASKED = "rl_platform.envs.embodied.masked:Masked-v0"


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_rest_is_as_it_was(num_workers: int) -> None:
    masked = VectorEnv(EnvDescription(MASKED, {"env_id": "CartPole-v1", "hide": [3, 1]}), 1, num_workers)
    plain = VectorEnv(EnvDescription("CartPole-v1"), 1)
    assert masked.observation_shape == (2,)
    actual, expected = masked.reset([5]), plain.reset([5])
    ended = 0
    for step in range(60):
        assert np.array_equal(actual, expected[:, [0, 2]])
        if step == 30:
            masked.load_state_dict(masked.state_dict())
        one, other = masked.step(np.array([step % 2])), plain.step(np.array([step % 2]))
        assert one.rewards == other.rewards
        assert one.terminated == other.terminated
        assert np.array_equal(one.final_observations, other.final_observations[:, [0, 2]])
        actual, expected, ended = one.observations, other.observations, ended + int(one.ended[0])
    assert ended > 0
    masked.close()
    plain.close()


def test_time_limits_and_arguments_are_those_of_the_environment() -> None:
    env = gymnasium.make(MASKED, env_id="Pendulum-v1", hide=[2], g=5.0)
    assert env.unwrapped.g == 5.0
    env.reset(seed=0)
    assert [env.step(np.zeros(1))[3] for _ in range(200)] == [False] * 199 + [True]


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"env_id": "CartPole-v1", "hide": [4, 1]}, r"hide: \[4, 1\], but observations have no numbers \[4\]"),
        ({"env_id": "CartPole-v1", "hide": [0, 1, 2, 3]}, "observations have nothing else"),
        ({"env_id": "FrozenLake-v1", "hide": [0]}, "hide takes places in a flat vector"),
        ({"env_id": "CartPol-v1", "hide": [0]}, "CartPole"),
        ({"hide": [0]}, "env_id"),
    ],
)
def test_what_cannot_be_hidden(kwargs: dict, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        VectorEnv(EnvDescription(MASKED, kwargs), 2)
