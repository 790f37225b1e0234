"""Results of an environment that NumPy would convert silently are refused with their value."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from rl_platform.envs.embodied.descriptions import EnvDescription
from rl_platform.envs.embodied.step_results import reward_of
from rl_platform.envs.embodied.success import Success
from rl_platform.envs.embodied.vector import VectorEnv
from rl_platform.errors import ConfigError, WorkerError

OWN = """
import sys
import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete


class Own(gymnasium.Env):
    action_space = Discrete(2)

    def __init__(self, space="Box(-1, 1, (3,))", seen="np.zeros(3)", given="1.0, False, False, {}", at_reset=False):
        self.observation_space, self.seen = eval(space), eval(seen)
        self.given, self.at_reset = eval(given), at_reset

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return (self.seen if self.at_reset else self.observation_space.sample()), {}

    def step(self, action):
        return self.seen, *self.given


class Older(Own):
    def step(self, action):
        return self.seen, 1.0, False, {}


class NoResult(Own):
    def step(self, action):
        pass


class OlderReset(Own):
    def reset(self):
        return self.seen


def leaves():
    sys.exit("no licence for this simulator")
"""
IMAGE, PARTS = "Box(0, 255, (40, 40, 3), np.uint8)", "Dict(a=Box(-1, 1, (2,)), b=Box(-1, 1, (3,)))"


def run(folder: Path, kind: str = "Own", **given: object) -> VectorEnv:
    (folder / "own.py").write_text(OWN)
    with closing(VectorEnv(EnvDescription(f"own.py:{kind}", dict(given), max_episode_steps=2), 1)) as envs:
        envs.reset([0])
        envs.step(np.zeros(1, np.int64))
    return envs


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("None, False, False, {}", r"step\(\) returned None \(type NoneType\) as the reward; it must be one number"),
        ("'1', False, False, {}", "'1' .* as the reward"),
        ("np.ones(1), False, False, {}", r"array\(\[1\.\]\) \(type ndarray, shape \(1,\)\) as the reward"),
        ("1.0, {}, False, False", r"\{\} \(type dict\) as terminated; it must be True or False. step\(\) returns"),
        ("1.0, False, 'False', {}", "'False' .* as truncated"),
        ("1.0, 0.5, False, {}", "0.5 .* as terminated"),
    ],
)
def test_rewards_and_ends_of_other_types_are_refused(folder: Path, given: str, text: str) -> None:
    with pytest.raises(WorkerError, match=rf"failed in step:\n.*{text}"):
        run(folder, given=given)


def test_scalars_of_all_kinds_are_rewards_and_ends(folder: Path) -> None:
    run(folder, given="np.float32(1), np.True_, 0, {}")
    run(folder, given="np.array(1), np.array(True), 1.0, {}")
    assert reward_of(np.int64(3)) == 3.0


@pytest.mark.parametrize("at_reset", [True, False])
@pytest.mark.parametrize(
    ("space", "seen", "text"),
    [
        (IMAGE, "np.full((40, 40, 3), 0.5)", r"type float64 and values from 0\.5 to 0\.5.*uint8"),
        (IMAGE, "np.full((40, 40, 3), 300)", "from 300 to 300"),
        (PARTS, "dict(a=np.zeros(3), b=np.zeros(2))", r"part a of the observation has shape \(3,\).*\(2,\)"),
        (PARTS, "dict(a=np.zeros(2))", "no part 'b'"),
        ("Dict(a=Box(0, 9, (2,), np.int32))", "dict(a=np.array([0.5, 1]))", "type float64 and values from 0.5 to 1"),
        ("Discrete(3)", "-1", "observation is -1 .*; its space has whole numbers from 0 to 2"),
        ("Discrete(3, start=5)", "4", "from 5 to 7"),
        ("MultiDiscrete([3, 4])", "np.array([3, 0])", r"from \[0, 0\] to \[2, 3\]"),
        ("MultiBinary(2)", "np.array([5, 0])", r"from \[0, 0\] to \[1, 1\]"),
    ],
)
def test_observations_beyond_their_space_are_refused(
    folder: Path, space: str, seen: str, text: str, at_reset: bool
) -> None:
    with pytest.raises(WorkerError, match=rf"(?s)failed in {'reset' if at_reset else 'step'}:\n.*{text}"):
        run(folder, space=space, seen=seen, at_reset=at_reset)


@pytest.mark.parametrize(
    ("space", "seen"),
    [
        (IMAGE, "np.full((40, 40, 3), 255)"),
        (PARTS, "dict(a=np.zeros((2, 1)), b=[0, 0, 0])"),
        ("Discrete(3)", "np.int8(2)"),
        ("Discrete(2)", "True"),
        ("Dict(a=Box(0, 255, (2,), np.uint8))", "dict(a=np.array([1.0, 2.0]))"),
    ],
)
def test_other_types_of_equal_numbers_are_taken(folder: Path, space: str, seen: str) -> None:
    run(folder, space=space, seen=seen, at_reset=True)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("Older", r"step\(\) returns \(observation, reward"),
        ("NoResult", r"step\(\) returns \(observation, reward"),
        ("OlderReset", "seed=None, options=None"),
    ],
)
def test_environments_of_another_interface_get_that_of_gymnasium(folder: Path, kind: str, text: str) -> None:
    with pytest.raises(WorkerError, match=rf"In Gymnasium .*{text}"):
        run(folder, kind)


def test_an_array_of_one_flag_is_a_success(folder: Path) -> None:
    (folder / "own.py").write_text(OWN)
    given = "1.0, False, False, {'success': np.array([True])}"
    envs = VectorEnv(EnvDescription("own.py:Own", {"given": given}, max_episode_steps=1), 1)
    envs.reset([0])
    assert envs.step(np.zeros(1, np.int64)).episodes[0].success == Success(once=True, at_end=True)
    envs.close()


def test_an_environment_that_leaves_the_program_is_a_problem(folder: Path) -> None:
    with pytest.raises(ConfigError, match="no licence for this simulator"):
        run(folder, "leaves")


def test_spaces_without_numbers_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="at least one number"):
        run(folder, space="Box(0, 1, (0,))")


def test_classes_that_are_no_environments_are_named(folder: Path) -> None:
    (folder / "own.py").write_text("class Own:\n    pass\n")
    with pytest.raises(ConfigError) as caught:
        VectorEnv(EnvDescription("own.py:Own"), 1)
    (problem,) = caught.value.problems
    assert (problem.key, problem.hint) == ("env.id", "derive the class from gymnasium.Env")


def test_code_that_returns_one_environment_again_is_refused(folder: Path) -> None:
    """All environments of a run would be one, and an evaluation would end the episodes of the training."""
    (folder / "own.py").write_text(OWN + "\n\nONE = Own()\n\n\ndef same():\n    return ONE\n")
    with pytest.raises(ConfigError, match="returns the same environment again"):
        VectorEnv(EnvDescription("own.py:same", max_episode_steps=2), 2)
