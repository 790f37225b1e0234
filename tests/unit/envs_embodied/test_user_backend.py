"""An environment backend of the user: what the platform calls, refuses, saves and restores."""

from __future__ import annotations

import logging
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from rl_platform.envs.embodied.descriptions import EnvDescription
from rl_platform.envs.embodied.user_envs.user_envs import try_backend
from rl_platform.envs.embodied.vector import VectorEnv
from rl_platform.errors import ConfigError, WorkerError

GOOD = """
import numpy as np
from gymnasium.spaces import Box, Discrete
from rl_platform.envs.embodied.user_backend import EnvBackend

class Own(EnvBackend):
    '''Counts the steps of each episode from its seed. Action 3 or 4 is added.'''
    @classmethod
    def spaces(cls, size=1):
        return Box(-9, 9, (1, size)), Discrete(2, start=3)
    def __init__(self, num_envs, size=1):
        self.size, self.count = size, np.zeros(num_envs)
    def observed(self, which):
        return np.tile(self.count[which, None, None], (1, 1, self.size))
    def reset(self, which, seeds):
        self.count[which] = [0 if seed is None else seed for seed in seeds]
        return self.observed(which)
    def step(self, actions, idle):
        self.count[~idle] += actions[~idle]
        self.success = self.count > 20
        none = np.zeros(len(idle), bool)
        return self.observed(slice(None)), self.count * 2, self.count > 30, none
    def save(self, index):
        return float(self.count[index])
    def restore(self, index, state):
        self.count[index] = state
"""


def description(folder: Path, *changes: tuple[str, str], **kwargs: int) -> EnvDescription:
    source = GOOD
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    (folder / "own.py").write_text(source)
    name = f"{folder / 'own.py'}:Own"
    return EnvDescription(name, kwargs, max_episode_steps=4, backend=name)


def test_episodes_end_by_the_backend_and_by_the_limit(tmp_path: Path) -> None:
    envs = VectorEnv(description(tmp_path, size=2), 3)
    assert envs.native
    assert envs.reset([1, 2, 27]).tolist() == [[1, 1], [2, 2], [27, 27]]
    result = envs.step(np.array([0, 1, 1]))  # the environment's choices are 3 and 4
    assert result.observations.tolist() == [[4, 4], [6, 6], [0, 0]]
    assert (result.terminated.tolist(), result.rewards.tolist()) == ([False, False, True], [8, 12, 62])
    assert result.final_observations.tolist() == [[31, 31]]
    assert result.episodes[0].success == (True, True)
    for _ in range(2):
        result = envs.step(np.zeros(3, np.int64))
        assert not result.ended.any()
    result = envs.step(np.zeros(3, np.int64))
    assert result.truncated.tolist() == [True, True, False]
    assert [(each.length, each.success) for each in result.episodes] == [(4, (False, False)), (4, (False, False))]


def test_an_episode_whose_first_observation_is_not_finite_begins_again(tmp_path: Path) -> None:
    lost = ("return self.observed(which)", "return np.where(self.observed(which) == 2, np.nan, self.observed(which))")
    envs = VectorEnv(description(tmp_path, lost), 3, restarts=1)
    first = envs.reset([1, 2, 27])
    assert (first[0, 0], first[2, 0]) == (1, 27)
    assert np.isfinite(first).all()
    assert envs.step(np.zeros(3, np.int64)).failures == 1
    with pytest.raises(
        WorkerError, match=r"environment 2 .* failed in reset:\nthe first observation has nan at \[0, 0\]"
    ):
        envs.reset([1, 3, 2])


def test_idle_environments_keep_their_state(tmp_path: Path) -> None:
    envs = VectorEnv(description(tmp_path), 2)
    envs.reset([1, 2])
    envs.send(np.zeros(2, np.int64), idle=np.array([True, False]))
    result = envs.receive()
    assert (result.observations.tolist(), result.rewards.tolist()) == ([[1], [5]], [0, 10])


