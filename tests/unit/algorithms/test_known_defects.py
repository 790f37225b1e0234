"""Defects that public PPO systems had or have; each test names what it keeps out.

`DEFECTS` is the table: system and defect, and the tests that would fail if it came here. Their names are checked.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rl_platform.algorithms.advantages import advantages
from rl_platform.algorithms.aggregation import Denominators, aggregate
from rl_platform.algorithms.card import algorithm_card
from rl_platform.algorithms.gae import gae
from rl_platform.algorithms.kl import AdaptiveKLController, kl_estimate
from rl_platform.algorithms.losses import value_loss
from rl_platform.algorithms.policy_losses import positive_nll
from rl_platform.algorithms.rewards import penalize_kl, place_outcome_rewards
from rl_platform.algorithms.schedule import mini_batches
from rl_platform.algorithms.shaping import overlong_penalty
from rl_platform.algorithms.statistics import masked_var, whiten
from rl_platform.config.estimators import ESTIMATORS
from rl_platform.config.rules import broken
from rl_platform.config.rules.rule import text_of
from rl_platform.config.schema import Config
from rl_platform.config.schema.algorithm import Algorithm
from rl_platform.records import Prompt, RolloutBatch, Trajectory
from rl_platform.runners.trajectories import rollout_batch, shaped_rewards

LOSS = torch.tensor([[1.0, 0, 0, 0], [2, 2, 2, 2], [3, 3, 0, 0], [9, 9, 9, 9]])
MASK = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
GAPS = torch.tensor([[1, 1, 0, 0, 1, 1, 0]], dtype=torch.bool)


HERE = "unit/algorithms/test_known_defects.py"
END_TO_END = "integration/test_batch_layout_invariance.py"
SCHEDULE = "unit/runners/test_schedule.py"

DEFECTS = {
    "NeMo-RL PPO: dynamic sampling is accepted and never called": [
        "integration/test_resume.py::test_surplus_groups_are_part_of_a_checkpoint",
        "unit/algorithms/test_dynamic_sampling.py::test_refills_until_the_step_is_full_in_the_order_of_prompts",
    ],
    "NeMo-RL: the loss of positive examples is normalised per micro-batch, and has no rewards with group estimators": [
        f"{HERE}::test_positive_examples_are_not_weighed_by_the_number_of_micro_batches",
        f"{HERE}::test_every_estimator_gets_rows_that_say_whether_they_are_correct",
    ],
    "NeMo-RL: correctness and length of shaped rewards, a punishment without a floor": [
        f"{HERE}::test_a_correct_answer_with_a_shaped_reward_of_zero_is_still_correct",
        f"{HERE}::test_the_soft_punishment_has_a_floor",
        f"{HERE}::test_the_soft_punishment_counts_every_sampled_token",
    ],
    "NeMo-RL GRPO: rounding as a deviation; lone successes filtered out": [
        "unit/algorithms/test_groups.py::test_scores_that_differ_by_rounding_only_give_exactly_zero",
        "unit/algorithms/test_dynamic_sampling.py::test_a_lone_success_is_kept_with_its_failures",
    ],
    "verl: the mean over tokens is taken per micro-batch": [
        f"{HERE}::test_token_mean_is_not_normalised_per_micro_batch",
        f"{END_TO_END}::test_a_mean_per_micro_batch_would_be_seen",
    ],
    "verl: the critic's step grows with the number of micro-batches": [
        f"{HERE}::test_value_loss_does_not_grow_with_the_number_of_micro_batches",
        f"{END_TO_END}::test_one_process",
    ],
    "verl: names with a + are not implemented": [f"{HERE}::test_plus_names_of_the_kl_loss_are_implemented"],
    "verl: the full KL is documented and not implemented": [
        "unit/algorithms/test_kl.py::test_full_kl",
        "unit/components/test_learner.py::test_full_kl_to_the_reference",
        "unit/runners/test_kl_control.py"
        "::test_a_full_kl_comes_from_the_actor_and_the_states_of_the_reference_go_no_further",
    ],
    "verl: reinforce++ loses the reward before an observation": [
        f"{HERE}::test_what_stands_before_an_observation_keeps_its_reward_in_reinforce_plus_plus",
    ],
    "verl: a terminal reward on a masked tail, or behind a rejected token, is dropped": [
        f"{HERE}::test_terminal_reward_survives_a_trajectory_that_ends_with_an_observation",
        "unit/runners/test_mismatch_correction.py::test_rejected_tokens_keep_their_place_in_the_estimator",
    ],
    "verl: the adaptive KL coefficient is lost on resume": [
        f"{HERE}::test_adaptive_kl_coefficient_is_not_lost_on_resume",
        "unit/runners/test_kl_control.py::test_the_adaptive_coefficient_survives_a_checkpoint_of_the_runner",
    ],
    "verl: PF-PPO pairs advantages with other rows": [
        "unit/algorithms/test_pf_ppo.py::test_resampled_rows_still_belong_together",
        f"{SCHEDULE}::test_both_models_train_on_the_draw_and_metrics_are_of_the_rollout",
    ],
    "verl: balancing that cannot be chosen changes mini-batches; whitening per mini-batch": [
        "unit/engines/test_training.py::test_ranks_do_not_change_what_a_mini_batch_holds",
        f"{HERE}::test_whitening_is_over_the_rollout_and_not_over_mini_batches",
    ],
    "verl: clip_ratio alone has no effect; warm-up is one step short": [
        "unit/config/test_explain.py::test_names_of_other_systems",
        f"{HERE}::test_warm_up_of_k_steps_is_not_described_as_k_minus_1",
        f"{SCHEDULE}::test_exactly_k_steps_train_the_critic_only",
    ],
    "verl: seq-mean-token-sum-norm divides by the padded width and not by the sequences": [
        f"{HERE}::test_sum_norm_divides_by_sequences_and_a_constant_horizon_not_by_the_padded_width",
    ],
    "slime PPO: observation tokens are transitions, and the last token gets the reward": [
        f"{HERE}::test_observation_tokens_are_no_transitions",
        f"{HERE}::test_terminal_reward_survives_a_trajectory_that_ends_with_an_observation",
    ],
    "slime PPO: returns without the KL, a value loss without 1/2, a variance in one pass, k1 as the KL loss": [
        f"{HERE}::test_critic_returns_contain_the_kl_penalty_that_the_advantages_contain",
        f"{HERE}::test_value_loss_has_its_one_half",
        f"{HERE}::test_variance_of_close_values_is_not_negative",
        f"{HERE}::test_the_default_kl_loss_regularises",
    ],
    "slime GRPO: the KL coefficient is ignored": [f"{HERE}::test_no_estimator_ignores_a_kl_in_the_reward"],
    "RLinf: the metric of the value clip is always 0; rewards go to the last padded column": [
        f"{HERE}::test_value_clip_metric_is_not_always_zero",
        f"{HERE}::test_outcome_is_not_written_to_the_last_padded_column",
    ],
    "NeMo-RL PPO: a critic is trained on the returns that raw rewards do not have": [
        f"{HERE}::test_what_makes_no_returns_trains_no_critic",
        "integration/test_controls.py::test_an_estimator_without_a_critic_builds_none",
    ],
}


def test_every_defect_has_its_guard(test_exists: Any) -> None:
    assert all(DEFECTS.values())
    assert [test for tests in DEFECTS.values() for test in tests if not test_exists(test)] == []


def test_token_mean_is_not_normalised_per_micro_batch() -> None:
    """A mean per micro-batch, averaged, would give 2.4 here, and 1.5 with single rows."""
    denominators = Denominators.of(MASK, 4)
    for size in (1, 2, 4):
        parts = zip(LOSS.split(size), MASK.split(size), strict=True)
        total = sum(float(aggregate(loss, mask, denominators, "token-mean")) for loss, mask in parts)
        assert total == pytest.approx(15 / 7)


def test_value_loss_does_not_grow_with_the_number_of_micro_batches() -> None:
    values, returns, mask = torch.zeros(4, 3), torch.ones(4, 3), torch.ones(4, 3, dtype=torch.bool)
    denominators = Denominators.of(mask, 3)
    for size in (1, 2, 4):
        parts = zip(values.split(size), returns.split(size), mask.split(size), strict=True)
        total = sum(float(aggregate(value_loss(v, v, r, m)[0], m, denominators, "token-mean")) for v, r, m in parts)
        assert total == pytest.approx(0.5)


def test_terminal_reward_survives_a_trajectory_that_ends_with_an_observation() -> None:
    """On the last token of the row, position 6, gae would drop it: -0.2375, -0.275, -0.15, -0.1."""
    values = torch.tensor([[0.5, 0.4, 9, 9, 0.2, 0.1, 9]])
    rewards = place_outcome_rewards(torch.tensor([1.0]), GAPS)
    assert rewards[0, 5] == 1
    estimated = gae(rewards, values, GAPS, 1.0, 0.5)[0][GAPS]
    torch.testing.assert_close(estimated, torch.tensor([-0.1125, -0.025, 0.35, 0.9]))


def test_observation_tokens_are_no_transitions() -> None:
    """Treated as transitions the first advantages would be -0.253 (values zeroed) or 3.26 (values kept)."""
    rewards = place_outcome_rewards(torch.tensor([1.0]), GAPS)
    for garbage in (0.0, 9.0):
        values = torch.tensor([[0.5, 0.4, garbage, garbage, 0.2, 0.1, garbage]])
        assert gae(rewards, values, GAPS, 1.0, 0.5)[0][0, 0] == pytest.approx(-0.1125)


def test_outcome_is_not_written_to_the_last_padded_column() -> None:
    mask = torch.tensor([[1, 1, 0, 0]], dtype=torch.bool)
    assert place_outcome_rewards(torch.tensor([1.0]), mask).tolist() == [[0, 1, 0, 0]]


def test_adaptive_kl_coefficient_is_not_lost_on_resume() -> None:
    controller = AdaptiveKLController(0.1, target=0.1, horizon=1000.0)
    controller.update(5.0, 256)
    resumed = AdaptiveKLController(0.1, target=0.1, horizon=1000.0)
    resumed.load_state_dict(controller.state_dict())
    assert resumed.coefficient == controller.coefficient != 0.1


def test_sum_norm_divides_by_sequences_and_a_constant_horizon_not_by_the_padded_width() -> None:
    denominators = Denominators.of(MASK, 4)
    padded = [torch.nn.functional.pad(x, (0, 3)) for x in (LOSS, MASK)]
    for loss, mask in ((LOSS, MASK), padded):
        assert float(aggregate(loss, mask, denominators, "seq-mean-token-sum-norm")) == pytest.approx(1.25)


def test_critic_returns_contain_the_kl_penalty_that_the_advantages_contain() -> None:
    mask = torch.ones(1, 3, dtype=torch.bool)
    rewards = place_outcome_rewards(torch.tensor([1.0]), mask)
    values = torch.tensor([[0.1, 0.2, 0.3]])
    penalized, kl = penalize_kl(rewards, torch.full((1, 3), -1.0), torch.full((1, 3), -1.5), mask, 0.1, "k1")
    estimated, returns = gae(penalized, values, mask, 1.0, 1.0)
    torch.testing.assert_close(returns, 1.0 - 0.1 * kl.flip(1).cumsum(1).flip(1))
    torch.testing.assert_close(estimated, returns - values)


def test_value_loss_has_its_one_half() -> None:
    loss, _ = value_loss(torch.tensor([[3.0]]), torch.zeros(1, 1), torch.zeros(1, 1), None)
    assert loss.item() == 4.5


def test_variance_of_close_values_is_not_negative() -> None:
    """E[x^2] - E[x]^2 in float32 gives -0.0833 here, and NaN after the root."""
    x = torch.tensor([[1000.0, 1000.1, 1000.2, 1000.3]])
    mask = torch.ones_like(x, dtype=torch.bool)
    assert masked_var(x, mask).item() == pytest.approx(0.016667, rel=1e-3)
    assert torch.isfinite(whiten(x, mask)).all()


def test_value_clip_metric_is_not_always_zero() -> None:
    _, metrics = value_loss(
        torch.tensor([[0.9, 0.4, 1.5, -0.4, 3.0]]),
        torch.tensor([[0.5, 0.5, 0.5, 0.5, 0.0]]),
        torch.tensor([[1.0, 1.0, 1.0, 0.0, 20.0]]),
        None,
        clip=0.2,
    )
    assert metrics.finalize()["critic/clip_frac"] == pytest.approx(0.4)


def test_kl_in_reward_does_not_count_observation_tokens() -> None:
    """A drift of -4 on a tool token would cost about 0.1 * exp(4)."""
    mask = torch.tensor([[True, False, True]])
    rewards = place_outcome_rewards(torch.tensor([1.0]), mask)
    penalized, _ = penalize_kl(
        rewards, torch.tensor([[-1.0, -5.0, -1.0]]), torch.tensor([[-1.0, -1.0, -1.0]]), mask, 0.1, "k3"
    )
    assert torch.equal(penalized, rewards)


def test_plus_names_of_the_kl_loss_are_implemented() -> None:
    """Value of the estimator, gradient of k2; a suffix that is not stripped ends in an error."""
    log_probs = torch.tensor([[-3.0]], requires_grad=True)
    for name, value in (("k1+", -3.0), ("k3+", 16.085537), ("low_var_kl+", 16.085537)):
        kl = kl_estimate(log_probs, torch.zeros(1, 1), None, name)
        (gradient,) = torch.autograd.grad(kl.sum(), log_probs)
        assert (kl.item(), gradient.item()) == pytest.approx((value, -3.0))


def test_k3_as_a_loss_still_holds_back_the_tokens_that_drifted_most() -> None:
    """With an output clip at 10 the gradient would be zero beyond a drift of -2.6."""
    log_probs = torch.tensor([[-4.0]], requires_grad=True)
    kl_estimate(log_probs, torch.zeros(1, 1), None, "k3").sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.item() < -50


def test_positive_examples_are_not_weighed_by_the_number_of_micro_batches() -> None:
    """Normalised where it is computed, the term below would be 3 with single rows instead of 5/3."""
    log_probs = -torch.tensor([[1.0, 0.0], [2.0, 2.0], [4.0, 0.0]])
    mask = torch.tensor([[True, False], [True, True], [True, False]])
    correct = torch.tensor([True, True, False])
    denominators = Denominators.of(mask, 2, correct)
    for size in (1, 2, 3):
        parts = zip(log_probs.split(size), correct.split(size), mask.split(size), strict=True)
        assert sum(float(positive_nll(*part, denominators)) for part in parts) == pytest.approx(5 / 3)


def test_a_correct_answer_with_a_shaped_reward_of_zero_is_still_correct() -> None:
    """Correctness is the task's metric; the reward may have been shaped."""
    prompt = Prompt(0, "", "", (1, 2))
    trajectories = [
        Trajectory(prompt, sample, (3,), (-1.0,), "length", 0, reward=reward, metric=metric)
        for sample, (reward, metric) in enumerate([(0.0, 1.0), (0.1, 0.0), (-1.0, 1.0)])
    ]
    shaped = shaped_rewards(trajectories, Algorithm(), longest_response=1)
    found = rollout_batch(trajectories, shaped, pad_token_id=0).correct
    assert found is not None
    assert found.tolist() == [True, False, True]


