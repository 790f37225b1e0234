"""Controls of rewards and advantages through the PPO step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from neutral_batches import neutral_batch
from stand_ins import FixedGroup, SilentReporter

from rl_platform.algorithms.action_levels import denominators_of
from rl_platform.algorithms.losses import ModelOutputs, actor_critic_loss, actor_loss, critic_loss
from rl_platform.algorithms.statistics import whiten
from rl_platform.algorithms.variants.importance_weights import without_rejected
from rl_platform.config.schema import Config
from rl_platform.config.schema.algorithm import Algorithm
from rl_platform.records import RolloutBatch
from rl_platform.runners.ppo import PPO
from rl_platform.runners.task_runner import Learners

SHAPE = (2, 3)
EVERYWHERE = torch.ones(SHAPE, dtype=torch.bool)
LOG_PROBS = torch.tensor([[-1.0, -1.0, -1.0], [-4.0, -1.0, -1.0]])
REFERENCE = torch.tensor([[-1.3, -1.1, -1.0], [-0.5, -1.0, -1.0]])  # d = 0.3, 0.1, 0 and -3.5, 0, 0
SCORES = torch.tensor([[0.0, 0, 1], [0, 0, 0]])


def make_ppo(**algorithm: Any) -> PPO:
    config = Config(
        runner={"task_type": "reasoning"},
        cluster={"component_placement": {"actor,critic,rollout,reward,reference": "all"}},
        algorithm=algorithm,
    )
    reference = FixedGroup(reference_log_probs=REFERENCE) if config.algorithm.needs_reference else None
    critic = FixedGroup(values=torch.zeros(SHAPE)) if config.algorithm.adv_type == "gae" else None
    return PPO(config, Learners(FixedGroup(log_probs=LOG_PROBS), critic, reference), SilentReporter())  # type: ignore[arg-type]


def make_batch(**fields: Any) -> RolloutBatch:
    known = {"sample_mask": torch.ones(2, dtype=torch.bool), "group_ids": torch.zeros(2, dtype=torch.int64)} | fields
    return RolloutBatch({}, EVERYWHERE, rewards=SCORES, rollout_log_probs=LOG_PROBS - 0.5, **known)


def trained_on(ppo: PPO) -> RolloutBatch:
    (batch,) = ppo.learners.actor.trained_on  # type: ignore[attr-defined]
    return batch


@pytest.mark.parametrize(("credit", "first"), [("local", [0.7, 0.9, 1.0]), ("to_go", [0.6, 0.9, 1.0])])
def test_credit_for_the_kl_penalty(credit: str, first: list[float]) -> None:
    ppo = make_ppo(
        adv_type="reinforce_plus_plus", reinforce_kl_credit=credit, use_kl_in_reward=True, kl_ctrl={"kl_coef": 1.0}
    )
    ppo.update(make_batch(), 0)
    expected = whiten(torch.tensor([first, [3.5, 0.0, 0.0]]), EVERYWHERE)
    torch.testing.assert_close(trained_on(ppo).advantages, expected, rtol=1e-5, atol=1e-6)
    assert trained_on(ppo).kl_penalties is None  # the updates have no use for them


@pytest.mark.parametrize(("clip", "largest"), [(10.0, 10.0), (3.0, 3.0), (None, 28.615452)])
def test_bound_of_k3_in_the_reward(clip: float | None, largest: float) -> None:
    """exp(3.5) - 1 - 3.5 = 28.6."""
    ppo = make_ppo(use_kl_in_reward=True, kl_penalty="k3", kl_ctrl={"kl_coef": 1.0}, kl_output_clip=clip)
    metrics = ppo.update(make_batch(), 0)
    assert trained_on(ppo).rewards[1, 0].item() == pytest.approx(-largest)
    others = sum(float(torch.expm1(-d) + d) for d in torch.tensor([0.3, 0.1]))
    assert metrics["reward/kl"] == pytest.approx((largest / 3 + others / 3) / 2, rel=1e-5)


def test_who_is_compared_to_pays_the_penalty_too() -> None:
    """The second row does not count; its penalty of -3.5 makes its score 3.5 and the first one's advantage negative."""
    keys = {"adv_type": "rloo", "group_size": 2, "use_kl_in_reward": True, "kl_ctrl": {"kl_coef": 1.0}}
    ppo = make_ppo(**keys)
    alone = torch.tensor([True, False])
    metrics = ppo.update(make_batch(sample_mask=alone, compared=torch.tensor([True, True])), 0)
    expected = torch.tensor([[0.6 - 3.5] * 3, [0.0] * 3])
    torch.testing.assert_close(trained_on(ppo).advantages, expected)
    assert metrics["reward/kl"] == pytest.approx(0.4 / 3)


