"""Natively stepped environments do what Gymnasium's `step` does."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import TransformAction

from rl_platform.envs.embodied.native import NativeStepper
from rl_platform.envs.embodied.spaces import EnvDescription, find_spec, make_env
from rl_platform.envs.embodied.vector import VectorEnv

NUM_ENVS = 3
CASES = [
    ("HalfCheetah-v5", {}),
    ("HalfCheetah-v5", {"exclude_current_positions_from_observation": False, "ctrl_cost_weight": 0.3, "frame_skip": 2}),
]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("env_id", "kwargs"), CASES)
def test_a_thousand_steps_with_resets_are_gymnasiums(env_id: str, kwargs: dict, threads: int) -> None:
    description = EnvDescription(env_id, kwargs, max_episode_steps=300)
    theirs = [make_env(description, find_spec(description)) for _ in range(NUM_ENVS)]
    ours = VectorEnv(description, NUM_ENVS)
    assert isinstance(ours._blocks[0]._native, NativeStepper)
    ours._blocks[0]._native = NativeStepper(ours._blocks[0]._envs, threads)
    observations = ours.reset(range(NUM_ENVS))
    for i, env in enumerate(theirs):
        np.testing.assert_array_equal(observations[i], env.reset(seed=i)[0].astype(np.float32))
    rng = np.random.default_rng(0)
    ends = 0
    for _ in range(1000):
        actions = rng.uniform(-1, 1, (NUM_ENVS, ours.action_space.size)).astype(np.float32)
        result = ours.step(actions)
        for i, env in enumerate(theirs):
            observation, reward, terminated, truncated, _ = env.step(actions[i])
            assert result.rewards[i] == pytest.approx(float(reward), abs=1e-9)
            assert (result.terminated[i], result.truncated[i]) == (terminated, truncated)
            if terminated or truncated:
                ends += 1
                position = int(result.ended[:i].sum())
                np.testing.assert_array_equal(result.final_observations[position], observation.astype(np.float32))
                observation, _ = env.reset()
            np.testing.assert_array_equal(result.observations[i], observation.astype(np.float32))
    assert ends == 9
    ours.close()


def test_unknown_wrappers_and_kinds_are_left_to_gymnasium() -> None:
    halved = TransformAction(gymnasium.make("HalfCheetah-v5"), lambda action: action / 2, None)
    assert NativeStepper.of([halved], 1) is None
    assert NativeStepper.of([gymnasium.make("CartPole-v1")], 1) is None
    assert NativeStepper.of([gymnasium.make("HalfCheetah-v5", render_mode="rgb_array")], 1) is None