def test_warm_up_of_k_steps_is_not_described_as_k_minus_1() -> None:
    algorithm = Algorithm(policy_training_start_step=1)
    card = dict(algorithm_card(algorithm, rows_per_rollout=64, mini_batch_size=64, task_type="reasoning"))
    assert (
        card["critic warm-up"]
        == "exactly 1 PPO step trains the critic only; the actor learns from step 1 on, counted from 0"
    )


def test_the_soft_punishment_has_a_floor() -> None:
    """Without one a response of 18 tokens loses 1.5."""
    assert overlong_penalty(torch.tensor([18]), max_length=16, buffer_length=4, penalty=1.0).item() == 1.0


def test_truncation_is_never_rewarded() -> None:
    """A factor below 1 on a negative reward would raise it; such a combination is refused when the config is loaded."""
    config = Config(
        runner={"task_type": "reasoning"},
        cluster={"component_placement": {"actor,critic,rollout,reward": "all"}},
        algorithm={"reward_scaling": {}, "overlong": {"stop_properly_coef": 0.5}},
    )
    (rule,) = (rule for rule in broken(config) if rule.key == "algorithm.overlong.stop_properly_coef")
    assert "would reward truncation" in text_of(rule.message, config)


def random_batch() -> RolloutBatch:
    """Twelve rows of up to six actions in groups of three, an outcome reward at the end of each."""
    numbers = torch.Generator().manual_seed(4)
    mask = torch.arange(6) < torch.randint(2, 7, (12, 1), generator=numbers)
    rewards = place_outcome_rewards(torch.randn(12, generator=numbers), mask)
    group_ids, rows = torch.arange(12) // 3, torch.ones(12, dtype=torch.bool)
    return RolloutBatch({}, mask, rows, group_ids, rewards, torch.zeros(12, 6), values=torch.zeros(12, 6))


