"""Squashed and state-dependent Gaussians against torch.distributions, gradients included."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import AffineTransform, Independent, Normal, TanhTransform, TransformedDistribution

from rl_platform.envs.embodied.spaces import ActionSpace
from rl_platform.models.policies.chunk_policy import ChunkPolicy
from rl_platform.models.policies.squash import Squash
from rl_platform.models.policy import LOG_STD_RANGE, ActorCriticPolicy, PolicyConfig

LOW, HIGH = (-1.0, 0.0, -3.0), (1.0, 5.0, -1.0)
SPACE = ActionSpace("continuous", 3)
CHOICE = ("free", False, ActionSpace("discrete", 4))
KINDS = [(log_std, squashed) for log_std in ("free", "state") for squashed in (False, True)]


def policy(
    log_std: str,
    squashed: bool,
    kind: type[ActorCriticPolicy] = ActorCriticPolicy,
    space: ActionSpace = SPACE,
    **options: object,
) -> ActorCriticPolicy:
    torch.manual_seed(0)
    squash = Squash(LOW, HIGH) if squashed else None
    config = PolicyConfig((16,), initial_log_std=-0.4, log_std=log_std, squash=squash, **options)
    made = kind((5,), space, config)
    with torch.no_grad():  # away from the near-uniform start, so that mistakes show
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made.double()


def deviations(of_policy: ActorCriticPolicy, observations: torch.Tensor) -> torch.Tensor:
    if not hasattr(of_policy, "log_std_head"):
        return of_policy.log_std.exp()
    return of_policy.log_std_head(of_policy.backbone(observations)).exp()


def bounded(normal: Normal) -> TransformedDistribution:
    low, high = (torch.tensor(bound, dtype=torch.float64) for bound in (LOW, HIGH))
    return TransformedDistribution(normal, [TanhTransform(), AffineTransform((low + high) / 2, (high - low) / 2)])


@pytest.mark.parametrize(("log_std", "squashed"), KINDS)
def test_log_probs_are_those_of_the_distribution_and_so_are_their_gradients(log_std: str, squashed: bool) -> None:
    squashing = policy(log_std, squashed)
    observations = torch.randn(50, 5, dtype=torch.float64)
    actions, drawn = squashing.act(observations, torch.Generator().manual_seed(1))
    ours, _, _ = squashing.evaluate(observations, actions)
    torch.testing.assert_close(drawn, ours.detach())
    normal = Normal(squashing(observations)[0], deviations(squashing, observations))
    distribution = Independent(bounded(normal) if squashed else normal, 1)
    theirs = distribution.log_prob(squashing.executed(actions))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    weights = torch.randn(50, dtype=torch.float64)
    trained = [parameter for name, parameter in squashing.named_parameters() if not name.startswith("value_head")]
    gradients = (torch.autograd.grad((weights * log_probs).sum(), trained) for log_probs in (ours, theirs))
    for mine, its in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("log_std", ["free", "state"])
def test_the_entropy_of_squashed_actions_is_that_of_many_samples(log_std: str) -> None:
    squashing = policy(log_std, True)
    observations = torch.randn(2, 5, dtype=torch.float64)
    estimated = squashing.evaluate(observations, torch.zeros(2, 3, dtype=torch.float64))[1]
    many = observations.repeat_interleave(40_000, 0)
    _, log_probs = squashing.act(many, torch.Generator().manual_seed(2))
    torch.testing.assert_close(estimated, -log_probs.view(2, -1).mean(1), atol=0.02, rtol=0)


@pytest.mark.parametrize("deviation", [0.05, 0.3, 1.0])
def test_what_squashing_adds_to_the_entropy(deviation: float) -> None:
    """Against a fine sum over the density; with the gradient in the mean and the deviation."""
    squash = Squash((-1.0,), (3.0,)).double()
    mean = torch.linspace(-4, 4, 17, dtype=torch.float64)[:, None].requires_grad_()
    log_std = torch.full((1,), math.log(deviation), dtype=torch.float64, requires_grad=True)
    z = torch.linspace(-9, 9, 20_001, dtype=torch.float64)
    density = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    expected = (squash.log_slope((mean + log_std.exp() * z)[..., None])[..., 0] * density).sum(-1, keepdim=True)
    slopes = squash.mean_log_slope(mean, log_std)
    torch.testing.assert_close(slopes, expected, atol=3e-5, rtol=0)
    both = (torch.autograd.grad(value.sum(), (mean, log_std)) for value in (slopes, expected))
    for mine, its in zip(*both, strict=True):
        torch.testing.assert_close(mine, its, atol=1e-3, rtol=0)


def test_it_is_finite_far_out_where_tanh_is_one() -> None:
    squash = Squash((-1.0,), (1.0,))
    u = torch.tensor([[-300.0], [-30.0], [0.0], [30.0], [300.0]], requires_grad=True)
    slope = squash.log_slope(u)
    torch.testing.assert_close(slope[2, 0].item(), 0.0)
    torch.testing.assert_close(slope.flatten()[[0, 4]], torch.full((2,), 2 * math.log(2) - 600.0))
    slope.sum().backward()
    assert u.grad.flatten().tolist() == [2.0, 2.0, 0.0, -2.0, -2.0]
    assert squash(u).min() >= -1
    assert squash(u).max() <= 1


def test_executed_actions_lie_within_the_bounds_and_the_most_likely_one_is_that_of_the_mean() -> None:
    squashing = policy("state", True)
    observations = 20 * torch.randn(2_000, 5, dtype=torch.float64)
    actions, _ = squashing.act(observations, torch.Generator().manual_seed(1))
    executed = squashing.executed(actions)
    assert (executed >= torch.tensor(LOW)).all()
    assert (executed <= torch.tensor(HIGH)).all()
    assert (executed.max(0).values - executed.min(0).values > 0.5 * (torch.tensor(HIGH) - torch.tensor(LOW))).all()
    torch.testing.assert_close(squashing.act(observations, deterministic=True)[0], squashing(observations)[0])


@pytest.mark.parametrize(("log_std", "squashed", "space"), [*((*kind, SPACE) for kind in KINDS), CHOICE])
def test_a_chunk_of_one_action_is_a_single_action(log_std: str, squashed: bool, space: ActionSpace) -> None:
    single, chunks = (policy(log_std, squashed, kind, space) for kind in (ActorCriticPolicy, ChunkPolicy))
    chunks.load_state_dict(single.state_dict())
    observations = torch.randn(7, 5, dtype=torch.float64)
    actions, log_probs = single.act(observations, torch.Generator().manual_seed(1))
    chosen, of_components = chunks.act(observations, torch.Generator().manual_seed(1))
    torch.testing.assert_close(chosen[:, 0], actions)
    torch.testing.assert_close(of_components.sum((1, 2)), log_probs)
    torch.testing.assert_close(chunks.executed(chosen)[:, 0], single.executed(actions))
    actual, expected = chunks.evaluate(observations, chosen), single.evaluate(observations, actions)
    for mine, its in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine.flatten(1).sum(1), its)


def test_two_actions_of_a_chunk_have_a_deviation_each() -> None:
    chunks = policy("state", True, ChunkPolicy, num_actions=2)
    observations = torch.randn(7, 5, dtype=torch.float64)
    actions, log_probs = chunks.act(observations, torch.Generator().manual_seed(1))
    stds = deviations(chunks, observations).view(7, 2, 3)
    expected = bounded(Normal(chunks(observations)[0], stds)).log_prob(chunks.executed(actions))
    torch.testing.assert_close(log_probs, expected, rtol=1e-6, atol=1e-6)


def test_a_deviation_of_the_state_starts_like_a_free_one_and_stays_in_its_range() -> None:
    torch.manual_seed(0)
    single = ActorCriticPolicy((5,), SPACE, PolicyConfig((16,), initial_log_std=-0.5, log_std="state"))
    start = single._log_std(single._features(torch.randn(10, 5)))
    torch.testing.assert_close(start, torch.full((10, 3), -0.5), atol=0.1, rtol=0)
    torch.nn.init.constant_(single.log_std_head.bias, 100.0)
    assert single._log_std(single._features(torch.randn(10, 5))).unique().tolist() == [LOG_STD_RANGE[1]]


def test_nothing_of_it_is_saved() -> None:
    assert not [name for name in policy("free", True).state_dict() if "squash" in name]
