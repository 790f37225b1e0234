"""Running statistics against the statistics of everything at once."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest

from rl_platform.acceleration import accelerating
from rl_platform.envs.embodied.normalize import ObservationNormalizer, RewardNormalizer, RunningMoments


@pytest.fixture(autouse=True, params=["auto", "off"])
def accelerate(request: pytest.FixtureRequest) -> Iterator[None]:
    with accelerating(request.param):
        yield


def test_moments_of_batches_are_those_of_the_whole() -> None:
    data = np.random.default_rng(0).normal(1e4, 3.0, (600, 5))
    moments = RunningMoments((5,))
    for batch in np.split(data, [1, 3, 70, 71, 400]):
        moments.update(batch)
    assert moments.count == 600
    np.testing.assert_allclose(moments.mean, data.mean(0), rtol=1e-12)
    np.testing.assert_allclose(moments.variance, data.var(0), rtol=1e-9)


def test_observations_are_whitened_clipped_and_counted_only_by_update() -> None:
    data = np.random.default_rng(1).normal(5.0, 2.0, (5000, 3)).astype(np.float32)
    normalizer = ObservationNormalizer((3,), clip=2.5)
    normalizer.update(data)
    before = normalizer.state_dict()
    out = normalizer(data)
    assert out.dtype == np.float32
    assert abs(out.mean()) < 0.02
    assert normalizer(np.full((1, 3), 1e6)).max() == 2.5
    assert normalizer(np.full((1, 3), -1e6)).min() == -2.5
    assert normalizer.state_dict() == before


def test_counting_gives_what_update_and_normalising_give() -> None:
    data = np.random.default_rng(3).normal(2.0, 3.0, (7, 16, 5)).astype(np.float32)
    at_once, apart = (ObservationNormalizer((5,), clip=1.5) for _ in range(2))
    for batch in data:
        normalized = at_once.count(batch)
        apart.update(batch)
        assert normalized.dtype == np.float32
        assert np.array_equal(normalized, apart(batch))
    assert at_once.state_dict() == apart.state_dict()


def test_rewards_are_divided_by_the_deviation_of_the_discounted_return() -> None:
    # hand-computed, gamma 0.5: returns 2, then 2 * 0.5 + 4 = 5; variance of (2, 5) = 2.25
    normalizer = RewardNormalizer(1, gamma=0.5, clip=100.0)
    no, yes = np.array([False]), np.array([True])
    normalizer(np.array([2.0]), no)
    assert np.isclose(normalizer(np.array([4.0]), yes)[0], 4.0 / 1.5)
    # the episode ended: the return starts again at 1, not at 2.5 + 1; variance of (2, 5, 1) = 26 / 9
    assert np.isclose(normalizer(np.array([1.0]), no)[0], 1.0 / np.sqrt(26 / 9))


def test_rewards_are_clipped_and_their_mean_is_kept() -> None:
    normalizer = RewardNormalizer(2, gamma=0.99, clip=5.0)
    out = normalizer(np.array([-1e6, 1e6]), np.zeros(2, bool))
    assert np.abs(out).max() <= 5.0
    for _ in range(50):
        out = normalizer(np.array([3.0, 3.0]), np.ones(2, bool))
    assert (out > 0).all()


def test_states_continue_exactly_after_a_trip_through_text() -> None:
    rng = np.random.default_rng(2)
    observations, rewards = ObservationNormalizer((4,), 10.0), RewardNormalizer(3, 0.9, 10.0)
    observations.update(rng.normal(size=(7, 4)))
    rewards(rng.normal(size=3), np.array([True, False, False]))
    copies = ObservationNormalizer((4,), 10.0), RewardNormalizer(3, 0.9, 10.0)
    for copy, original in zip(copies, (observations, rewards), strict=True):
        copy.load_state_dict(json.loads(json.dumps(original.state_dict())))
    batch, step = rng.normal(size=(5, 4)), rng.normal(size=3)
    for normalizer in (observations, copies[0]):
        normalizer.update(batch)
    assert np.array_equal(observations(batch), copies[0](batch))
    assert np.array_equal(rewards(step, np.zeros(3, bool)), copies[1](step, np.zeros(3, bool)))
