"""The compiled loops choose what the policy itself would."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rl_platform.accel.compiled_policy import CompiledPolicy, acts_compiled
from rl_platform.envs.embodied.spaces import ActionSpace
from rl_platform.models.policies.squash import Squash
from rl_platform.models.policy import ActorCriticPolicy, PolicyConfig

CPU = torch.device("cpu")
SPACES = [ActionSpace("continuous", 3), ActionSpace("discrete", 4)]


def policy_of(space: ActionSpace, hidden_sizes: tuple[int, ...] = (16, 9), **options: object) -> ActorCriticPolicy:
    torch.manual_seed(0)
    policy = ActorCriticPolicy((5,), space, PolicyConfig(hidden_sizes, **options))
    with torch.no_grad():  # away from the start, where actions hardly depend on the state
        for parameter in policy.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return policy


def observations_of(count: int) -> torch.Tensor:
    """Also large ones, where tanh is flat."""
    observations = torch.randn(count, 5, generator=torch.Generator().manual_seed(1))
    observations[0] *= 100
    return observations


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(2)


@pytest.mark.parametrize("deterministic", [False, True], ids=["sampled", "deterministic"])
@pytest.mark.parametrize("hidden_sizes", [(), (7,), (16, 9), (64, 64)], ids=str)
@pytest.mark.parametrize("space", SPACES, ids=lambda space: space.kind)
def test_the_numbers_are_the_policys(space: ActionSpace, hidden_sizes: tuple[int, ...], deterministic: bool) -> None:
    policy, observations = policy_of(space, hidden_sizes), observations_of(203)
    assert acts_compiled(policy, CPU)
    expected = policy.act(observations, generator(), deterministic)
    compiled = CompiledPolicy(policy)
    actual = compiled.act(observations.numpy(), compiled.draw(203, None if deterministic else generator()))
    for one, other in zip(expected, actual, strict=True):
        torch.testing.assert_close(torch.from_numpy(other), one, rtol=1e-5, atol=1e-5)
    assert len(np.unique(actual[0], axis=0)) >= (1 if deterministic and space.kind == "discrete" else 4)


@pytest.mark.parametrize("space", SPACES, ids=lambda space: space.kind)
def test_a_row_gets_the_same_bits_in_whatever_company(space: ActionSpace) -> None:
    compiled, observations = CompiledPolicy(policy_of(space)), observations_of(11).numpy()
    drawn = compiled.draw(11, generator())
    actions, log_probs = compiled.act(observations, drawn)
    for first, last in [(0, 1), (1, 4), (4, 11)]:
        part = compiled.act(observations[first:last], drawn[first:last])
        np.testing.assert_array_equal(part[0], actions[first:last])
        np.testing.assert_array_equal(part[1], log_probs[first:last])


def test_what_is_not_finite_stays_so() -> None:
    observations = observations_of(6)
    observations[3, 2] = torch.nan
    compiled = CompiledPolicy(policy_of(SPACES[0]))
    actions, _ = compiled.act(observations.numpy(), compiled.draw(6, generator()))
    assert np.isfinite(actions).all(axis=1).tolist() == [True, True, True, False, True, True]


def test_it_is_a_copy() -> None:
    policy = policy_of(SPACES[0])
    compiled, observations = CompiledPolicy(policy), observations_of(2).numpy()
    before = compiled.act(observations, compiled.draw(2, None))[0]
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(2.0)
    np.testing.assert_array_equal(compiled.act(observations, compiled.draw(2, None))[0], before)


@pytest.mark.parametrize(
    "other",
    [
        policy_of(SPACES[0], activation="relu"),
        policy_of(SPACES[0], log_std="state"),
        policy_of(SPACES[0], squash=Squash([-1.0] * 3, [1.0] * 3)),
        policy_of(SPACES[0], (256, 256)),
        torch.nn.Linear(5, 3),
    ],
    ids=["relu", "deviations of the state", "squashed", "large", "no policy"],
)
def test_others_act_as_they_are(other: torch.nn.Module) -> None:
    assert not acts_compiled(other, CPU)
    assert not acts_compiled(policy_of(SPACES[0]), torch.device("cuda"))
