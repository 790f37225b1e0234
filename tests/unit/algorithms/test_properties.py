"""Which test holds each property of the algorithms, and the properties that belong to no single function.

`PROPERTIES` is the table: a property of the mathematics or of the training loop, and the tests that would fail without
it. Names are checked here, so that a test cannot be renamed or removed without its property being seen to go.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl_platform.algorithms.advantages import advantages
from rl_platform.algorithms.kl import sequence_mean_kl
from rl_platform.algorithms.mismatch import mismatch_weights
from rl_platform.algorithms.rewards import penalize_kl, place_outcome_rewards
from rl_platform.config.estimators import ESTIMATORS
from rl_platform.config.schema.algorithm import Algorithm, RolloutIS
from rl_platform.records import RolloutBatch

END_TO_END = "integration/test_batch_layout_invariance.py"
HERE = "unit/algorithms/test_properties.py"

PROPERTIES = {
    "micro-batches change nothing": [
        "unit/algorithms/test_losses.py::test_micro_batches_change_nothing",
        "unit/algorithms/test_aggregation.py::test_any_split_into_micro_batches_sums_to_the_golden",
        "unit/algorithms/test_aggregation.py::test_a_fully_masked_micro_batch_gives_zero_with_a_graph",
        "unit/engines/test_training.py::test_micro_batches_change_nothing",
        f"{END_TO_END}::test_one_process",
    ],
    "data-parallel ranks change nothing": [
        "unit/algorithms/test_losses.py::test_data_parallel_ranks_change_nothing",
        "unit/engines/test_ranks.py::test_parameters_and_outputs",
        f"{END_TO_END}::test_two_ranks",
    ],
    "observation tokens change nothing, whatever stands there": [
        f"{HERE}::test_observation_tokens_change_neither_kl_nor_advantages_nor_returns",
        "unit/algorithms/test_advantages.py::test_observation_tokens_change_nothing",
        "unit/algorithms/test_groups.py::test_reward_to_go_passes_observations",
        "unit/algorithms/test_losses.py::test_gaps_and_padding_change_nothing",
    ],
    "padding on either side changes nothing": [
        "unit/algorithms/test_advantages.py::test_padding_changes_nothing",
        "unit/algorithms/test_groups.py::test_shuffled_rows_and_padding_change_nothing",
        "unit/algorithms/test_losses.py::test_gaps_and_padding_change_nothing",
        "unit/models/test_packed.py::test_padding_changes_nothing",
        f"{END_TO_END}::test_one_process",
    ],
    "lambda 1 is return minus value, lambda 0 the one-step error": [
        "unit/algorithms/test_advantages.py::test_lambda_1_gives_return_minus_value_and_lambda_0_one_step_errors",
    ],
    "decoupled lambdas that are equal are plain gae": [
        "unit/algorithms/test_gae.py::test_decoupled_with_equal_lambdas_is_one_pass",
        "unit/algorithms/test_advantages.py::test_equal_lambdas_per_row_equal_one_lambda",
    ],
    "shuffled rows give shuffled results": [
        "unit/algorithms/test_advantages.py::test_shuffled_rows_give_shuffled_results",
        "unit/algorithms/test_groups.py::test_shuffled_rows_and_padding_change_nothing",
        "unit/algorithms/test_policy_kinds.py::test_rows_do_not_depend_on_each_other",
    ],
    "advantages of a group sum to 0 and ignore a constant": [
        "unit/algorithms/test_groups.py::test_a_group_sums_to_zero_and_a_constant_changes_nothing",
    ],
    "rloo is n / (n - 1) of the score minus the mean": [
        "unit/algorithms/test_groups.py::test_rloo_is_dr_grpo_times_n_over_n_minus_1",
    ],
    "the first optimizer step of a rollout is REINFORCE": [
        "unit/algorithms/test_policy_loss.py::test_first_step_is_reinforce",
        "unit/algorithms/test_policy_kinds.py::test_first_step_is_reinforce",
        "unit/runners/test_schedule.py::test_the_first_optimizer_step_of_a_rollout_is_reinforce",
    ],
    "infinite clips of the policy loss are none": [
        "unit/algorithms/test_policy_loss.py::test_infinite_bounds_switch_clipping_off",
    ],
    "an infinite value clip is none, an infinite Huber delta the squared error": [
        "unit/algorithms/test_value_loss.py::test_infinite_clip_is_no_clip",
        "unit/algorithms/test_value_loss.py::test_huge_huber_delta_is_the_squared_error",
    ],
    "every KL form has the expected gradient it claims": [
        "unit/algorithms/test_kl.py::test_expected_gradient_by_enumeration",
        "unit/algorithms/test_kl.py::test_the_score_form_is_right_off_policy_too",
        "unit/algorithms/test_kl.py::test_full_kl",
    ],
    "truncation without bounds is importance sampling, engines that agree have weight 1": [
        f"{HERE}::test_truncation_without_bounds_is_plain_importance_sampling",
        "unit/algorithms/test_mismatch.py::test_engines_that_agree_have_weight_one",
    ],
    "the adaptive KL coefficient moves the right way, is bounded and survives a checkpoint": [
        "unit/algorithms/test_kl.py::test_adaptive_step_has_the_right_sign_and_is_bounded",
        "unit/algorithms/test_kl.py::test_controller_state_survives_save_and_load",
        "unit/runners/test_kl_control.py::test_the_adaptive_coefficient_survives_a_checkpoint_of_the_runner",
    ],
    "rows that PF-PPO draws keep their fields together": [
        "unit/algorithms/test_pf_ppo.py::test_resampled_rows_still_belong_together",
        "unit/runners/test_schedule.py::test_both_models_train_on_the_draw_and_metrics_are_of_the_rollout",
    ],
    "dynamic sampling splits no group, ends, and repeats for a seed": [
        "unit/algorithms/test_dynamic_sampling.py::test_whole_groups_termination_and_conservation",
    ],
    "balancing moves no row to another mini-batch": [
        "unit/engines/test_training.py::test_ranks_do_not_change_what_a_mini_batch_holds",
        "unit/algorithms/test_balance.py::test_every_index_once_and_equal_counts",
    ],
    "critic warm-up is exact": [
        "unit/runners/test_schedule.py::test_exactly_k_steps_train_the_critic_only",
    ],
    "a resumed run goes on as if it had not stopped": [
        "integration/test_resume.py::test_stopped_by_max_steps",
        "integration/test_resume.py::test_stopped_by_sigkill",
    ],
    "autograd agrees with finite differences": [
        "unit/algorithms/test_policy_loss.py::test_gradient_matches_finite_differences",
        "unit/algorithms/test_policy_kinds.py::test_gradient_matches_finite_differences",
        "unit/algorithms/test_value_loss.py::test_gradient_matches_finite_differences",
        "unit/algorithms/test_losses.py::test_losses_match_finite_differences",
    ],
}


def test_every_property_has_its_tests(test_exists: Any) -> None:
    assert all(PROPERTIES.values())
    assert [test for tests in PROPERTIES.values() for test in tests if not test_exists(test)] == []


def with_gaps(tensor: Tensor, gaps: list[int]) -> Tensor:
    """[B,T] with as many columns of NaN (of False, for masks) in front of each column as `gaps` says."""
    filling = False if tensor.dtype == torch.bool else math.nan
    columns: list[Tensor] = []
    for column, gap in zip(tensor.unbind(dim=1), gaps, strict=True):
        columns += [torch.full_like(column, filling)] * gap + [column]
    return torch.stack(columns, dim=1)


@pytest.mark.parametrize("adv_type", ESTIMATORS)
@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 1000), gaps=st.lists(st.integers(0, 2), min_size=6, max_size=6))
def test_observation_tokens_change_neither_kl_nor_advantages_nor_returns(
    adv_type: str, seed: int, gaps: list[int]
) -> None:
    """Through reward placement, the KL penalty and the estimator, with NaN for everything said about observations."""
    numbers = torch.Generator().manual_seed(seed)
    mask = torch.rand(5, 6, generator=numbers) < 0.7
    mask[:, 2] = True
    scores = torch.randn(5, generator=numbers)
    log_probs, reference, values = (torch.randn(5, 6, generator=numbers) for _ in range(3))

    def estimate(widen: Any) -> tuple[float, Tensor, Tensor | None]:
        wide = widen(mask)
        placed = place_outcome_rewards(scores, wide)
        rewards, kl = penalize_kl(placed, widen(log_probs), widen(reference), wide, 0.1, "k3")
        batch = RolloutBatch({}, wide, torch.ones(5, dtype=torch.bool), torch.arange(5) // 2, rewards, placed)
        found, returns = advantages(replace(batch, values=widen(values)), Algorithm(adv_type=adv_type, gamma=0.9))
        assert not found[~wide].any()
        return sequence_mean_kl(kl, wide), found[wide], None if returns is None else returns[wide]

    narrow, wide = estimate(lambda tensor: tensor), estimate(lambda tensor: with_gaps(tensor, gaps))
    assert wide[0] == pytest.approx(narrow[0], rel=1e-6)
    torch.testing.assert_close(wide[1], narrow[1], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(wide[2], narrow[2], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence"])
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 1000))
def test_truncation_without_bounds_is_plain_importance_sampling(level: str, seed: int) -> None:
    numbers = torch.Generator().manual_seed(seed)
    mask = torch.rand(4, 5, generator=numbers) < 0.7
    log_probs, rollout_log_probs = (torch.randn(4, 5, generator=numbers) for _ in range(2))
    correction = RolloutIS(mode="truncate", level=level, low=0.0, high=None)
    u = torch.where(mask, log_probs - rollout_log_probs, 0.0)
    expected = (u if level == "token" else u.sum(dim=1, keepdim=True).expand_as(u)).exp()
    found = mismatch_weights(log_probs, rollout_log_probs, mask, correction)[0]
    torch.testing.assert_close(found, torch.where(mask, expected, 0.0))
