"""Environments of other packages: successes they report, observations of several parts, seeds of the older kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rl_platform.envs.embodied.evaluate import evaluate
from rl_platform.envs.embodied.spaces import EnvDescription
from rl_platform.envs.embodied.success import Success, success_rates
from rl_platform.envs.embodied.vector import VectorEnv

GOALS, OWN_SEED = "toy_envs:Goals-v0", "toy_envs:OwnSeed-v0"
PUSHED_BEYOND, AT_LAST, NEVER, SILENT = [0, 1, 1, 0, 0], [0, 0, 0, 0, 1], [0] * 5, [None] * 5


def episodes(says: list[Any], num_workers: int = 0, key: str = "success", count: int = 5) -> list[Success | None]:
    """Successes of two environments in `count` steps."""
    envs = VectorEnv(EnvDescription(GOALS, {"says": says, "key": key}), 2, num_workers)
    try:
        envs.reset([0, 1])
        results = [envs.step(np.zeros((2, 2))) for _ in range(count)]
    finally:
        envs.close()
    return [episode.success for result in results for episode in result.episodes]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("key", ["success", "is_success"])
@pytest.mark.parametrize(
    ("says", "expected"),
    [
        (PUSHED_BEYOND, Success(once=True, at_end=False)),
        (AT_LAST, Success(once=True, at_end=True)),
        (NEVER, Success(once=False, at_end=False)),
        ([None, 1, None, None, None], Success(once=True, at_end=False)),
        ([None] * 4 + [1], Success(once=True, at_end=True)),
        (SILENT, None),
    ],
)
def test_success_once_and_at_end(says: list[Any], expected: Success | None, key: str, num_workers: int) -> None:
    assert episodes(says, num_workers, key) == [expected, expected]


def test_every_episode_begins_without_success() -> None:
    says = [0, 1, 0, 0, 0]
    assert episodes(says, count=10) == [Success(once=True, at_end=False)] * 4
    assert [tuple(map(type, success)) for success in episodes(says)] == [(bool, bool)] * 2  # fit for a checkpoint


def test_other_things_called_success_are_no_rate() -> None:
    assert episodes(SILENT, key="success") == episodes(AT_LAST, key="succeeded") == [None, None]


def test_a_success_is_remembered_across_a_restart() -> None:
    description = EnvDescription(GOALS, {"says": PUSHED_BEYOND})
    first, second = VectorEnv(description, 2), VectorEnv(description, 2)
    try:
        first.reset([0, 1])
        for _ in range(3):
            first.step(np.zeros((2, 2)))
        second.load_state_dict(first.state_dict())
        second.step(np.zeros((2, 2)))
        ended = second.step(np.zeros((2, 2))).episodes
    finally:
        first.close()
        second.close()
    assert [episode.success for episode in ended] == [Success(once=True, at_end=False)] * 2


def test_evaluation_counts_every_seeds_success_once() -> None:
    envs = VectorEnv(EnvDescription(GOALS, {"says": AT_LAST}), 2)
    try:
        result = evaluate(envs, lambda observations: np.zeros((len(observations), 2)), episodes=3, seed=0)
    finally:
        envs.close()
    assert result.successes == [Success(once=True, at_end=True)] * 3


def test_rates_are_of_the_episodes_that_say_it() -> None:
    rates = success_rates([Success(True, False), None, Success(True, True), Success(False, False)], "val")
    assert rates == {"val/success_once": 2 / 3, "val/success_at_end": 1 / 3}
    assert success_rates([None, None], "val") == success_rates([], "val") == {}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dictionary_is_joined_in_alphabetical_order(num_workers: int) -> None:
    envs = VectorEnv(EnvDescription(GOALS, {"says": SILENT}), 2, num_workers)
    try:
        assert envs.observation_shape == (6,)
        assert envs.reset([0, 1])[1].tolist() == [
            1,
            0,
            0,
            0.5,
            1,
            0,
        ]  # one-hot achieved goal, desired goal, observation
        assert envs.step(np.zeros((2, 2))).observations[0].tolist() == [0, 1, 0, 0.5, 1, 1]
    finally:
        envs.close()


def test_joined_observations_continue_after_a_restart() -> None:
    description = EnvDescription(GOALS, {"says": SILENT})
    first, second = VectorEnv(description, 2), VectorEnv(description, 2)
    try:
        first.reset([0, 1])
        first.step(np.zeros((2, 2)))
        assert np.array_equal(second.load_state_dict(first.state_dict()), first.observations)
        results = [envs.step(np.zeros((2, 2))).observations for envs in (first, second)]
    finally:
        first.close()
        second.close()
    assert np.array_equal(*results)


def test_the_older_seed_method_is_heard() -> None:
    envs = VectorEnv(EnvDescription(OWN_SEED), 2)
    try:
        once, again, other = (envs.reset(seeds) for seeds in ([3, 4], [3, 4], [5, 4]))
    finally:
        envs.close()
    assert np.array_equal(once, again)
    assert not np.array_equal(once[0], other[0])
    assert np.array_equal(once[1], other[1])
