"""What is learned from tokens of older weights: advantages, value targets and losses, against a calculation by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from neutral_batches import neutral_batch
from stand_ins import SilentReporter
from torch import Tensor

from rl_platform.algorithms.aggregation import Denominators
from rl_platform.algorithms.losses import ModelOutputs, actor_loss, critic_loss
from rl_platform.config.schema import Config
from rl_platform.records import Prompt, RolloutBatch, Trajectory
from rl_platform.runners.ppo import PPO
from rl_platform.runners.task_runner import Learners
from rl_platform.runners.trajectories import rollout_batch, shaped_rewards

VERSION = 7  # of the weights before the update
MASK = torch.tensor([[False, True, True, True]])  # a prompt of one token, three sampled ones


def row(*numbers: float) -> Tensor:
    return torch.tensor([[0.0, *numbers]])


def ppo_of(**algorithm: Any) -> PPO:
    config = Config(
        runner={"task_type": "reasoning", "max_staleness": 3},
        cluster={"component_placement": {"actor,critic,rollout,reward": "all"}},
        algorithm={"gae_lambda": 0.5, "gamma": 1.0, "normalize_advantages": False, **algorithm},
        critic={"use_critic_model": True},
        data={"max_response_length": 3},
    )
    return PPO(config, Learners(None), SilentReporter())  # type: ignore[arg-type]


def estimated(token_versions: Tensor | None = None, **algorithm: Any) -> tuple[RolloutBatch, PPO, dict[str, float]]:
    """The batch as the update gets it: the tokens are 3 updates old, and the policy has moved on since."""
    ppo = ppo_of(**algorithm)
    batch = neutral_batch(
        MASK,
        inputs={"tokens": torch.zeros(1, 4, dtype=torch.long), "lengths": torch.tensor([4])},
        rewards=row(0, 0, 1),
        rollout_log_probs=row(-1, -2, -1 + math.log(2)),  # of the weights that sampled the tokens
        log_probs=row(-1, -1, -1),  # proximal: of the weights before the update
        values=row(0.2, 0.4, 0.6),  # of the critic before the update
        versions=torch.tensor([VERSION - 3]),
        token_versions=token_versions,
    )
    batch = ppo._evaluate(batch)
    batch, metrics = ppo._correct_mismatch(batch)
    batch = ppo._estimate(batch)
    return batch, ppo, metrics | ppo._measure(batch, VERSION)


def losses(batch: RolloutBatch, ppo: PPO, log_probs: Tensor) -> tuple[float, float]:
    whole = Denominators.of(batch.mask, horizon=3)
    outputs = ModelOutputs(log_probs=log_probs, values=batch.values)
    parts = (loss(outputs, batch, whole, ppo.algorithm)[0] for loss in (actor_loss, critic_loss))
    actor, critic = (float(part) for part in parts)
    return actor, critic


def test_decoupled_ppo_weighs_the_policy_loss_and_not_the_value_targets() -> None:
    batch, ppo, metrics = estimated(rollout_is={}, value_loss_scale=1.0)
    assert batch.advantages is not None
    assert batch.returns is not None
    # delta = (0.4 - 0.2, 0.6 - 0.4, 1 - 0.6) = (0.2, 0.2, 0.4); A_3 = 0.4, A_2 = 0.2 + 0.4 / 2, A_1 = 0.2 + 0.4 / 2
    assert batch.advantages[MASK].tolist() == pytest.approx([0.4, 0.4, 0.4])
    # R = A + V: no importance weight enters the target
    assert batch.returns[MASK].tolist() == pytest.approx([0.6, 0.8, 1.0])
    # w = min(exp(log pi_proximal - log pi_rollout), 2) = (1, min(e, 2), 1 / 2)
    assert batch.loss_weights is not None
    assert batch.loss_weights[MASK].tolist() == pytest.approx([1.0, 2.0, 0.5])
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (3, 3)
    # the ratio to the proximal policy is 1 before the first step: -(1 + 2 + 0.5) 0.4 / 3; value: 0.4^2 / 2
    assert losses(batch, ppo, row(-1, -1, -1)) == pytest.approx((-1.4 / 3, 0.08))
    # the clip is around the proximal policy: rho = 2 counts as 1.2, whatever the age of a token
    assert losses(batch, ppo, row(-1 + math.log(2), -1, -1))[0] == pytest.approx(-(1.2 + 2 + 0.5) * 0.4 / 3)


def test_tokens_of_several_versions_have_one_proximal_policy() -> None:
    """Each token is weighed against the version that sampled it, and clipped around the weights before the update."""
    prompt = Prompt(0, "", "", (1,))
    # versions 4, 4 and 6 gave the tokens the log-probs -1, -2 and log(2 / e); 7 gives all of them -1
    sampled = Trajectory(prompt, 0, (2, 3, 4), (-1, -2, -1 + math.log(2)), "stop", 4, segments=((4, 2), (6, 1)))
    whole = Trajectory(prompt, 1, (2,), (-1.0,), "stop", 5)
    made = rollout_batch([sampled, whole], shaped_rewards([sampled, whole], ppo_of().algorithm, 3), 0)
    assert made.token_versions is not None
    assert made.token_versions.tolist() == [[-1, 4, 4, 6], [-1, 5, -1, -1]]
    batch, ppo, metrics = estimated(rollout_is={}, value_loss_scale=1.0, token_versions=made.token_versions[:1])
    assert batch.loss_weights is not None
    assert batch.loss_weights[MASK].tolist() == pytest.approx([1.0, 2.0, 0.5])
    assert metrics["staleness/token_mean"] == pytest.approx((3 + 3 + 1) / 3)
    assert losses(batch, ppo, row(-1 + math.log(2), -1, -1))[0] == pytest.approx(-(1.2 + 2 + 0.5) * 0.4 / 3)


def test_plain_ppo_clips_around_the_policy_that_sampled() -> None:
    batch, ppo, _ = estimated(old_log_probs="rollout", value_loss_scale=1.0)
    assert batch.loss_weights is None
    assert batch.returns is not None
    assert batch.returns[MASK].tolist() == pytest.approx([0.6, 0.8, 1.0])
    # rho = (1, e, 1 / 2) with A > 0: min(rho, 1.2) A
    assert losses(batch, ppo, row(-1, -1, -1)) == pytest.approx((-(1 + 1.2 + 0.5) * 0.4 / 3, 0.08))


def of_environments(**correction: Any) -> tuple[RolloutBatch, PPO, dict[str, float]]:
    """One environment: an episode of two steps that terminates, then a step that the end of the rollout cuts."""
    config = Config(
        runner={"task_type": "embodied", "max_staleness": 2},
        cluster={"component_placement": {"actor_critic": "0", "rollout,env": "1"}},
        algorithm={
            **{"loss_type": "actor_critic", "gae_lambda": 0.5, "gamma": 1.0, "normalize_advantages": False},
            **{"rollout_is": correction, "value_loss_scale": 1.0},
        },
    )
    ppo = PPO(config, Learners(None), SilentReporter())  # type: ignore[arg-type]
    batch = neutral_batch(
        torch.ones(1, 3, dtype=torch.bool),
        inputs={"observations": torch.zeros(1, 3, 2), "actions": torch.zeros(1, 3, 1)},
        rewards=torch.tensor([[1.0, 1.0, 1.0]]),
        rollout_log_probs=torch.tensor([[-1.0, -2.0, -1 + math.log(2)]]),  # of the weights that acted
        log_probs=torch.tensor([[-1.0, -1.0, -1.0]]),  # proximal
        values=torch.tensor([[0.5, 0.25, 0.5]]),
        ends=torch.tensor([[False, True, True]]),
        end_values=torch.tensor([[0.0, 0.0, 2.0]]),  # the second episode goes on
        versions=torch.tensor([VERSION - 2]),
    )
    batch, weights = ppo._correct_mismatch(ppo._evaluate(batch))
    batch = ppo._estimate(batch)
    return batch, ppo, ppo._measure(batch, VERSION) | weights


def test_transitions_of_environments_that_stepped_with_older_weights() -> None:
    batch, ppo, metrics = of_environments()
    assert batch.advantages is not None
    assert batch.returns is not None
    # A_2 = 1 + 0 - 0.25; A_1 = (1 + 0.25 - 0.5) + 0.5 * 0.75; A_3 = 1 + 2 - 0.5
    assert batch.advantages.tolist() == [pytest.approx([1.125, 0.75, 2.5])]
    # R = A + V: the rewards as they were simulated, the values of now, and no importance weight
    assert batch.returns.tolist() == [pytest.approx([1.625, 1.0, 3.0])]
    # w = min(exp(log pi_proximal - log pi_rollout), 2) = (1, min(e, 2), 1 / 2)
    assert batch.loss_weights is not None
    assert batch.loss_weights.tolist() == [pytest.approx([1.0, 2.0, 0.5])]
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (2, 2)
    assert metrics["is/oob_frac"] == pytest.approx(1 / 3)
    # the ratio to the proximal policy is 1: -(1.125 + 2 * 0.75 + 0.5 * 2.5) / 3; value: (1.125^2 + 0.75^2 + 2.5^2) / 6
    actor, critic = losses(batch, ppo, batch.log_probs)
    assert actor == pytest.approx(-3.875 / 3)
    assert critic == pytest.approx((1.125**2 + 0.75**2 + 2.5**2) / 6)


def test_vtrace_corrects_the_value_targets() -> None:
    batch, ppo, _ = of_environments(vtrace=True)
    assert batch.advantages is not None
    assert batch.returns is not None
    # rho = (1, 2, 1 / 2), c = lambda min(rho, 1) = (1 / 2, 1 / 2, 1 / 4); delta = (0.75, 0.75, 2.5)
    # v_2 - V_2 = 2 * 0.75; v_1 - V_1 = 0.75 + 0.5 * 1.5, as the episode ends after step 2; v_3 - V_3 = 0.5 * 2.5
    assert batch.returns.tolist() == [pytest.approx([0.5 + 1.5, 0.25 + 1.5, 0.5 + 1.25])]
    # A_1 = 0.75 + 0.5 * 1.5; A_2 and A_3 are the last of their episodes
    assert batch.advantages.tolist() == [pytest.approx([1.5, 0.75, 2.5])]
    # the policy loss multiplies by rho: -(1.5 + 2 * 0.75 + 0.5 * 2.5) / 3
    assert batch.log_probs is not None
    assert losses(batch, ppo, batch.log_probs)[0] == pytest.approx(-4.25 / 3)
    # rho is at most 1 with `high: 1`: v_2 - V_2 = 0.75; v_1 - V_1 = 0.75 + 0.5 * 0.75
    batch, _, _ = of_environments(vtrace=True, high=1.0)
    assert batch.returns is not None
    assert batch.returns.tolist() == [pytest.approx([0.5 + 1.125, 0.25 + 0.75, 0.5 + 1.25])]


def test_with_lambda_1_the_value_target_is_the_return_as_it_was_sampled() -> None:
    batch, _, _ = estimated(rollout_is={}, gae_lambda=1.0)
    assert batch.returns is not None
    assert batch.returns[MASK].tolist() == pytest.approx([1.0, 1.0, 1.0])
