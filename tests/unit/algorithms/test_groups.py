"""Estimators without a critic: goldens, and what must not change them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from neutral_batches import neutral_batch
from torch import Tensor

from rl_platform.algorithms.advantages import advantages, estimator
from rl_platform.algorithms.reward_sums import reward_to_go
from rl_platform.algorithms.rewards import place_outcome_rewards
from rl_platform.algorithms.statistics import whiten, whiten_rows
from rl_platform.algorithms.variants.estimator_kinds import KINDS, leave_one_out, local_penalties
from rl_platform.algorithms.variants.group_estimators import grpo, rloo
from rl_platform.config.schema.algorithm import ESTIMATORS, Algorithm
from rl_platform.errors import Diverged
from rl_platform.records import RolloutBatch

NAN = float("nan")
SCORES = torch.tensor([1.0, 0, 0, 1, 0.5, 0.5, 0.5, 0.5, 1, 0, 0, 0, 3])
GROUPS = torch.tensor([7, 7, 7, 7, 2, 2, 2, 2, 9, 9, 9, 9, 4])


def close(actual: Tensor, expected: Tensor | list[float]) -> None:
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=1e-5, atol=1e-6)


def batch_of(scores: Tensor, mask: Tensor, group_ids: Tensor, **fields: Any) -> RolloutBatch:
    rewards = torch.where(mask, place_outcome_rewards(scores, mask), NAN)
    everything = {"sample_mask": torch.ones(len(mask), dtype=torch.bool)} | fields
    return neutral_batch(mask, group_ids=group_ids, rewards=rewards, **everything)


def test_optimal_baseline_weighs_scores_by_length() -> None:
    """Group 7: scores 1, 0, 0 of lengths 1, 2, 3: b = 1 / 6. Group 2: 3 and 1 of lengths 3 and 1: b = 10 / 4.

    Group 5 has one sample, group 6 equal scores.
    """
    scores, groups = torch.tensor([1.0, 0, 0, 3, 1, 4, 2, 2]), torch.tensor([7, 7, 7, 2, 2, 5, 6, 6])
    lengths = torch.tensor([1, 2, 3, 3, 1, 2, 1, 3])
    mask = torch.arange(3) < lengths[:, None]
    estimated, returns = advantages(batch_of(scores, mask, groups), Algorithm(adv_type="opo"))
    assert returns is None
    expected = torch.tensor([5 / 6, -1 / 6, -1 / 6, 0.5, -1.5, 0, 0, 0])
    close(estimated, torch.where(mask, expected[:, None], 0.0))


# Two responses: pi 1/2 and 1/4 with sum of squares 1/2 and 3/8: energies 1/2 and 7/8; pi 1/4 and 1/2 with 3/8 and 1/2:
# energies 7/8 and 1/2; a third token of the second, pi 1/2 and 1/2. So W is (1/2, 11/8) and (7/8, 11/8, 15/8).
PROBS = torch.tensor([[NAN, 0.5, 0.25, NAN, NAN], [NAN, 0.25, NAN, 0.5, 0.5]])
SQUARES = torch.tensor([[NAN, 0.5, 0.375, NAN, NAN], [NAN, 0.375, NAN, 0.5, 0.5]])


@pytest.mark.parametrize(
    ("scores", "weights", "expected"),
    [
        # B is 1/2 / 11/8 = 4/11, 1/2, and nothing to compare with
        ([1.0, 0.0], None, [[0, 7 / 11, 0.5, 0, 0], [0, -4 / 11, 0, -0.5, 0]]),
        # energies times 4 and 1 in the first row: W = (2, 23/8); B = 2 / 23/8 = 16/23, 23/8 / 34/8 = 23/34
        ([1.0, 0.0], [[0, 2.0, 1.0, 0, 0], [1.0] * 5], [[0, 7 / 23, 11 / 34, 0, 0], [0, -16 / 23, 0, -23 / 34, 0]]),
        ([0.3, 0.3], None, [[0.0] * 5] * 2),
    ],
    ids=["plain", "weighted", "equal"],
)
def test_optimal_token_baseline(scores: list[float], weights: Any, expected: list[list[float]]) -> None:
    """The second row has an observation at position 2, so its second token is at position 3."""
    mask = torch.tensor([[0, 1, 1, 0, 0], [0, 1, 0, 1, 1]], dtype=torch.bool)
    fields = {"log_probs": PROBS.log(), "squared_probs": SQUARES}
    fields |= {} if weights is None else {"loss_weights": torch.tensor(weights)}
    batch = batch_of(torch.tensor(scores), mask, torch.tensor([5, 5]), **fields)
    estimated, returns = advantages(batch, Algorithm(adv_type="optimal_token_baseline"))
    assert returns is None
    close(estimated, expected)
    assert bool(estimated.any()) == (scores[0] != scores[1])


def test_token_baseline_of_the_others_only() -> None:
    """Group 7 alone as above; a row of group 5 is alone, one of group 7 is filtered, but serves the baseline."""
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0]], dtype=torch.bool)
    counts = {"sample_mask": torch.tensor([False, True, True]), "compared": torch.ones(3, dtype=torch.bool)}
    one = torch.full((3, 3), 0.5)
    batch = batch_of(
        torch.tensor([1.0, 0, 1]), mask, torch.tensor([7, 7, 5]), log_probs=one.log(), squared_probs=one, **counts
    )
    estimated, _ = advantages(batch, Algorithm(adv_type="optimal_token_baseline"))
    close(estimated, [[0, 0, 0], [-0.5, -0.5, 0], [0, 0, 0]])


def test_baseline_of_the_greedy_response() -> None:
    """Scores 1 and 0.5 on the last token, a penalty of 0.25 on the first; the greedy responses have 0.5 and 1."""
    mask = torch.tensor([[0, 1, 1], [0, 1, 0]], dtype=torch.bool)
    batch = batch_of(torch.tensor([1.0, 0.5]), mask, torch.tensor([1, 2]), baselines=torch.tensor([0.5, 1.0]))
    batch.rewards[0, 1] = -0.25
    estimated, returns = advantages(batch, Algorithm(adv_type="remax"))
    assert returns is None
    close(estimated, [[0, 0.25, 0.5], [0, -0.5, 0]])


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            {"adv_type": "grpo"},
            [0.866024, -0.866024, -0.866024, 0.866024, 0, 0, 0, 0, 1.499997, -0.499999, -0.499999, -0.499999, 0],
        ),
        (
            {"adv_type": "grpo", "grpo_std_normalization": False},
            [0.5, -0.5, -0.5, 0.5, 0, 0, 0, 0, 0.75, -0.25, -0.25, -0.25, 0],
        ),
        (
            {"adv_type": "grpo", "grpo_leave_one_out": True},
            [1.154699, -1.154699, -1.154699, 1.154699, 0, 0, 0, 0, 1.0, -0.577349, -0.577349, -0.577349, 0],
        ),
        (
            {"adv_type": "rloo"},
            [0.666667, -0.666667, -0.666667, 0.666667, 0, 0, 0, 0, 1, -0.333333, -0.333333, -0.333333, 0],
        ),
    ],
)
def test_groups(keys: dict[str, Any], expected: list[float]) -> None:
    mask = torch.rand(13, 6, generator=torch.Generator().manual_seed(0)) < 0.5
    mask[:, 2] = True
    estimated, returns = advantages(batch_of(SCORES, mask, GROUPS), Algorithm(**keys))
    assert returns is None
    close(estimated, torch.where(mask, torch.tensor(expected)[:, None], 0.0))


def test_scores_that_differ_by_rounding_only_give_exactly_zero() -> None:
    mask = torch.ones(8, 1, dtype=torch.bool)
    assert not grpo(torch.full((8, 1), 0.1), mask, torch.zeros(8, dtype=torch.int64)).any()


def test_others_that_differ_by_rounding_only_do_not_amplify_the_one_that_differs() -> None:
    scores = torch.tensor([1.0, *[0.35] * 7])[:, None]
    mask = torch.ones(8, 1, dtype=torch.bool)
    close(leave_one_out(scores, mask, torch.zeros(8, dtype=torch.int64))[0], [0.65])


def test_the_deviation_of_others_that_nearly_agree_has_no_rounding_in_it() -> None:
    """A difference of sums of squares would leave 1e-5 of the lone score's square, far above the deviation itself."""
    scores = torch.tensor([1e5, 0.0, 1e-3, 2e-3], dtype=torch.float64)[:, None]
    mask = torch.ones(4, 1, dtype=torch.bool)
    found = leave_one_out(scores, mask, torch.zeros(4, dtype=torch.int64))[0, 0]
    assert found.item() == pytest.approx((1e5 - 1e-3) / (1e-3 + 1e-6), rel=1e-6)


