from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from rl_platform.accel import step_loops
from rl_platform.acceleration import accelerating
from rl_platform.envs.embodied.mujoco.native import find_diverged
from rl_platform.envs.embodied.mujoco.tasks.locomotion import write_observation, write_outcome
from rl_platform.envs.embodied.spaces import EnvDescription
from rl_platform.envs.embodied.vector import VectorEnv, clip_actions

INF, NAN = np.inf, np.nan
both_outcomes = pytest.mark.parametrize("outcome", [write_outcome, step_loops.run_outcome()], ids=["plain", "compiled"])


@pytest.fixture(params=["plain", "compiled"])
def compiled(request: pytest.FixtureRequest) -> bool:
    return request.param == "compiled"


@pytest.mark.parametrize(
    ("qpos", "qvel", "inside"),
    [
        ([5.0, 0.5], [0.0], True),
        ([5.0, 1.0], [0.0], False),  # strictly
        ([5.0, 0.0], [0.0], False),
        ([5.0, NAN], [0.0], False),
        ([NAN, 0.5], [0.0], True),  # nobody bounds it
        ([INF, 0.5], [0.0], True),
        ([5.0, 0.5], [2.5], False),
        ([5.0, 0.5], [-1e300], True),
        ([5.0, 0.5], [NAN], False),
    ],
)
@both_outcomes
def test_every_number_is_compared_to_its_bounds(
    outcome: Callable[..., None], qpos: list[float], qvel: list[float], inside: bool
) -> None:
    ends, rewards = np.empty(2, bool), np.empty(2)
    rows = np.array([[7.0, *qpos], [7.0, 0.0, 0.25]]), np.array([qvel, [2.0]])
    bounds = np.array([-INF, -INF, 0.0, -INF]), np.array([INF, INF, 1.0, 2.5])
    still = np.full(2, 7.0), 0.5, np.zeros((2, 1), np.float32)
    outcome(*still, *rows, *bounds, 1.0, np.float32(1.0), 3.0, True, rewards, ends)
    assert ends.tolist() == [not inside, False]
    assert rewards.tolist() == [3.0 * inside, 3.0]


@both_outcomes
@pytest.mark.parametrize("terminates", [True, False])
def test_rewards_of_running_are_rounded_as_numpy_rounds_them(outcome: Callable[..., None], terminates: bool) -> None:
    numbers = np.random.default_rng(0)
    before, actions = numbers.normal(size=256), numbers.uniform(-1, 1, (256, 6)).astype(np.float32)
    qpos, rewards, ends = numbers.random((256, 2)), np.empty(256), np.empty(256, bool)
    state = qpos, np.empty((256, 0)), np.array([-INF, 0.5]), np.array([INF, INF])
    positions = before.copy()
    outcome(positions, 0.07, actions, *state, 1.3, np.float32(0.1), 0.7, terminates, rewards, ends)
    healthy, speeds = qpos[:, 1] > 0.5, (qpos[:, 0] - before) / 0.07
    assert np.array_equal(positions, qpos[:, 0])
    assert np.array_equal(rewards, 1.3 * speeds + 0.7 * healthy - 0.1 * np.square(actions).sum(axis=1))
    assert np.array_equal(ends, ~healthy & terminates)


def test_observations_of_running_are_positions_and_bounded_velocities(compiled: bool) -> None:
    qpos, qvel = np.array([[1.0, 2.0, NAN], [4.0, 5.0, 6.0]]), np.array([[NAN, 11.0], [-12.0, 3.0]])
    observations = np.empty((2, 4))
    write = step_loops.run_observation() if compiled else write_observation
    write(qpos, qvel, 1, 10.0, observations)
    assert np.array_equal(observations, [[2.0, NAN, NAN, 10.0], [5.0, 6.0, -10.0, 3.0]], equal_nan=True)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_actions_are_clipped_as_numpy_clips_them(dtype: type, compiled: bool) -> None:
    low, high = np.array([-1.0, -INF, 0.5], np.float32), np.array([1.0, INF, 0.75], np.float32)
    actions = np.random.default_rng(0).normal(size=(64, 3)).astype(dtype)
    clipped = np.empty((64, 3), np.float32)
    clip = step_loops.clip_actions() if compiled else clip_actions
    assert clip(actions, low, high, clipped)
    assert np.array_equal(clipped, np.clip(actions, low, high).astype(np.float32))
    for wrong in (NAN, INF, -INF):
        actions[40, 1] = wrong
        assert not clip(actions, low, high, clipped)


def test_divergence_is_that_of_the_plain_function() -> None:
    numbers = np.random.default_rng(0)
    qpos, qvel = numbers.normal(size=(9, 3)), numbers.normal(size=(9, 2))
    lengths, warnings = numbers.integers(0, 5, 9), np.zeros((9, 3), np.int32)
    time = (lengths + 1) * 0.05
    qpos[1, 2], qpos[2, 0], qvel[3, 1], qvel[4, 0] = NAN, -INF, 1e10, -2e10
    warnings[5, 1], time[6], time[7] = 1, 0.0, NAN
    results = np.zeros((2, 9), bool)
    for diverged, function in zip(results, (find_diverged, step_loops.diverged()), strict=True):
        function(qpos, qvel, time, warnings, lengths, 0.05, 1e10, diverged)
    assert results.tolist() == [[False, *[True] * 7, False]] * 2


@pytest.mark.parametrize("env_id", ["Hopper-v5", "HalfCheetah-v5", "InvertedPendulum-v5"])
def test_environments_give_the_same_bits_without_acceleration(env_id: str) -> None:
    def steps(mode: str) -> list[object]:
        with accelerating(mode):
            envs = VectorEnv(EnvDescription(env_id, max_episode_steps=9), 6)
        assert envs.native
        drawn, results = np.random.default_rng(0), [envs.reset(range(6)).tolist()]
        for step in range(25):
            actions = drawn.uniform(-2, 2, (6, envs.action_space.size)).astype(np.float32)
            envs.send(actions, idle=np.arange(6) == step % 6)
            result = envs.receive()
            results.append([array.tolist() if isinstance(array, np.ndarray) else array for array in result])
        envs.close()
        return results

    assert steps("auto") == steps("off")
