"""A stopped and resumed environment continues bit for bit."""

from __future__ import annotations

import io
import logging
import os
import pickle
import zlib
from collections import Counter, defaultdict
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.wrappers import (
    DtypeObservation,
    FlattenObservation,
    NormalizeObservation,
    NormalizeReward,
    RescaleAction,
    TimeAwareObservation,
    TransformReward,
)

from rl_platform.envs.embodied.block import CannotSave
from rl_platform.envs.embodied.descriptions import EnvDescription
from rl_platform.envs.embodied.mujoco.tasks import TASKS
from rl_platform.envs.embodied.saved_states.env_state import NATIVE, refuse_code, restore, save
from rl_platform.envs.embodied.vector import StepResult, VectorEnv
from rl_platform.errors import CheckpointError

NUM_ENVS = 3


def _actions(envs: VectorEnv, steps: int, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    if envs.action_space.kind == "discrete":
        return list(rng.integers(0, envs.action_space.size, (steps, NUM_ENVS)))
    return list(rng.normal(size=(steps, NUM_ENVS, envs.action_space.size)))


def _through_a_file(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _assert_equal(ours: StepResult, theirs: StepResult) -> None:
    for name in ("observations", "rewards", "terminated", "truncated", "ended", "invalid", "final_observations"):
        assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name
    assert ours.episodes == theirs.episodes


LONG = {"HalfCheetah-v5": 40, "CartPole-v1": None, "Pendulum-v1": 40, "Humanoid-v5": None}
PROCESSES = [((0, 0), "local"), ((2, 2), "workers"), ((0, 2), "local to workers")]
RESTARTS = [
    pytest.param(EnvDescription(env_id, max_episode_steps=limit), *workers, id=f"{env_id}, {name}")
    for env_id, limit in LONG.items()
    for workers, name in PROCESSES
    if env_id in ("HalfCheetah-v5", "CartPole-v1") or name == "local"  # workers pass on what the others hold
]
RESTARTS += [
    pytest.param(EnvDescription(f"{task.__name__}-v5", max_episode_steps=40), 0, 0, id=f"{task.__name__}, short")
    for task in TASKS.values()
]
STEPPED_BY_GYMNASIUM = EnvDescription("Ant-v5", {"render_mode": "rgb_array"}, max_episode_steps=40)


@pytest.mark.parametrize(("description", "before", "after"), [*RESTARTS, (STEPPED_BY_GYMNASIUM, 0, 0)])
def test_continues_bit_for_bit(make, description: EnvDescription, before: int, after: int) -> None:
    """Environments with `after` workers go on from the state of those with `before`, and equal those never stopped."""
    first, second = make(description, NUM_ENVS, before), make(description, NUM_ENVS, after)
    first.reset([5, 6, 7])
    for actions in _actions(first, 55, seed=0):
        first.step(actions)
    state = _through_a_file(first.state_dict())
    second.reset([90, 91, 92])  # somewhere else first
    for actions in _actions(second, 7, seed=1):
        second.step(actions)
    assert np.array_equal(second.load_state_dict(state), first.observations)
    ends = 0
    for actions in _actions(first, 90, seed=2):
        expected = first.step(actions)
        _assert_equal(second.step(actions), expected)
        ends += int(expected.ended.sum())
    assert ends >= NUM_ENVS, "resets must be part of what is compared"


def test_saving_changes_nothing() -> None:
    saved, plain = (VectorEnv(EnvDescription("HalfCheetah-v5"), NUM_ENVS) for _ in range(2))
    saved.reset(range(3))
    plain.reset(range(3))
    for actions in _actions(saved, 10, seed=0):
        saved.state_dict()
        _assert_equal(saved.step(actions), plain.step(actions))


@pytest.mark.parametrize("inner", ["CartPole-v1", "Ant-v5", "a deque"])
def test_what_an_environment_holds_as_env_is_saved(make, inner: str) -> None:
    """Adapters often hold a simulator or another environment in an attribute of that name."""
    description = EnvDescription("toy_envs:Holder-v0", {"inner": inner}, max_episode_steps=40)
    saved, resumed = make(description, NUM_ENVS), make(description, NUM_ENVS)
    saved.reset([5, 6, 7])
    for actions in _actions(saved, 3, seed=0):
        saved.step(actions)
    state = saved.state_dict()
    refuse_code(state["envs"])
    resumed.reset([90, 91, 92])
    resumed.step(_actions(resumed, 1, seed=1)[0])
    resumed.load_state_dict(state)
    for actions in _actions(saved, 5, seed=2):
        _assert_equal(saved.step(actions), resumed.step(actions))


@pytest.mark.parametrize("memory", ["array", "parts", "mujoco"])
def test_arrays_that_share_memory_share_it_after_a_restore(make, memory: str) -> None:
    """The observation is that of the state; steps change its views. Attributes in __slots__ are saved too."""
    description = EnvDescription("toy_envs:Views-v0", {"memory": memory}, max_episode_steps=40)
    saved = make(description, NUM_ENVS)
    saved.reset([5, 6, 7])
    for seed in range(2):  # the second time of a restored environment
        for actions in _actions(saved, 3, seed):
            saved.step(actions)
        state = saved.state_dict()
        refuse_code(state["envs"])
        resumed = make(description, NUM_ENVS)
        resumed.reset([90, 91, 92])
        resumed.load_state_dict(state)
        for actions in _actions(saved, 5, seed=2):
            _assert_equal(resumed.step(actions), saved.step(actions))
        saved = resumed


def test_a_mirrored_view_is_one_after_a_restore() -> None:
    saved, resumed = (gymnasium.make("CartPole-v1") for _ in range(2))
    saved.unwrapped.table = np.arange(4.0)
    saved.unwrapped.mirror = saved.unwrapped.table[::-1]
    restore(resumed, save(saved))
    resumed.unwrapped.table[0] = 9.0
    assert resumed.unwrapped.mirror.tolist() == [3.0, 2.0, 1.0, 9.0]


@pytest.mark.timeout(60)  # comparing each view with each other one takes minutes
def test_an_environment_that_holds_many_views_of_one_array_is_saved() -> None:
    saved, resumed = (gymnasium.make("CartPole-v1") for _ in range(2))
    saved.unwrapped.rows = [*np.arange(60_000.0).reshape(30_000, 2)]
    restore(resumed, save(saved))
    assert np.array_equal(resumed.unwrapped.rows, saved.unwrapped.rows)


def test_an_env_that_cannot_be_saved_says_so_and_restarts(caplog: pytest.LogCaptureFixture) -> None:
    description = EnvDescription("toy_envs:Unsavable-v0")
    envs, resumed = VectorEnv(description, NUM_ENVS), VectorEnv(description, NUM_ENVS)
    envs.reset(range(3))
    envs.step(np.zeros((NUM_ENVS, 2)))
    with caplog.at_level(logging.WARNING):
        state = envs.state_dict()
        envs.state_dict()
    assert caplog.text.count("environment 0 and 2 others cannot be saved") == 1
    assert "generator" in caplog.text
    assert resumed.load_state_dict(state)[:, 1].tolist() == [0, 0, 0]


def test_a_state_of_other_wrappers_is_refused() -> None:
    plain = gymnasium.make("CartPole-v1")
    plain.reset(seed=1)
    wrapped = gymnasium.wrappers.RecordEpisodeStatistics(plain)
    for saved, other in ((plain, wrapped), (wrapped, plain)):
        with pytest.raises(CheckpointError, match="with other wrappers"):
            restore(other, save(saved))


WRAPPERS = {
    "RescaleAction": lambda env: RescaleAction(env, np.float32(-9), np.float32(9)),
    "FlattenObservation": FlattenObservation,
    "TimeAwareObservation": TimeAwareObservation,
    "DtypeObservation": lambda env: DtypeObservation(env, np.float32),
    "NormalizeObservation": NormalizeObservation,
    "NormalizeReward": NormalizeReward,
    "a function": lambda env: TransformReward(env, lambda reward: 2 * reward),
    "a ufunc": lambda env: TransformReward(env, np.tanh),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_of_gymnasium_continue_exactly_and_hold_no_code(name: str) -> None:
    saved, resumed = (WRAPPERS[name](gymnasium.make("Pendulum-v1")) for _ in range(2))
    actions = np.random.default_rng(0).uniform(-2, 2, (8, 1)).astype(np.float32)
    for env, seed in ((saved, 1), (resumed, 2)):
        env.reset(seed=seed)
        for action in actions[: 2 + seed]:
            env.step(action)
    state = save(saved)
    refuse_code([pickle.dumps((state, 0.0, 0))])
    restore(resumed, state)
    for action in actions:
        for ours, theirs in zip(saved.step(action)[:4], resumed.step(action)[:4], strict=True):
            np.testing.assert_array_equal(ours, theirs)


class Commanded(gymnasium.Env):
    """Holds its own methods in a table, as many games do."""

    observation_space, action_space = Box(-9, 9, (1,)), Discrete(2)

    def __init__(self, commands: tuple[str, ...] = ("left", "right")) -> None:
        self.commands = {name: getattr(self, name) for name in commands}
        self.place, self.latest = 0, None

    def left(self) -> None:
        self.place -= 1

    def right(self) -> None:
        self.place += 1


def test_methods_of_the_environment_itself_are_saved_by_name_and_hold_no_code() -> None:
    saved, resumed = (gymnasium.wrappers.OrderEnforcing(Commanded()) for _ in range(2))
    own = saved.unwrapped
    own.latest = own.commands["right"]
    own.latest()
    state = save(saved)
    refuse_code([pickle.dumps((state, 0.0, 0))])
    restore(resumed, state)
    other = resumed.unwrapped
    other.latest()
    other.commands["right"]()
    assert (own.place, other.place) == (1, 3)
    own.right = own.left  # no longer the method of that name
    own.latest = own.right
    restore(resumed, save(saved))
    other.latest()
    assert (own.place, other.place) == (1, 0)


def test_a_method_that_is_gone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    state = save(Commanded())
    other = Commanded(())
    monkeypatch.delattr(Commanded, "left")
    with pytest.raises(CheckpointError, match=r"no method left\(\) any more"):
        restore(other, state)


def test_a_state_cannot_call_a_method() -> None:
    """pickle would call what a state names as a function; the check refuses it before that."""

    class Calls:
        def __reduce__(self) -> tuple[object, tuple[()]]:
            return own.right, ()

    own = Commanded()
    own.latest = Calls()
    state = save(own)
    with pytest.raises(CheckpointError, match="'object' object is not callable"):
        refuse_code([pickle.dumps((state, 0.0, 0))])
    assert own.place == 0


def test_a_function_without_a_module_is_told() -> None:
    env = type("Own", (gymnasium.Env,), {})()
    env.compiled = eval("lambda: 0", {"__builtins__": {}})
    with pytest.raises(CannotSave, match=r"lambda.* belongs to no module"):
        save(env)


def test_a_function_with_variables_around_it_may_change_them() -> None:
    seen = []
    env = TransformReward(gymnasium.make("Pendulum-v1"), lambda reward: seen.append(reward) or reward)
    with pytest.raises(CannotSave, match="local object"):
        save(env)


def test_an_environment_that_holds_itself_can_be_saved() -> None:
    env = gymnasium.make("CartPole-v1")
    env.reset(seed=1)
    vars(env.unwrapped)["env"] = env
    restore(env, save(env))


def test_a_checkpoint_of_other_environments_is_refused() -> None:
    state = VectorEnv(EnvDescription("CartPole-v1"), 2)
    state.reset([0, 1])
    saved = state.state_dict()
    with pytest.raises(CheckpointError, match="num_envs 2"):
        VectorEnv(EnvDescription("CartPole-v1"), 3).load_state_dict(saved)
    with pytest.raises(CheckpointError, match="CartPole-v1"):
        VectorEnv(EnvDescription("Pendulum-v1"), 2).load_state_dict(saved)


@pytest.mark.parametrize("workers", [0, 2], ids=["local", "workers"])
def test_a_step_that_is_under_way_is_dropped_by_loading(make, workers: int) -> None:
    envs = make("CartPole-v1", NUM_ENVS, workers)
    first, second = _actions(envs, 2, seed=0)
    envs.reset(range(NUM_ENVS))
    state = _through_a_file(envs.state_dict())
    expected = envs.step(first)
    envs.send(second)
    envs.load_state_dict(state)
    _assert_equal(envs.step(first), expected)


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("was-here",)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "HalfCheetah-v5", "Pusher-v5"])
def test_usual_environments_hold_no_code(make, env_id: str) -> None:
    envs = make(EnvDescription(env_id), NUM_ENVS, 0)
    envs.reset([5, 6, 7])
    refuse_code(envs.state_dict()["envs"])


def test_generators_of_python_are_stored_exactly_and_hold_no_code(make) -> None:
    envs = make(EnvDescription("toy_envs:Drawing-v0"), NUM_ENVS, 0)
    envs.reset([5, 6, 7])
    actions = np.zeros((NUM_ENVS, 2), np.float32)
    envs.step(actions)
    saved = envs.state_dict()
    refuse_code(saved["envs"])
    expected = [envs.step(actions).observations.copy() for _ in range(3)]
    again = make(EnvDescription("toy_envs:Drawing-v0"), NUM_ENVS, 0)
    again.reset([1, 2, 3])
    again.load_state_dict(saved)
    for each in expected:
        np.testing.assert_array_equal(again.step(actions).observations, each)


PLAIN = [np.random.RandomState(1), defaultdict(list, {1: [2]}), Counter("ab"), range(3), slice(1, 2), 1j, {1}, float]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_values_of_python_and_older_generators_hold_no_code(value: object) -> None:
    env, resumed = (gymnasium.make("CartPole-v1") for _ in range(2))
    vars(env.unwrapped)["held"] = value
    state = save(env)
    refuse_code([pickle.dumps((state, 0.0, 0))])
    restore(resumed, state)
    held = vars(resumed.unwrapped)["held"]
    if isinstance(value, np.random.RandomState):
        held, value = held.normal(), value.normal()
    assert held == value


def test_code_in_a_state_is_found_and_not_run(make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    envs = make(EnvDescription("CartPole-v1"), NUM_ENVS, 0)
    envs.reset([5, 6, 7])
    good = envs.state_dict()["envs"]
    inner = pickle.dumps(([{"x": Evil()}],))
    for bad in (
        pickle.dumps(Evil()),
        pickle.dumps((NATIVE + pickle.dumps(Evil()), 0.0, 0)),
        pickle.dumps((zlib.compress(pickle.dumps((b"", Evil()))), 0.0, 0)),
        pickle.dumps((zlib.compress(pickle.dumps((inner, {}))), 0.0, 0)),
    ):
        with pytest.raises(CheckpointError, match=r"environment 1 holds posix\.mkdir, which may run code"):
            refuse_code([good[0], bad])
    assert not (tmp_path / "was-here").exists()