@settings(max_examples=30)
@given(seed=st.integers(0, 1000))
def test_leave_one_out_is_what_its_name_says(seed: int) -> None:
    batch = random_batch(seed)
    batch.sample_mask = torch.rand(9, generator=torch.Generator().manual_seed(seed)) < 0.8
    scores = torch.where(batch.mask, batch.rewards, 0.0).sum(dim=1)
    expected = torch.zeros(9)
    for row in batch.sample_mask.nonzero().flatten():
        others = batch.sample_mask & (batch.group_ids == batch.group_ids[row])
        others[row] = False
        if others.any():
            deviation = scores[others].std() + 1e-6 if others.sum() > 1 else 1.0
            expected[row] = (scores[row] - scores[others].mean()) / deviation
    found = advantages(batch, Algorithm(adv_type="grpo", grpo_leave_one_out=True))[0][:, 3]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"adv_type": "grpo", "grpo_std_normalization": False}, [2 / 3, -1 / 3, 0.0]),
        ({"adv_type": "rloo"}, [1.0, -0.5, 0.0]),
        ({"adv_type": "grpo", "grpo_leave_one_out": True}, [1.0, -0.5 / (0.5**0.5 + 1e-6), 0.0]),
    ],
    ids=str,
)
def test_rows_with_a_score_are_compared_to_though_not_trained_on(keys: dict[str, Any], expected: list[float]) -> None:
    mask, groups = torch.ones(3, 2, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)
    counted = {"sample_mask": torch.tensor([True, True, False]), "compared": torch.tensor([True, True, True])}
    estimated, _ = advantages(batch_of(torch.tensor([1.0, 0.0, 0.0]), mask, groups, **counted), Algorithm(**keys))
    close(estimated, torch.tensor(expected)[:, None].expand(3, 2))


