from __future__ import annotations

import numpy as np
import pytest

from rl_platform.accel.step_loops import clip_actions, run_observation, run_outcome

INF, NAN = np.inf, np.nan


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
def test_every_number_is_compared_to_its_bounds(qpos: list[float], qvel: list[float], inside: bool) -> None:
    ends, rewards = np.empty(2, bool), np.empty(2)
    rows = np.array([[7.0, *qpos], [7.0, 0.0, 0.25]]), np.array([qvel, [2.0]])
    bounds = np.array([-INF, -INF, 0.0, -INF]), np.array([INF, INF, 1.0, 2.5])
    still = np.full(2, 7.0), 0.5, np.zeros((2, 1), np.float32)
    run_outcome()(*still, *rows, *bounds, 1.0, np.float32(1.0), 3.0, True, rewards, ends)
    assert ends.tolist() == [not inside, False]
    assert rewards.tolist() == [3.0 * inside, 3.0]


@pytest.mark.parametrize("terminates", [True, False])
def test_rewards_of_running_are_rounded_as_numpy_rounds_them(terminates: bool) -> None:
    numbers = np.random.default_rng(0)
    before, actions = numbers.normal(size=256), numbers.uniform(-1, 1, (256, 6)).astype(np.float32)
    qpos, rewards, ends = numbers.random((256, 2)), np.empty(256), np.empty(256, bool)
    state = qpos, np.empty((256, 0)), np.array([-INF, 0.5]), np.array([INF, INF])
    positions = before.copy()
    run_outcome()(positions, 0.07, actions, *state, 1.3, np.float32(0.1), 0.7, terminates, rewards, ends)
    healthy, speeds = qpos[:, 1] > 0.5, (qpos[:, 0] - before) / 0.07
    assert np.array_equal(positions, qpos[:, 0])
    assert np.array_equal(rewards, 1.3 * speeds + 0.7 * healthy - 0.1 * np.square(actions).sum(axis=1))
    assert np.array_equal(ends, ~healthy & terminates)


def test_observations_of_running_are_positions_and_bounded_velocities() -> None:
    qpos, qvel = np.array([[1.0, 2.0, NAN], [4.0, 5.0, 6.0]]), np.array([[NAN, 11.0], [-12.0, 3.0]])
    observations = np.empty((2, 4))
    run_observation()(qpos, qvel, 1, 10.0, observations)
    assert np.array_equal(observations, [[2.0, NAN, NAN, 10.0], [5.0, 6.0, -10.0, 3.0]], equal_nan=True)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_actions_are_clipped_as_numpy_clips_them(dtype: type) -> None:
    low, high = np.array([-1.0, -INF, 0.5], np.float32), np.array([1.0, INF, 0.75], np.float32)
    actions = np.random.default_rng(0).normal(size=(64, 3)).astype(dtype)
    clipped = np.empty((64, 3), np.float32)
    assert clip_actions()(actions, low, high, clipped)
    assert np.array_equal(clipped, np.clip(actions, low, high).astype(np.float32))
    for wrong in (NAN, INF, -INF):
        actions[40, 1] = wrong
        assert not clip_actions()(actions, low, high, clipped)
