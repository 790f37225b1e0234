from __future__ import annotations

import pytest
import torch

from rl_platform.algorithms.gae import gae
from rl_platform.algorithms.rewards import penalize_kl, place_outcome_rewards


def test_outcome_goes_to_the_last_action() -> None:
    mask = torch.tensor([[1, 1, 0, 0, 1, 1, 0], [0, 1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0]], dtype=torch.bool)
    rewards = place_outcome_rewards(torch.tensor([1.0, -2.0, 3.0]), mask)
    expected = torch.zeros(3, 7)
    expected[0, 5], expected[1, 1] = 1.0, -2.0
    assert torch.equal(rewards, expected)


def test_full_kl_in_reward_is_the_one_given() -> None:
    mask, zeros = torch.tensor([[True, False, True]]), torch.zeros(1, 3)
    full_kl = torch.tensor([[0.5, float("nan"), 0.25]])
    penalized, kl = penalize_kl(zeros, zeros, zeros, mask, 0.1, "full", full_kl)
    torch.testing.assert_close(kl, torch.tensor([[0.5, 0.0, 0.25]]))
    torch.testing.assert_close(penalized, torch.tensor([[-0.05, 0.0, -0.025]]))


@pytest.mark.parametrize(
    ("estimator", "kl", "rewards", "to_go", "mean"),
    [
        ("k1", [0.2, -0.5, 0, 0.5], [-0.02, 0.05, 0, 0.95], [0.98, 1.0, 0, 0.95], 0.066667),
        ("k2", [0.02, 0.125, 0, 0.125], [-0.002, -0.0125, 0, 0.9875], [0.973, 0.975, 0, 0.9875], 0.09),
        (
            "k3",
            [0.018731, 0.148721, 0, 0.106531],
            [-0.001873, -0.014872, 0, 0.989347],
            [0.972602, 0.974475, 0, 0.989347],
            0.091328,
        ),
    ],
)
def test_kl_in_reward(estimator: str, kl: list[float], rewards: list[float], to_go: list[float], mean: float) -> None:
    mask = torch.tensor([[1, 1, 0, 1]], dtype=torch.bool)
    log_probs, reference = torch.tensor([[-1, -2, -5, -0.5]]), torch.tensor([[-1.2, -1.5, -1, -1]])
    placed = place_outcome_rewards(torch.tensor([1.0]), mask)
    penalized, measured = penalize_kl(placed, log_probs, reference, mask, 0.1, estimator)
    torch.testing.assert_close(measured, torch.tensor([kl]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(penalized, torch.tensor([rewards]), rtol=1e-5, atol=1e-6)
    # With V = 0 and gamma = lambda = 1 the returns are the reward to go.
    returns = gae(penalized, torch.zeros(1, 4), mask, 1.0, 1.0)[1]
    torch.testing.assert_close(returns, torch.tensor([to_go]), rtol=1e-5, atol=2e-6)
    assert measured[mask].mean().item() == pytest.approx(mean, abs=1e-6)