def test_bounds_hold_after_all_normalisation() -> None:
    mask = torch.ones(13, 2, dtype=torch.bool)
    mask[:, 0] = False
    batch = batch_of(SCORES, mask, GROUPS)
    plain, clipped = (
        advantages(batch, Algorithm(adv_type="grpo", advantage_clip=clip))[0] for clip in (None, (-0.6, 1.0))
    )
    assert plain.max() > 1.4
    close(clipped, plain.clamp(-0.6, 1.0))
    assert not clipped[:, 0].any()


def test_rows_that_do_not_count_stay_out_of_their_group() -> None:
    mask, groups = torch.ones(3, 2, dtype=torch.bool), torch.zeros(3, dtype=torch.int64)
    counted = torch.tensor([True, True, False])
    batch = batch_of(torch.tensor([1.0, 0.0, 100.0]), mask, groups, sample_mask=counted)
    estimated, _ = advantages(batch, Algorithm(adv_type="grpo", grpo_std_normalization=False))
    close(estimated[:, 0], [0.5, -0.5, 0.0])
    batch.sample_mask[1] = False
    assert not advantages(batch, Algorithm(adv_type="rloo"))[0].any()


@pytest.mark.parametrize(
    ("gamma", "first", "second"),
    [(1.0, [0.730297] * 3, [-1.095445] * 2), (0.9, [0.536730, 0.716976, 0.917248], [-1.085477] * 2)],
)
def test_reinforce_plus_plus(gamma: float, first: list[float], second: list[float]) -> None:
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]], dtype=torch.bool)
    batch = batch_of(torch.tensor([1.0, 0.0]), mask, torch.arange(2))
    close(advantages(batch, Algorithm(adv_type="reinforce_plus_plus", gamma=gamma))[0], [first, [*second, 0]])