@pytest.mark.parametrize("adv_type", ESTIMATORS)
def test_no_estimator_ignores_a_kl_in_the_reward(adv_type: str) -> None:
    batch, algorithm = random_batch(), Algorithm(adv_type=adv_type)
    plain = advantages(batch, algorithm)[0]
    drift = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(0))
    batch.rewards, _ = penalize_kl(batch.rewards, drift, torch.zeros_like(drift), batch.mask, 0.5, "k1")
    assert not torch.allclose(advantages(batch, algorithm)[0], plain, atol=1e-2)


@pytest.mark.parametrize("adv_type", [name for name, estimator in ESTIMATORS.items() if not estimator.values])
def test_what_makes_no_returns_trains_no_critic(adv_type: str) -> None:
    """The estimator says that there are none, and a config that builds a critic all the same is refused."""
    assert advantages(random_batch(), Algorithm(adv_type=adv_type))[1] is None
    config = Config(
        runner={"task_type": "reasoning"},
        cluster={"component_placement": {"actor,critic,rollout,reward": "all"}},
        algorithm={"adv_type": adv_type, "group_size": 2},
        critic={"use_critic_model": True},
    )
    assert "critic.use_critic_model" in [rule.key for rule in broken(config)]


def test_what_stands_before_an_observation_keeps_its_reward_in_reinforce_plus_plus() -> None:
    """A return that starts anew at every masked token would be 0 for the first turn, and the same after whitening."""
    batch = random_batch()
    batch.action_mask = torch.tensor([[1, 1, 0, 1, 1, 0]], dtype=torch.bool).expand(12, 6).contiguous()
    batch.rewards = place_outcome_rewards(torch.arange(12).float(), batch.action_mask)
    found = advantages(batch, Algorithm(adv_type="reinforce_plus_plus"))[0]
    for row in found:
        assert len(set(row[[0, 1, 3, 4]].tolist())) == 1
    assert found[0, 0] < 0 < found[-1, 0]


