"""Environments of other packages: successes they report, observations of several parts, seeds of the older kind."""

from __future__ import annotations

import warnings
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Dict, Discrete, Tuple

from rl_platform.envs.embodied.adapter import flattened
from rl_platform.envs.embodied.descriptions import EnvDescription, make_env
from rl_platform.envs.embodied.env_facts import rendering
from rl_platform.envs.embodied.evaluate import evaluate
from rl_platform.envs.embodied.normalize import ObservationNormalizer
from rl_platform.envs.embodied.spaces import read_spaces
from rl_platform.envs.embodied.success import Success, success_rates
from rl_platform.errors import ConfigError

GOALS, OWN_SEED = "toy_envs:Goals-v0", "toy_envs:OwnSeed-v0"
PUSHED_BEYOND, AT_LAST, NEVER, SILENT = [0, 1, 1, 0, 0], [0, 0, 0, 0, 1], [0] * 5, [None] * 5


@pytest.fixture
def episodes(make):
    """episodes([0, 1, None]): successes of two environments in `count` steps."""

    def run(says: list[Any], num_workers: int = 0, key: str = "success", count: int = 5) -> list[Success | None]:
        envs = make(GOALS, 2, num_workers, {"says": says, "key": key})
        envs.reset([0, 1])
        results = [envs.step(np.zeros((2, 2))) for _ in range(count)]
        return [episode.success for result in results for episode in result.episodes]

    return run


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"render_modes": ["rgb_array"], "render_fps": 12.5}, (("rgb_array",), 12)),
        ({"render_modes": ("human",), "render_fps": np.int64(50)}, (("human",), 50)),
        ({"render.modes": ["human"]}, ((), 30)),
        ({"render_modes": None, "render_fps": None}, ((), 30)),
        ({"render_modes": "rgb_array", "render_fps": "fast"}, ((), 30)),
        ({"render_fps": float("nan")}, ((), 30)),
        ({"render_fps": float("inf")}, ((), 30)),
        ({"render_fps": 0}, ((), 30)),
        (None, ((), 30)),
    ],
)
def test_metadata_that_say_nothing_usable_have_the_usual_values(metadata: object, expected: object) -> None:
    assert rendering(SimpleNamespace(metadata=metadata)) == expected


@pytest.mark.parametrize("space", [Dict({}), Dict({"arm": Tuple([])})])
def test_an_observation_without_parts_is_refused(space: gymnasium.Space) -> None:
    env = gymnasium.Env()
    env.observation_space, env.action_space = space, Discrete(2)
    with pytest.raises(ConfigError, match=r"observation space of Bare cannot be used"):
        read_spaces(flattened(env), "Bare")


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
def test_success_once_and_at_end(episodes, says: list[Any], expected: Any, key: str) -> None:
    assert episodes(says, key=key) == [expected, expected]


@pytest.mark.parametrize(
    ("says", "key", "expected"),
    [
        (PUSHED_BEYOND, "success", Success(once=True, at_end=False)),
        (AT_LAST, "is_success", Success(once=True, at_end=True)),
        (SILENT, "success", None),
    ],
)
def test_successes_come_from_worker_processes_too(episodes, says: list[Any], key: str, expected: Any) -> None:
    assert episodes(says, 2, key) == [expected, expected]


def test_every_episode_begins_without_success(episodes) -> None:
    says = [0, 1, 0, 0, 0]
    assert episodes(says, count=10) == [Success(once=True, at_end=False)] * 4
    assert [tuple(map(type, success)) for success in episodes(says)] == [(bool, bool)] * 2  # fit for a checkpoint


def test_other_things_called_success_are_no_rate(episodes) -> None:
    assert episodes(SILENT, key="success") == episodes(AT_LAST, key="succeeded") == [None, None]


def test_successes_and_joined_observations_continue_after_a_restart(make) -> None:
    first, second = (make(GOALS, 2, 0, {"says": PUSHED_BEYOND}) for _ in range(2))
    first.reset([0, 1])
    for _ in range(3):
        first.step(np.zeros((2, 2)))
    assert np.array_equal(second.load_state_dict(first.state_dict()), first.observations)
    assert np.array_equal(*(envs.step(np.zeros((2, 2))).observations for envs in (first, second)))
    ended = second.step(np.zeros((2, 2))).episodes
    assert [episode.success for episode in ended] == [Success(once=True, at_end=False)] * 2


def test_evaluation_counts_every_seeds_success_once(make) -> None:
    envs = make(GOALS, 2, 0, {"says": AT_LAST})
    result = evaluate(envs, lambda observations: np.zeros((len(observations), 2)), episodes=3, seed=0)
    assert result.successes == [Success(once=True, at_end=True)] * 3