@pytest.mark.parametrize(("gamma", "expected"), [(1.0, [1, 1, 0, 0, 1, 1]), (0.5, [0.125, 0.25, 0, 0, 0.5, 1])])
def test_reward_to_go_passes_observations(gamma: float, expected: list[float]) -> None:
    mask = torch.tensor([[1, 1, 0, 0, 1, 1]], dtype=torch.bool)
    close(reward_to_go(place_outcome_rewards(torch.tensor([1.0]), mask), mask, gamma)[0], expected)


LENGTHS = torch.arange(3) < torch.tensor([3, 1, 2, 2])[:, None]


@pytest.mark.parametrize(
    ("adv_type", "expected"),
    [
        ("reinforce_plus_plus_baseline", [0.449359, -0.748931, 1.048503, -1.348076]),
        ("raw", [0.149786, -1.048503, 1.348076, -1.048503]),
    ],
)
def test_whitened_scores(adv_type: str, expected: list[float]) -> None:
    batch = batch_of(torch.tensor([1.0, 0, 2, 0]), LENGTHS, torch.tensor([0, 0, 1, 1]))
    close(
        advantages(batch, Algorithm(adv_type=adv_type))[0], torch.where(LENGTHS, torch.tensor(expected)[:, None], 0.0)
    )


def test_whitened_over_sequences() -> None:
    """c = 0.5, -0.5, 1, -1 with mean 0 and unbiased variance 5 / 6, whatever the lengths."""
    batch = batch_of(torch.tensor([1.0, 0, 2, 0]), LENGTHS, torch.tensor([0, 0, 1, 1]))
    algorithm = Algorithm(adv_type="reinforce_plus_plus_baseline", whiten_over="sequences")
    expected = torch.tensor([0.547723, -0.547723, 1.095445, -1.095445])[:, None]
    close(advantages(batch, algorithm)[0], torch.where(LENGTHS, expected, 0.0))


def test_whitening_over_sequences_ignores_rows_without_actions() -> None:
    x, mask = torch.tensor([[1.0, NAN], [3.0, 3.0], [NAN, NAN]]), torch.tensor([[1, 0], [1, 1], [0, 0]]).bool()
    close(whiten_rows(x, mask), [[-0.707107, 0], [0.707107, 0.707107], [0, 0]])


def test_each_token_answers_for_its_own_penalty() -> None:
    """Rewards 1 at the end; penalties 0.1, 0.2, 0.4 on three actions with an observation among them."""
    mask = torch.tensor([[1, 0, 1, 1]], dtype=torch.bool)
    penalties = torch.tensor([[0.1, 0, 0.2, 0.4]])
    rewards = torch.tensor([[-0.1, NAN, -0.2, 0.6]])
    close(local_penalties(rewards, penalties, mask, 1.0)[0], [0.9, 0, 0.8, 0.6])
    close(local_penalties(rewards, penalties, mask, 0.5)[0], [0.15, 0, 0.3, 0.6])
    close(reward_to_go(rewards, mask, 1.0)[0], [0.3, 0, 0.4, 0.6])
    batch = batch_of(torch.zeros(1), mask, torch.zeros(1, dtype=torch.int64), kl_penalties=penalties)
    batch.rewards = rewards
    local, to_go = (
        advantages(batch, Algorithm(adv_type="reinforce_plus_plus", reinforce_kl_credit=credit))[0]
        for credit in ("local", "to_go")
    )
    close(local, whiten(local_penalties(rewards, penalties, mask, 1.0), mask))
    close(to_go, whiten(reward_to_go(rewards, mask, 1.0), mask))


