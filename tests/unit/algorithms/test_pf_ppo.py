"""PF-PPO: weights by reward, rows that stay whole."""

from __future__ import annotations

import pytest
import torch

from rl_platform.algorithms.aggregation import Denominators
from rl_platform.algorithms.losses import ModelOutputs, actor_loss
from rl_platform.algorithms.reward_sums import outcome_scores
from rl_platform.algorithms.variants.pf_ppo import apply_pf_ppo, row_probabilities
from rl_platform.config.schema.algorithm import PFPPO, Algorithm
from rl_platform.errors import DataError
from rl_platform.records import RolloutBatch
from rl_platform.rng import generator

SCORES = torch.tensor([2.0, -1.0, 0.0, 0.5])
ALL = torch.ones(4, dtype=torch.bool)


def tagged(rows: int = 6, positions: int = 3) -> RolloutBatch:
    """Every field of a row holds the row's number; the last row does not count."""
    tags = torch.arange(rows)[:, None].expand(rows, positions)
    mask, numbers = torch.ones(rows, positions, dtype=torch.bool), tags.float().contiguous()
    return RolloutBatch(
        inputs={"tokens": tags.contiguous(), "lengths": torch.arange(rows)},
        action_mask=mask,
        sample_mask=torch.arange(rows) < rows - 1,
        group_ids=torch.arange(rows),
        rewards=numbers,
        rollout_log_probs=numbers,
        log_probs=numbers,
        reference_log_probs=numbers,
        values=numbers,
        advantages=numbers,
        returns=numbers,
    )


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("pow", [0.761905, 0.190476, 0.0, 0.047619]),
        ("max_min", [0.5, 0.5, 0.0, 0.0]),
        ("max_random", [0.571429, 0.142857, 0.142857, 0.142857]),
    ],
)
def test_goldens(method: str, expected: list[float]) -> None:
    found = row_probabilities(SCORES, ALL, PFPPO(method=method))
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-6)


def test_power() -> None:
    found = row_probabilities(SCORES, ALL, PFPPO(power=1.0))
    torch.testing.assert_close(found.float(), torch.tensor([2.0, 1.0, 0.0, 0.5]) / 3.5, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["pow", "max_min", "max_random"])
def test_rewards_that_are_all_zero_give_a_uniform_choice(method: str) -> None:
    found = row_probabilities(torch.zeros(4), ALL, PFPPO(method=method))
    torch.testing.assert_close(found, torch.full((4,), 0.25, dtype=torch.float64))


@pytest.mark.parametrize("method", ["pow", "max_min", "max_random"])
def test_rows_that_do_not_count_are_never_drawn_and_decide_nothing(method: str) -> None:
    options = PFPPO(method=method)
    for garbage in (9.0, float("nan")):
        scores = torch.cat((SCORES, torch.tensor([garbage])))
        found = row_probabilities(scores, torch.tensor([True] * 4 + [False]), options)
        assert found[4] == 0
        torch.testing.assert_close(found[:4], row_probabilities(SCORES, ALL, options))


@pytest.mark.parametrize(("score", "power"), [(float("nan"), 2.0), (float("inf"), 2.0), (1e200, 9.0)])
def test_a_score_without_a_weight_is_named(score: float, power: float) -> None:
    scores = torch.tensor([1.0, 2.0, score, 0.0], dtype=torch.float64)
    with pytest.raises(DataError, match="row 2"):
        row_probabilities(scores, ALL, PFPPO(power=power))


def test_scores_ignore_masked_positions() -> None:
    rewards = torch.tensor([[1.0, float("nan"), 2.0], [0.5, 3.0, float("inf")]])
    mask = torch.tensor([[True, False, True], [True, True, False]])
    assert outcome_scores(rewards, mask).tolist() == [3.0, 3.5]