def test_rates_are_of_the_episodes_that_say_it() -> None:
    rates = success_rates([Success(True, False), None, Success(True, True), Success(False, False)], "val")
    assert rates == {"val/success_once": 2 / 3, "val/success_at_end": 1 / 3}
    assert success_rates([None, None], "val") == success_rates([], "val") == {}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dictionary_is_joined_in_alphabetical_order(make, num_workers: int) -> None:
    """One-hot achieved goal, desired goal, observation."""
    envs = make(GOALS, 2, num_workers, {"says": SILENT})
    assert envs.observation_shape == (6,)
    assert envs.reset([0, 1])[1].tolist() == [1, 0, 0, 0.5, 1, 0]
    assert envs.step(np.zeros((2, 2))).observations[0].tolist() == [0, 1, 0, 0.5, 1, 1]


def test_the_parts_of_a_dictionary_are_named_and_its_choices_stay_as_they_are(make) -> None:
    spaces = make(GOALS, 2, 0, {"says": SILENT}).spaces
    assert [(part.name, part.shape, part.size, part.numbers) for part in spaces.parts] == [
        ("achieved_goal", (), 3, False),
        ("desired_goal", (1,), 1, True),
        ("observation", (1, 2), 2, True),
    ]
    normalizer = ObservationNormalizer((6,), 10.0, spaces.normalized)
    seen = np.array([[0, 1, 0, 0.5, 1, 0], [1, 0, 0, 0.5, 3, 2]], np.float32)
    counted = normalizer.count(seen)
    assert np.array_equal(counted[:, :3], seen[:, :3])
    assert counted[:, 3:].round(3).tolist() == [[0, -1, -1], [0, 1, 1]]  # (x - mean) / standard deviation
    assert np.array_equal(normalizer(seen), counted)


def test_the_older_seed_method_is_heard(make) -> None:
    envs = make(OWN_SEED, 2)
    once, again, other = (envs.reset(seeds) for seeds in ([3, 4], [3, 4], [5, 4]))
    assert np.array_equal(once, again)
    assert not np.array_equal(once[0], other[0])
    assert np.array_equal(once[1], other[1])


@pytest.mark.parametrize(("env_id", "size"), [("FrozenLake-v1", 16), ("Taxi-v4", 500), ("Blackjack-v1", 32 + 11 + 2)])
def test_observations_that_are_choices_become_one_hot(make, env_id: str, size: int) -> None:
    envs = make(env_id, 2, 0)
    first = envs.reset([0, 1])
    assert (envs.spaces.observation_shape, envs.spaces.images) == ((size,), False)
    assert set(envs.spaces.normalized) == {False}
    parts = len(envs.spaces.parts)
    assert sorted(np.unique(first)) == [0.0, 1.0]
    np.testing.assert_array_equal(first.sum(axis=1), [parts, parts])


def test_an_environment_whose_package_is_missing_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gymnasium.envs.registration, "registry", {})
    gymnasium.register("Needs-v0", entry_point=lambda: import_module("no_such_package"))
    with pytest.raises(ConfigError) as refused:
        make_env(EnvDescription("Needs-v0"))
    (problem,) = refused.value.problems
    assert (problem.key, problem.hint) == ("env.id", "install the package that contains no_such_package")
    assert "No module named 'no_such_package'" in problem.message


def test_bounds_of_float64_in_spaces_of_float32_warn_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the one-hot task numbers of Meta-World."""

    class Bounded(gymnasium.Env):
        def __init__(self) -> None:
            self.observation_space = gymnasium.spaces.Box(np.zeros(2), np.ones(2), dtype=np.float32)
            self.action_space = gymnasium.spaces.Discrete(2)

    monkeypatch.setattr(gymnasium.envs.registration, "registry", {})
    gymnasium.register("Bounded-v0", entry_point=Bounded)
    with warnings.catch_warnings(record=True) as shown:
        make_env(EnvDescription("Bounded-v0"))
    assert shown == []


def test_an_error_that_names_no_package_gives_no_advice_about_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> None:
        raise ModuleNotFoundError("the simulator's data are missing")

    monkeypatch.setattr(gymnasium.envs.registration, "registry", {})
    gymnasium.register("Raises-v0", entry_point=build)
    with pytest.raises(ConfigError) as refused:
        make_env(EnvDescription("Raises-v0"))
    (problem,) = refused.value.problems
    assert "the simulator's data are missing" in problem.message
    assert "None" not in problem.hint
