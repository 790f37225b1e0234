"""A rollout that stays on a device equals one whose steps pass through main memory."""

from __future__ import annotations

import operator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from tensor_physics import TensorPhysics, device_config, on_device

from rl_platform.components.device_rollout import collection
from rl_platform.components.environment import Environment
from rl_platform.errors import Diverged

CPU = torch.device("cpu")
Rollouts = tuple[list[dict[str, torch.Tensor]], list[dict[str, float]], dict[str, Any]]


def numbers_of(environment: Environment, steps: range) -> Rollouts:
    """Collects rollouts; returns the tensors of each batch, their metrics, and the state afterwards."""
    batches, metrics = [], []
    for step in steps:
        batch, values = environment.collect(step, None)
        named = {name: tensor for name, tensor in vars(batch).items() if isinstance(tensor, torch.Tensor)}
        batches.append(batch.inputs | named)
        metrics.append(values)
    return batches, metrics, environment.state_dict()


def rollouts(steps: int = 3, **env: Any) -> Rollouts:
    with on_device(device_config(**env), CPU) as (environment, _):
        return numbers_of(environment, range(steps))


def assert_equal(found: Rollouts, expected: Rollouts) -> None:
    assert found[1] == expected[1]
    for name, state in expected[2].items():
        same = torch.equal if isinstance(state, torch.Tensor) else operator.eq
        assert same(found[2][name], state), name
    for mine, other in zip(found[0], expected[0], strict=True):
        assert mine.keys() == other.keys()
        for name, tensor in other.items():
            assert mine[name].dtype == tensor.dtype, name
            assert torch.equal(mine[name], tensor), name


@pytest.mark.parametrize("id", ["Hopper-v5", "HalfCheetah-v5", "InvertedPendulum-v5", "Swimmer-v5"])
@pytest.mark.parametrize("normalised", [True, False])
def test_both_paths_are_equal(id: str, normalised: bool) -> None:
    options = {"id": id, "normalize_observations": normalised, "normalize_rewards": normalised}
    with patch.object(collection, "collect_on_device", wraps=collection.collect_on_device) as used:
        found = rollouts(**options)
        assert used.call_count == 3
        expected = rollouts(on_device=False, **options)
        assert used.call_count == 3
    assert_equal(found, expected)
    assert sum(metrics["episode/count"] for metrics in found[1]) > 3


def test_episodes_that_diverge_are_invalid_in_both() -> None:
    with patch.object(TensorPhysics, "breaks", 0.1):
        found, expected = rollouts(), rollouts(on_device=False)
    assert_equal(found, expected)
    assert sum(metrics["episode/invalid"] for metrics in found[1]) > 0
    assert sum(metrics["episode/count"] for metrics in found[1]) > 0


@pytest.mark.parametrize("before", [True, False])
def test_either_path_continues_the_state_of_the_other(before: bool) -> None:
    expected = rollouts(4)
    with on_device(device_config(on_device=before), CPU) as (environment, _):
        numbers_of(environment, range(2))
        saved = environment.state_dict()
    with on_device(device_config(on_device=not before), CPU) as (environment, _):
        environment.load_state_dict(saved)
        found = numbers_of(environment, range(2, 4))
    assert_equal(found, (expected[0][2:], expected[1][2:], expected[2]))


def test_more_episodes_begin_in_a_rollout_than_a_limit_of_one_step_allows() -> None:
    found, expected = (rollouts(max_episode_steps=1, on_device=on) for on in (True, False))
    assert_equal(found, expected)
    assert found[1][0]["episode/count"] == 3 * 12


def test_actions_that_are_not_finite_are_named() -> None:
    with on_device(device_config(), CPU) as (environment, rollout):
        with torch.no_grad():
            rollout.policy.log_std.fill_(float("nan"))
        rollout.use_parameters()
        with pytest.raises(Diverged, match=r"environments \[0, 1, 2\]"):
            environment.collect(0, None)


def test_the_path_and_its_reason_are_one_line() -> None:
    with on_device(device_config(), CPU) as (environment, _):
        assert environment.rollout_path(True) == "rollouts stay on cpu, with their observations and actions"
        assert "the policy is in other processes" in environment.rollout_path(False)
    with on_device(device_config(on_device=False), CPU) as (environment, _):
        assert "env.on_device is false" in environment.rollout_path(True)
    with on_device(device_config(pipeline_stages=3), CPU) as (environment, _):
        assert "env.pipeline_stages" in environment.rollout_path(True)


def test_starts_are_drawn_in_the_order_of_the_generator() -> None:
    from rl_platform.envs.embodied.descriptions import EnvDescription, make_env
    from rl_platform.envs.embodied.mujoco.device_envs import Starts
    from rl_platform.envs.embodied.mujoco.tasks import Reacher

    task, rng, own = Reacher(make_env(EnvDescription("Reacher-v5")).unwrapped), *map(np.random.default_rng, (3, 3))
    starts = Starts(task, [own], 3)
    drawn = []
    for number in (2, 0, 3, 1):
        drawn += [starts.qpos[0, place].copy() for place in range(number)]
        starts.remove(0, number, own)
    np.testing.assert_array_equal(drawn, [task.start(rng)[0].astype(np.float32) for _ in range(6)])
    assert own.bit_generator.state == rng.bit_generator.state
