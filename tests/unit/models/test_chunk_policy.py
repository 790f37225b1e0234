"""Policies of action chunks: their distribution. test_squash.py compares chunks of one action to single actions."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import Categorical, Normal

from rl_platform.envs.embodied.spaces import ActionSpace
from rl_platform.models.policies.chunk_policy import ChunkPolicy
from rl_platform.models.policy import PolicyConfig

SPACES = [ActionSpace("continuous", 3), ActionSpace("discrete", 4), ActionSpace("multi_discrete", 4, (2, 2))]


def policies(space: ActionSpace, **options: int) -> ChunkPolicy:
    torch.manual_seed(0)
    policy = ChunkPolicy((5,), space, PolicyConfig((16,), initial_log_std=-0.3, **options))
    for parameter in policy.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return policy


@pytest.mark.parametrize("space", SPACES, ids=lambda space: space.kind)
def test_log_probs_and_entropies_are_those_of_independent_components(space: ActionSpace) -> None:
    policy, observations = policies(space, num_actions=2, num_values=2), torch.randn(7, 5)
    actions, drawn_log_probs = policy.act(observations, torch.Generator().manual_seed(1))
    log_probs, entropies, values = policy.evaluate(observations, actions)
    heads, _ = policy(observations)
    if space.kind == "continuous":
        distribution = Normal(heads, policy.log_std.view(2, 3).exp())
        expected, entropy = distribution.log_prob(actions), distribution.entropy()
        assert actions.shape == (7, 2, 3)
    elif space.kind == "multi_discrete":
        categorical = Categorical(logits=heads.unflatten(-1, (2, 2)))
        expected, entropy = categorical.log_prob(actions), categorical.entropy()
        assert actions.shape == (7, 2, 2)
    else:
        categorical = Categorical(logits=heads)
        expected, entropy = categorical.log_prob(actions)[..., None], categorical.entropy()[..., None]
        assert actions.shape == (7, 2)
    torch.testing.assert_close(log_probs, expected)
    torch.testing.assert_close(drawn_log_probs, expected.detach())
    torch.testing.assert_close(entropies, entropy)
    assert values.shape == (7, 2)


@pytest.mark.parametrize("space", SPACES[:2], ids=lambda space: space.kind)
def test_actions_are_drawn_from_it(space: ActionSpace) -> None:
    policy, observations = policies(space, num_actions=2), torch.randn(1, 5).expand(20_000, 5)
    actions, _ = policy.act(observations, torch.Generator().manual_seed(1))
    heads, _ = policy(observations[:1])
    if space.kind == "continuous":
        torch.testing.assert_close(actions.mean(0), heads[0], atol=0.04, rtol=0)
        torch.testing.assert_close(actions.std(0), policy.log_std.view(2, 3).exp(), atol=0.04, rtol=0)
    else:
        shares = torch.nn.functional.one_hot(actions, 4).float().mean(0)
        torch.testing.assert_close(shares, heads[0].softmax(-1), atol=0.02, rtol=0)
    best, _ = policy.act(observations[:1], deterministic=True)
    assert torch.equal(best[0], heads[0] if space.kind == "continuous" else heads[0].argmax(-1))


def test_the_start_is_that_of_other_policies() -> None:
    policy = ChunkPolicy((5,), SPACES[0], PolicyConfig(num_actions=4, num_values=4))
    heads, values = policy(torch.randn(7, 5))
    assert heads.abs().max() < 0.1
    assert values.abs().max() == 0
    assert len(policy.log_std) == 12
