from __future__ import annotations

import numpy as np
import pytest

from rl_platform.envs.embodied.step_loops import clip_actions, run_outcome, within_bounds

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
    found = np.empty(2, bool)
    rows = np.array([qpos, [0.0, 0.25]]), np.array([qvel, [2.0]])
    within_bounds()(*rows, np.array([-INF, 0.0, -INF]), np.array([INF, 1.0, 2.5]), found)
    assert found.tolist() == [inside, True]


@pytest.mark.parametrize("terminates", [True, False])
def test_rewards_of_running_are_rounded_as_numpy_rounds_them(terminates: bool) -> None:
    numbers = np.random.default_rng(0)
    speeds, costs = numbers.normal(size=256), 0.001 * numbers.random(256).astype(np.float32)
    healthy, rewards, ends = numbers.random(256) < 0.5, np.empty(256), np.empty(256, bool)
    run_outcome()(speeds, costs, healthy, 1.3, 0.7, terminates, rewards, ends)
    assert np.array_equal(rewards, 1.3 * speeds + 0.7 * healthy - costs)
    assert np.array_equal(ends, ~healthy & terminates)


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