def test_whitening_is_over_the_rollout_and_not_over_mini_batches() -> None:
    batch = random_batch()
    batch.advantages, _ = advantages(batch, Algorithm(gae_lambda=0.5))
    active = batch.advantages[batch.mask]
    assert active.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert active.var().item() == pytest.approx(1.0, abs=1e-5)
    parts = mini_batches(batch, 4, torch.Generator().manual_seed(0))
    means = [part.advantages[part.mask].mean().item() for part in parts if part.advantages is not None]
    assert min(map(abs, means)) > 0.01


def test_the_default_kl_loss_regularises() -> None:
    """The expected gradient of k1 is zero. Exactly, over the whole vocabulary: sum_v pi(v) of the gradient of K(v)."""
    logits = torch.tensor([2.0, 1.0, 0.0], requires_grad=True)
    log_probs = logits.log_softmax(-1)
    reference = torch.full((3,), 1 / 3).log()
    kl = kl_estimate(log_probs, reference, None, Algorithm().kl_loss_type)  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad((log_probs.exp().detach() * kl).sum(), logits)
    assert gradient.abs().max() > 0.1


@pytest.mark.parametrize("adv_type", ESTIMATORS)
def test_every_estimator_gets_rows_that_say_whether_they_are_correct(adv_type: str) -> None:
    trajectories = [
        Trajectory(
            Prompt(0, "", "", (1, 2)), sample, (3,), (-1.0,), "stop", 0, reward=1.0 - sample, metric=1.0 - sample
        )
        for sample in range(2)
    ]
    shaped = shaped_rewards(trajectories, Algorithm(adv_type=adv_type, group_size=2), longest_response=1)
    found = rollout_batch(trajectories, shaped, pad_token_id=0).correct
    assert found is not None
    assert found.tolist() == [True, False]


def test_the_soft_punishment_counts_every_sampled_token() -> None:
    """Of the whole response, and none of the prompt."""
    prompt = Prompt(0, "", "", (1,) * 9)
    trajectories = [Trajectory(prompt, 0, (3,) * length, (-1.0,) * length, "stop", 0) for length in (3, 4, 5)]
    shaped = shaped_rewards(trajectories, Algorithm(overlong={"buffer_length": 2, "max_length": 5}), longest_response=5)
    assert shaped.rewards.tolist() == [0.0, -0.5, -1.0]