def test_a_state_continues_in_another_number_of_processes(tmp_path: Path) -> None:
    envs = VectorEnv(description(tmp_path), 4)
    envs.reset([1, 2, 3, 4])
    envs.step(np.zeros(4, np.int64))
    with closing(VectorEnv(description(tmp_path), 4, num_workers=2)) as others:
        assert others.load_state_dict(envs.state_dict()).tolist() == [[4], [5], [6], [7]]
        for one, other in zip(envs.step(np.ones(4, np.int64)), others.step(np.ones(4, np.int64)), strict=True):
            np.testing.assert_array_equal(one, other)


def test_environments_without_a_saved_state_are_noted_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    without = description(tmp_path, ("return float(self.count[index])", "return None"))
    assert try_backend(without).observation_shape == (1, 1)
    envs = VectorEnv(without, 3)
    envs.reset([1, 2, 3])
    envs.step(np.zeros(3, np.int64))
    with caplog.at_level(logging.WARNING):
        state = envs.state_dict()
    assert (
        "environment 0 and 2 others cannot be saved, a resumed run restarts these episodes: save() of " in caplog.text
    )
    again = VectorEnv(without, 3)
    assert (again.load_state_dict(state) != envs.observations).all()


def test_a_backend_is_tried_without_a_step_after_the_end_of_an_episode(tmp_path: Path) -> None:
    short = (("self.count > 30", "self.count > 9"), ("0 if seed is None", "7 if seed is None"))
    step = "self.count[~idle] += actions[~idle]"
    try_backend(description(tmp_path, *short, (step, f"assert (self.count[~idle] < 10).all(); {step}")))


def test_a_reset_of_some_environments_is_tried_whatever_their_seeds_determine(tmp_path: Path) -> None:
    together = ("class Own(EnvBackend):", "class Own(EnvBackend):\n    episode_seeds = False")
    (tmp_path / "wrong").mkdir()
    try_backend(description(tmp_path, together, ("0 if seed is None else seed", "np.random.rand()")))
    all_of_them = ("return self.observed(which)", "return self.observed(slice(None))")
    with pytest.raises(ConfigError, match=r"reset\(\): observations have type float64 and shape \(2, 1, 1\)"):
        try_backend(description(tmp_path / "wrong", together, all_of_them))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("Box(-9, 9, (1, size))", "Discrete(3)", "observation space of "),
        ("(cls, size=1)", "(cls)", "spaces() with env.kwargs {'size': 1} raised TypeError"),
        ("(self, num_envs, size=1)", "(self, num_envs, *, depth=3)", "cannot be built with env.kwargs {'size': 1}"),
        (
            "return self.observed(which)",
            "return self.observed(which)[0]",
            "reset(): observations have type float64 and",
        ),
        ("return self.observed(which)", "1 / 0", "own.py:17: division by zero"),
        ("return self.observed(which)", "raise SystemExit('a cable broke')", "own.py:17: a cable broke"),
        ("0 if seed is None else seed", "np.random.rand()", "reset() begins two episodes of one seed differently"),
        ("self.count * 2", "(self.count * 2)[:1]", "step(): rewards have type float64 and shape (1,)"),
        ("self.count > 30", "self.count * 1", "step(): the flags terminated have type float64"),
        ("self.success = self.count > 20", "self.success = [0.5, 1]", "the flags success have type float64"),
        ("self.count > 30, none", "self.count > 30", "step() returned no tuple (observations, rewards,"),
        ("self.count[~idle] +=", "missing +=", "step() raised UnboundLocalError"),
        ("return float(self.count[index])", "return self", "save(): the state of environment 0 holds "),
        ("self.count[index] = state", "pass", "the step after restore() differs from the step after save()"),
    ],
)
def test_backends_that_cannot_be_used(old: str, new: str, message: str, tmp_path: Path) -> None:
    wrong = description(tmp_path, (old, new), size=1)
    with pytest.raises(ConfigError) as failed:
        try_backend(wrong)
    (problem,) = failed.value.problems
    assert (failed.value.exit_code, problem.key) == (2, "env.backend")
    assert message in problem.message
    assert problem.allowed