def test_raw_is_whitened_only_if_asked() -> None:
    scores = torch.tensor([1.0, 0, 2, 0])
    batch = batch_of(scores, LENGTHS, torch.arange(4))
    estimated, _ = advantages(batch, Algorithm(adv_type="raw", normalize_advantages=False))
    close(estimated, torch.where(LENGTHS, scores[:, None], 0.0))


@pytest.mark.parametrize("keys", [{}, {"gae_lambda_value": 1.0, "length_adaptive_alpha": 0.3}], ids=str)
def test_a_row_that_was_cut_goes_on_with_a_value(keys: dict[str, Any]) -> None:
    """As where the end is marked; the second row has stopped by itself."""
    mask = torch.tensor([[1, 1, 0, 1, 1, 0], [0, 1, 1, 1, 0, 0]], dtype=torch.bool)
    values = torch.where(mask, torch.rand(2, 6, generator=torch.Generator().manual_seed(0)), NAN)
    end_values = torch.zeros(2, 6)
    end_values[0, 4] = 0.7
    batch = batch_of(torch.tensor([0.5, 1.0]), mask, torch.arange(2), values=values, end_values=end_values)
    algorithm = Algorithm(gamma=0.9, gae_lambda=0.8, normalize_advantages=False, **keys)
    found = advantages(batch, algorithm)
    batch.ends = torch.zeros(2, 6, dtype=torch.bool)
    batch.ends[0, 4] = batch.ends[1, 3] = True
    for ours, expected in zip(found, advantages(batch, algorithm), strict=True):
        assert ours is not None
        assert expected is not None
        close(ours, expected)
    assert found[1] is not None
    assert found[1][0, 4].item() == pytest.approx(0.5 + 0.9 * 0.7)
    assert found[1][1, 3].item() == pytest.approx(1.0)


def random_batch(seed: int, **fields: Any) -> RolloutBatch:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(9, 7, generator=generator) < 0.6
    mask[:, 3] = True
    groups = torch.randint(3, (9,), generator=generator)
    return batch_of(torch.randn(9, generator=generator), mask, groups, **fields)


CRITIC_FREE = [name for name, estimator in ESTIMATORS.items() if not estimator.values]
GROUPED = [{"adv_type": "grpo"}, {"adv_type": "grpo", "grpo_std_normalization": False}, {"adv_type": "rloo"}]


@pytest.mark.parametrize("keys", GROUPED)
@settings(max_examples=20)
@given(seed=st.integers(0, 1000), shift=st.sampled_from([-3.0, 0.5, 8.0]))
def test_a_group_sums_to_zero_and_a_constant_changes_nothing(keys: dict[str, Any], seed: int, shift: float) -> None:
    batch = random_batch(seed)
    estimated = advantages(batch, Algorithm(**keys))[0][:, 3]
    sums = torch.zeros(3).index_add_(0, batch.group_ids, estimated)
    torch.testing.assert_close(sums, torch.zeros(3), rtol=0, atol=1e-5)
    last = batch.mask & (batch.mask.flip(1).cumsum(1).flip(1) == 1)
    batch.rewards = torch.where(last, batch.rewards + shift, batch.rewards)
    torch.testing.assert_close(advantages(batch, Algorithm(**keys))[0][:, 3], estimated, rtol=1e-4, atol=1e-5)


