"""Defects that public PPO systems had or have, and the tests that would fail if one came here.

`DEFECTS` is the table; a test checks the names in it. Here are the tests that belong to no other file.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from rl_platform.algorithms.advantages import advantages
from rl_platform.algorithms.kl import kl_estimate
from rl_platform.algorithms.rewards import penalize_kl, place_outcome_rewards
from rl_platform.algorithms.statistics import masked_var, whiten
from rl_platform.config.rules import broken
from rl_platform.config.schema import Config
from rl_platform.config.schema.algorithm import ESTIMATORS, Algorithm
from rl_platform.records import Prompt, RolloutBatch, Trajectory
from rl_platform.runners.trajectories import rollout_batch, shaped_rewards

TESTS = Path(__file__).parents[2]
ALGORITHMS, RUNNERS = "unit/algorithms", "unit/runners"
HERE = f"{ALGORITHMS}/test_known_defects.py"
END_TO_END = "integration/test_batch_layout_invariance.py"

DEFECTS = {
    "NeMo-RL PPO: dynamic sampling is accepted and never called": [
        "integration/test_resume.py::test_surplus_groups_are_part_of_a_checkpoint",
        f"{RUNNERS}/test_dynamic_sampling.py::test_refills_until_the_step_is_full_in_the_order_of_prompts",
    ],
    "NeMo-RL: the loss of positive examples is normalised per micro-batch": [
        f"{ALGORITHMS}/test_policy_loss_kinds.py::test_the_denominator_is_the_mini_batchs"
    ],
    "NeMo-RL: correctness and length of shaped rewards, a punishment without a floor": [
        f"{HERE}::test_a_correct_answer_with_a_shaped_reward_of_zero_is_still_correct",
        f"{RUNNERS}/test_reasoning.py::test_every_key_reaches_the_batch",
        f"{RUNNERS}/test_reasoning.py::test_length_penalties_count_what_the_policy_wrote",
        f"{ALGORITHMS}/test_shaping.py::test_soft_punishment_has_a_floor",
    ],
    "NeMo-RL GRPO: rounding as a deviation; lone successes filtered out": [
        f"{ALGORITHMS}/test_groups.py::test_scores_that_differ_by_rounding_only_give_exactly_zero",
        f"{RUNNERS}/test_dynamic_sampling.py::test_a_lone_success_is_kept_with_its_failures",
    ],
    "NeMo-RL PPO: a critic is trained on the returns that raw rewards do not have": [
        f"{HERE}::test_what_makes_no_returns_trains_no_critic",
        "integration/test_controls.py::test_an_estimator_without_a_critic_builds_none",
    ],
    "verl: means over tokens per micro-batch, and a critic's step that grows with their number": [
        f"{ALGORITHMS}/test_aggregation.py::test_any_split_into_micro_batches_sums_to_the_golden",
        f"{ALGORITHMS}/test_losses.py::test_micro_batches_change_nothing",
        f"{END_TO_END}::test_a_mean_per_micro_batch_would_be_seen",
        f"{END_TO_END}::test_one_process",
    ],
    "verl: names with a + and the full KL are documented and not implemented": [
        f"{ALGORITHMS}/test_kl.py::test_values_and_gradients",
        f"{ALGORITHMS}/test_kl.py::test_aliases",
        f"{ALGORITHMS}/test_kl.py::test_full_kl",
        "unit/components/test_learner.py::test_full_kl_to_the_reference",
        f"{RUNNERS}/test_kl_control.py"
        "::test_a_full_kl_comes_from_the_actor_and_the_states_of_the_reference_go_no_further",
    ],
    "verl: reinforce++ loses the reward before an observation": [
        f"{ALGORITHMS}/test_groups.py::test_reward_to_go_passes_observations"
    ],
    "verl: a terminal reward on a masked tail, or behind a rejected token, is dropped": [
        f"{ALGORITHMS}/test_advantages.py::test_several_turns",
        f"{RUNNERS}/test_mismatch_correction.py::test_rejected_tokens_keep_their_place_in_the_estimator",
    ],
    "verl: the adaptive KL coefficient is lost on resume": [
        f"{RUNNERS}/test_kl_control.py::test_the_adaptive_coefficient_survives_a_checkpoint_of_the_runner"
    ],
    "verl: PF-PPO pairs advantages with other rows": [
        f"{ALGORITHMS}/test_pf_ppo.py::test_resampled_rows_still_belong_together",
        f"{RUNNERS}/test_step_order.py::test_both_models_train_on_the_draw_and_metrics_are_of_the_rollout",
    ],
    "verl: balancing that cannot be chosen changes mini-batches; whitening per mini-batch": [
        "unit/engines/test_training.py::test_ranks_do_not_change_what_a_mini_batch_holds",
        f"{ALGORITHMS}/test_advantages.py::test_dispatch_whitens_advantages_but_never_returns",
    ],
    "verl: clip_ratio alone has no effect; warm-up is one step short": [
        "unit/config/test_explain.py::test_names_of_other_systems",
        f"{ALGORITHMS}/test_card.py::test_reasoning_card",
        f"{RUNNERS}/test_step_order.py::test_exactly_k_steps_train_the_critic_only",
    ],
    "verl: seq-mean-token-sum-norm divides by the padded width and not by the sequences": [
        f"{ALGORITHMS}/test_aggregation.py::test_any_split_into_micro_batches_sums_to_the_golden",
        f"{ALGORITHMS}/test_losses.py::test_gaps_and_padding_change_nothing",
    ],
    "slime PPO: observation tokens are transitions, and the last token gets the reward": [
        f"{ALGORITHMS}/test_advantages.py::test_several_turns",
        f"{ALGORITHMS}/test_properties.py::test_observation_tokens_change_neither_kl_nor_advantages_nor_returns",
    ],
    "slime PPO: returns without the KL, a value loss without 1/2, a variance in one pass, k1 as the KL loss": [
        f"{RUNNERS}/test_kl_control.py::test_a_rollout_uses_the_coefficient_from_before_its_own_kl",
        f"{ALGORITHMS}/test_value_loss.py::test_clip_and_huber",
        f"{HERE}::test_variance_of_close_values_is_not_negative",
        f"{HERE}::test_the_default_kl_loss_regularises",
    ],
    "slime GRPO: the KL coefficient is ignored": [f"{HERE}::test_no_estimator_ignores_a_kl_in_the_reward"],
    "RLinf: the metric of the value clip is always 0; rewards go to the last padded column": [
        f"{ALGORITHMS}/test_value_loss.py::test_clip_and_huber",
        f"{ALGORITHMS}/test_rewards.py::test_outcome_goes_to_the_last_action",
    ],
}


def test_every_defect_has_its_guard() -> None:
    def exists(test: str) -> bool:
        file, _, name = test.partition("::")
        tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
        return name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}

    assert [test for tests in DEFECTS.values() for test in tests if not exists(test)] == []


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


def random_batch() -> RolloutBatch:
    """Twelve rows of up to six actions in groups of three, an outcome reward at the end of each."""
    numbers = torch.Generator().manual_seed(4)
    mask = torch.arange(6) < torch.randint(2, 7, (12, 1), generator=numbers)
    rewards = place_outcome_rewards(torch.randn(12, generator=numbers), mask)
    group_ids, rows = torch.arange(12) // 3, torch.ones(12, dtype=torch.bool)
    zeros, half = torch.zeros(12, 6), torch.full((12, 6), 0.5)
    estimates = {"values": zeros, "log_probs": half.log(), "squared_probs": half, "baselines": torch.zeros(12)}
    return RolloutBatch({}, mask, rows, group_ids, rewards, zeros, **estimates)


# distillation reads no rewards; the rules refuse KL terms beside it
@pytest.mark.parametrize("adv_type", [name for name in ESTIMATORS if name != "distillation"])
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


def test_variance_of_close_values_is_not_negative() -> None:
    """E[x^2] - E[x]^2 in float32 gives -0.0833 here, and NaN after the root."""
    x = torch.tensor([[1000.0, 1000.1, 1000.2, 1000.3]])
    mask = torch.ones_like(x, dtype=torch.bool)
    assert masked_var(x, mask).item() == pytest.approx(0.016667, rel=1e-3)
    assert torch.isfinite(whiten(x, mask)).all()


def test_the_default_kl_loss_regularises() -> None:
    """The expected gradient of k1 is zero. Exactly, over the whole vocabulary: sum_v pi(v) of the gradient of K(v)."""
    logits = torch.tensor([2.0, 1.0, 0.0], requires_grad=True)
    log_probs = logits.log_softmax(-1)
    reference = torch.full((3,), 1 / 3).log()
    kl = kl_estimate(log_probs, reference, None, Algorithm().kl_loss_type)  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad((log_probs.exp().detach() * kl).sum(), logits)
    assert gradient.abs().max() > 0.1