class TestOldLogProbs:
    def updated(self, source: str) -> tuple[PPO, dict[str, float]]:
        ppo = make_ppo(old_log_probs=source)
        return ppo, ppo.update(make_batch(), 0)

    def test_recomputed_by_default(self) -> None:
        ppo, metrics = self.updated("recompute")
        assert ppo.learners.actor.evaluations == 1  # type: ignore[attr-defined]
        assert torch.equal(trained_on(ppo).log_probs, LOG_PROBS)  # type: ignore[arg-type]
        assert metrics["mismatch/abs_logp"] == pytest.approx(0.5)

    def test_those_of_the_rollout_save_the_pass_and_measure_no_mismatch(self) -> None:
        ppo, metrics = self.updated("rollout")
        assert ppo.learners.actor.evaluations == 0  # type: ignore[attr-defined]
        assert torch.equal(trained_on(ppo).log_probs, LOG_PROBS - 0.5)  # type: ignore[arg-type]
        assert not any(name.startswith("mismatch/") for name in metrics)

    def test_the_current_ones_save_the_pass_too(self) -> None:
        ppo, metrics = self.updated("current")
        assert ppo.learners.actor.evaluations == 0  # type: ignore[attr-defined]
        assert trained_on(ppo).log_probs is None
        assert not any(name.startswith("mismatch/") for name in metrics)

    def test_the_kl_in_the_reward_is_of_the_policy_that_generated(self) -> None:
        ppo = make_ppo(old_log_probs="rollout", use_kl_in_reward=True, kl_ctrl={"kl_coef": 1.0})
        ppo.update(make_batch(), 0)
        expected = SCORES - (LOG_PROBS - 0.5 - REFERENCE)
        torch.testing.assert_close(trained_on(ppo).rewards, expected)


@pytest.mark.parametrize(("denominator", "kept"), [("original", 6), ("kept", 5)])
def test_tokens_without_weight_leave_the_actors_loss_only(denominator: str, kept: int) -> None:
    """Ratios of exp(0.5) but for one token, whose weight is 0."""
    ppo = make_ppo(rollout_is={"mode": "icepop", "denominator": denominator})
    batch = make_batch()
    batch.rollout_log_probs[0, 2] = LOG_PROBS[0, 2] - 5.0  # the last token, with the reward of its row
    ppo.update(batch, 0)
    assert int(trained_on(ppo).mask.sum()) == kept
    (critics,) = ppo.learners.critic.trained_on  # type: ignore[union-attr]
    assert critics.mask.all()
    plain = make_ppo()
    plain.update(make_batch(), 0)
    assert torch.equal(trained_on(ppo).advantages, trained_on(plain).advantages)  # type: ignore[arg-type]


def test_a_shared_models_value_loss_counts_rejected_positions() -> None:
    """Two rows, the second rejected: values 0, returns 1 and 3 cost (0.5 + 4.5) / 2, the policy is divided by 1."""
    batch = neutral_batch(
        torch.ones(2, 1, dtype=torch.bool),
        inputs={"observations": torch.zeros(2, 1, 1), "actions": torch.zeros(2, 1, 1)},
        log_probs=torch.zeros(2, 1),
        values=torch.zeros(2, 1),
        returns=torch.tensor([[1.0], [3.0]]),
        advantages=torch.tensor([[1.0], [5.0]]),
        loss_weights=torch.tensor([[1.0], [0.0]]),
        entropy_units=torch.ones(2, 1),
    )
    kept = without_rejected(batch, values_too=True)
    outputs = ModelOutputs(log_probs=torch.zeros(2, 1), entropy=torch.ones(2, 1), values=torch.zeros(2, 1))
    algorithm = Algorithm(loss_type="actor_critic", value_clip=None, value_loss_scale=1.0)
    whole, rows = denominators_of(kept, 1.0), (torch.tensor([0]), torch.tensor([1]))
    assert critic_loss(outputs, kept, whole, algorithm)[0].item() == pytest.approx(2.5)
    assert actor_loss(outputs, kept, whole, algorithm)[0].item() == pytest.approx(-1.0)
    both = actor_critic_loss(outputs, kept, whole, algorithm)
    assert both[0].item() == pytest.approx(1.5)
    assert both[1].mean("actor/entropy") == pytest.approx(1.0)
    part = ModelOutputs(log_probs=torch.zeros(1, 1), values=torch.zeros(1, 1))
    parts = [actor_critic_loss(part, kept.select(row), whole, algorithm)[0] for row in rows]
    assert sum(parts).item() == pytest.approx(1.5)  # micro-batches, or ranks: the denominators are the mini-batch's
