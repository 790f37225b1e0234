"""The embodied policy against torch.distributions, and what its start promises."""

from __future__ import annotations

import pytest
import torch

from rl_platform.envs.embodied.spaces import ActionSpace
from rl_platform.models.policy import ActorCriticPolicy, PolicyConfig, Tanh

SPACES = [ActionSpace("continuous", 3), ActionSpace("discrete", 4), ActionSpace("multi_discrete", 6, (2, 1, 3))]


def _policy(space: ActionSpace, **options: object) -> ActorCriticPolicy:
    torch.manual_seed(0)
    policy = ActorCriticPolicy((5,), space, PolicyConfig((16, 16), **options))
    with torch.no_grad():  # away from the near-uniform start, so that mistakes show
        for parameter in policy.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return policy


def _distribution(policy: ActorCriticPolicy, head: torch.Tensor) -> torch.distributions.Distribution:
    if policy.action_space.kind == "continuous":
        normal = torch.distributions.Normal(head, policy.log_std.exp().expand_as(head))
        return torch.distributions.Independent(normal, 1)
    if policy.action_space.kind == "discrete":
        return torch.distributions.Categorical(logits=head)
    padded = torch.full((len(head), 3, 3), -torch.inf)
    padded[:, 0, :2], padded[:, 1, :1], padded[:, 2] = head[:, :2], head[:, 2:3], head[:, 3:]
    return torch.distributions.Independent(torch.distributions.Categorical(logits=padded), 1)


@pytest.mark.parametrize("space", SPACES, ids=lambda space: space.kind)
def test_log_probs_and_entropy_are_those_of_the_distribution(space: ActionSpace) -> None:
    policy = _policy(space)
    observations = torch.randn(7, 5)
    actions, log_probs = policy.act(observations, torch.Generator().manual_seed(1))
    distribution = _distribution(policy, policy(observations)[0])
    evaluated, entropy, values = policy.evaluate(observations, actions)
    torch.testing.assert_close(evaluated, distribution.log_prob(actions))
    torch.testing.assert_close(entropy, distribution.entropy())
    torch.testing.assert_close(log_probs, evaluated.detach())
    torch.testing.assert_close(values, policy(observations)[1])
    assert log_probs.shape == entropy.shape == values.shape == (7,)
    assert actions.shape == ((7,) if space.kind == "discrete" else (7, 3))


@pytest.mark.parametrize("space", SPACES, ids=lambda space: space.kind)
def test_same_seed_same_actions_whatever_the_global_generator(space: ActionSpace) -> None:
    policy = _policy(space)
    observations = torch.randn(6, 5)
    first = policy.act(observations, torch.Generator().manual_seed(3))
    torch.manual_seed(999)
    second = policy.act(observations, torch.Generator().manual_seed(3))
    other = policy.act(observations, torch.Generator().manual_seed(4))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], other[0])


@pytest.mark.parametrize("space", SPACES, ids=lambda space: space.kind)
def test_deterministic_takes_the_mode_and_draws_nothing(space: ActionSpace) -> None:
    policy = _policy(space)
    observations = torch.randn(6, 5)
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()
    actions, log_probs = policy.act(observations, generator, deterministic=True)
    distribution = _distribution(policy, policy(observations)[0])
    torch.testing.assert_close(actions, distribution.mode)
    torch.testing.assert_close(log_probs, distribution.log_prob(actions))
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("space", SPACES, ids=lambda space: space.kind)
@pytest.mark.parametrize("which", ["log_probs", "values"])
def test_both_heads_train_the_shared_backbone(space: ActionSpace, which: str) -> None:
    policy = _policy(space)
    observations = torch.randn(6, 5)
    actions = policy.act(observations)[0]
    log_probs, _, values = policy.evaluate(observations, actions)
    (log_probs if which == "log_probs" else values).sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in policy.backbone.parameters())
    silent = policy.value_head if which == "log_probs" else policy.policy_head
    assert all(parameter.grad is None for parameter in silent.parameters())


def test_entropy_trains_the_free_deviation() -> None:
    policy = _policy(SPACES[0])
    policy.evaluate(torch.randn(4, 5), torch.randn(4, 3))[1].mean().backward()
    torch.testing.assert_close(policy.log_std.grad, torch.ones(3))  # dH / d log sigma_i = 1


def test_start_values_are_zero_and_actions_do_not_depend_on_the_state() -> None:
    torch.manual_seed(0)
    policy = ActorCriticPolicy((2, 3), SPACES[0], PolicyConfig(activation="relu", initial_log_std=-0.5))
    head, values = policy(torch.randn(10, 2, 3))
    assert torch.count_nonzero(values) == 0
    assert head.abs().max() < 0.1
    assert policy.log_std.tolist() == [-0.5] * 3
    rows = policy.policy_head.weight @ policy.policy_head.weight.T
    torch.testing.assert_close(rows, 0.01**2 * torch.eye(3), atol=1e-8, rtol=0)


def test_tanh_and_its_gradient_are_those_of_torch() -> None:
    inputs = torch.cat((torch.linspace(-30, 30, 601), torch.linspace(-1e-3, 1e-3, 11))).requires_grad_()
    expected, outputs = torch.tanh(inputs), Tanh()(inputs)
    torch.testing.assert_close(outputs, expected, rtol=0, atol=3e-7)
    (ours,) = torch.autograd.grad(outputs.sum(), inputs)
    (theirs,) = torch.autograd.grad(expected.sum(), inputs)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    with torch.no_grad():
        assert torch.equal(Tanh()(inputs), outputs)