@pytest.mark.parametrize("seed", range(5))
def test_resampled_rows_still_belong_together(seed: int) -> None:
    batch = tagged()
    drawn, _ = apply_pf_ppo(batch, outcome_scores(batch.rewards, batch.mask), PFPPO(), generator(seed, "pf_ppo", 0))
    assert len(drawn) == len(batch)
    tags = drawn.group_ids.tolist()
    assert set(tags) <= {1, 2, 3, 4}  # 0 has no reward, 5 does not count
    assert bool(drawn.sample_mask.all())
    assert drawn.inputs["lengths"].tolist() == tags
    fields = ("rewards", "rollout_log_probs", "log_probs", "reference_log_probs", "values", "advantages", "returns")
    for tensor in (drawn.inputs["tokens"], *(getattr(drawn, name) for name in fields)):
        assert torch.equal(tensor, torch.tensor(tags).to(tensor.dtype)[:, None].expand(6, 3))


def test_draws_repeat_for_a_seed_and_a_step() -> None:
    batch = tagged(64)
    scores = torch.ones(64)

    def drawn(step: int) -> list[int]:
        return apply_pf_ppo(batch, scores, PFPPO(), generator(1, "pf_ppo", step))[0].group_ids.tolist()

    assert drawn(0) == drawn(0) != drawn(1)


def test_draws_follow_the_probabilities() -> None:
    batch = tagged(4001, 1)
    scores = torch.where(torch.arange(4001) % 2 == 0, 2.0, 1.0)
    drawn, metrics = apply_pf_ppo(batch, scores, PFPPO(), generator(0, "pf_ppo", 0))
    assert (drawn.group_ids % 2 == 0).float().mean().item() == pytest.approx(0.8, abs=0.02)
    assert metrics["pf_ppo/effective_rows"] == pytest.approx(4000 * 2.5**2 / 8.5)  # (sum w)^2 / sum w^2


class TestWeight:
    def weighted(self, batch: RolloutBatch) -> RolloutBatch:
        scores = outcome_scores(batch.rewards, batch.mask)
        return apply_pf_ppo(batch, scores, PFPPO(mode="weight"), generator(0, "pf_ppo", 0))[0]

    def test_mean_one_over_the_rows_that_count_and_the_same_rows(self) -> None:
        batch = tagged()
        found = self.weighted(batch)
        assert torch.equal(found.group_ids, batch.group_ids)
        assert found.loss_weights.dtype == torch.float32
        assert found.loss_weights.shape == (6, 3)
        torch.testing.assert_close(found.loss_weights[:5].mean(), torch.tensor(1.0))
        expected = torch.tensor([0.0, 1.0, 4.0, 9.0, 16.0, 0.0]) / 6
        torch.testing.assert_close(found.loss_weights, expected[:, None].expand(6, 3), rtol=1e-5, atol=1e-6)

    def test_multiplies_weights_that_are_there(self) -> None:
        batch = tagged()
        batch.loss_weights = torch.full((6, 3), 0.5)
        expected = self.weighted(tagged()).loss_weights
        torch.testing.assert_close(self.weighted(batch).loss_weights, 0.5 * expected)

    def test_the_policy_loss_is_the_mean_of_the_resampled_one(self) -> None:
        """One number per row: the weighted loss is the expectation of the loss over draws."""
        batch = tagged(5, 1)
        batch.sample_mask[:] = True
        outputs = ModelOutputs(log_probs=batch.log_probs + 0.1)
        probabilities = row_probabilities(outcome_scores(batch.rewards, batch.mask), ALL.new_ones(5), PFPPO())

        def loss(rows: RolloutBatch, log_probs: torch.Tensor) -> float:
            denominators = Denominators.of(rows.mask, 1)
            return float(actor_loss(ModelOutputs(log_probs=log_probs), rows, denominators, Algorithm())[0])

        each = [loss(batch.select(torch.tensor([row])), outputs.log_probs[row : row + 1]) for row in range(5)]
        expected = float((probabilities * torch.tensor(each)).sum())
        assert loss(self.weighted(batch), outputs.log_probs) == pytest.approx(expected, rel=1e-5)