@settings(max_examples=20)
@given(seed=st.integers(0, 1000))
def test_rloo_is_dr_grpo_times_n_over_n_minus_1(seed: int) -> None:
    batch = random_batch(seed)
    sizes = torch.bincount(batch.group_ids, minlength=3)[batch.group_ids][:, None]
    scaled = grpo(batch.rewards, batch.mask, batch.group_ids, False) * sizes / (sizes - 1).clamp(min=1)
    close(rloo(batch.rewards, batch.mask, batch.group_ids), scaled)


@pytest.mark.parametrize("adv_type", CRITIC_FREE)
@settings(max_examples=10)
@given(seed=st.integers(0, 1000))
def test_shuffled_rows_and_padding_change_nothing(adv_type: str, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    probs, baselines = torch.rand(9, 7, generator=draw), torch.rand(9, generator=draw)
    fields = {"log_probs": probs.log(), "squared_probs": probs.square(), "baselines": baselines}
    algorithm, batch = Algorithm(adv_type=adv_type), random_batch(seed, **fields)
    plain, _ = advantages(batch, algorithm)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(seed))
    close(advantages(batch.select(order), algorithm)[0], plain[order])
    batch.action_mask = torch.nn.functional.pad(batch.action_mask, (3, 37))
    for name in ("rewards", "log_probs", "squared_probs"):
        setattr(batch, name, torch.nn.functional.pad(getattr(batch, name), (3, 37), value=NAN))
    padded, _ = advantages(batch, algorithm)
    close(padded[:, 3:10], plain)
    assert not padded[~batch.mask].any()


def test_names_and_functions_belong_together() -> None:
    assert {"gae", *KINDS} == {*ESTIMATORS}


@pytest.mark.parametrize("adv_type", ESTIMATORS)
def test_needs_are_what_the_estimator_reads(adv_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules refuse a config by its needs: a key that is not among them would be refused, or would have no effect."""
    read: set[str] = set()

    def noted(self: object, name: str) -> Any:
        read.add(name)
        return object.__getattribute__(self, name)

    fields = {"values": torch.zeros(9, 7), "baselines": torch.zeros(9)}
    batch = random_batch(0, log_probs=torch.zeros(9, 7), squared_probs=torch.ones(9, 7), **fields)
    algorithm, needs = Algorithm(adv_type=adv_type), ESTIMATORS[adv_type]
    for kind in (RolloutBatch, Algorithm):
        monkeypatch.setattr(kind, "__getattribute__", noted)
    estimator(adv_type)(batch, algorithm)
    monkeypatch.undo()
    assert (needs.values, needs.groups) == ("values" in read, "group_ids" in read)
    assert (needs.greedy, needs.squared_probs) == ("baselines" in read, "squared_probs" in read)
    shared = {"rollout_is"}
    assert {*Algorithm.model_fields} & read <= {*needs.keys} | shared


@pytest.mark.parametrize("adv_type", ESTIMATORS)
def test_numbers_that_are_not_finite_are_named(adv_type: str) -> None:
    batch = random_batch(0, values=torch.zeros(9, 7))
    batch.rewards[4, 3] = float("inf")
    with pytest.raises(Diverged, match=r"rewards\[4, 3\] = inf"):
        advantages(batch, Algorithm(adv_type=adv_type))


def test_rewards_of_rows_that_are_only_compared_to_are_checked_too() -> None:
    batch = random_batch(0, compared=torch.ones(9, dtype=torch.bool))
    batch.sample_mask[4] = False
    batch.rewards[4, 3] = NAN
    with pytest.raises(Diverged, match=r"rewards\[4, 3\] = nan"):
        advantages(batch, Algorithm(adv_type="rloo"))


def test_values_that_are_not_finite_are_named() -> None:
    batch = random_batch(0, values=torch.zeros(9, 7))
    batch.values[2, 3] = NAN
    with pytest.raises(Diverged, match=r"values\[2, 3\] = nan"):
        advantages(batch, Algorithm())
