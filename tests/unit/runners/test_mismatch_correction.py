"""`algorithm.rollout_is` in the PPO step: weights are made once, before the epochs, and reach the actor's loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stand_ins import FixedGroup, SilentReporter

from rl_platform.algorithms.variants.importance_weights import mismatch_weights
from rl_platform.config.schema import Config
from rl_platform.records import RolloutBatch
from rl_platform.runners.ppo import PPO
from rl_platform.runners.task_runner import Learners

MASK = torch.tensor([[False, True, True], [True, True, False]])
LOG_PROBS = torch.tensor([[0.0, -1.0, -2.0], [-0.5, -3.0, 0.0]])


def step(**algorithm: Any) -> tuple[RolloutBatch, dict[str, float], Config]:
    config = Config(
        runner={"task_type": "reasoning"},
        cluster={"component_placement": {"actor,critic,rollout,reward": "all"}},
        algorithm=algorithm,
    )
    actor, critic = FixedGroup(log_probs=LOG_PROBS), FixedGroup(values=torch.zeros(2, 3))
    rows = torch.arange(2)
    batch = RolloutBatch({}, MASK, rows >= 0, rows, torch.ones(2, 3), LOG_PROBS - 1.5)
    metrics = PPO(config, Learners(actor, critic), SilentReporter()).update(batch, 0)  # type: ignore[arg-type]
    (trained_on,) = actor.trained_on
    return trained_on, metrics, config


def test_off_means_no_weights() -> None:
    batch, metrics, _ = step()
    assert batch.loss_weights is None
    assert not any(name.startswith("is/") for name in metrics)
    assert metrics["mismatch/abs_logp"] == pytest.approx(1.5)


@pytest.mark.parametrize(("gap", "warnings"), [(1.5, 1), (1e-4, 0)])
def test_engines_that_differ_by_more_than_rounding_are_told_once(gap: float, warnings: int) -> None:
    notes: list[str] = []
    reporter = SilentReporter()
    reporter.note = notes.append  # type: ignore[method-assign]
    config = Config(
        runner={"task_type": "reasoning"}, cluster={"component_placement": {"actor,critic,rollout,reward": "all"}}
    )
    rows = torch.arange(2)
    learners = Learners(FixedGroup(log_probs=LOG_PROBS), FixedGroup(values=torch.zeros(2, 3)))  # type: ignore[arg-type]
    ppo = PPO(config, learners, reporter)  # type: ignore[arg-type]
    for _ in range(2):
        ppo.update(RolloutBatch({}, MASK, rows >= 0, rows, torch.ones(2, 3), LOG_PROBS - gap), 0)
    assert len(notes) == warnings
    assert all("mismatch/prob_error" in note and "algorithm.rollout_is corrects" in note for note in notes)


@pytest.mark.parametrize("keys", [{}, {"mode": "icepop"}, {"level": "sequence", "high": None}], ids=str)
def test_weights_of_the_whole_batch_go_to_the_actor(keys: dict[str, Any]) -> None:
    batch, metrics, config = step(rollout_is=keys)
    correction = config.algorithm.rollout_is
    assert correction is not None
    expected, measured = mismatch_weights(LOG_PROBS, LOG_PROBS - 1.5, MASK, correction)
    assert batch.loss_weights is not None
    assert torch.equal(batch.loss_weights, expected)
    assert measured.items() <= metrics.items()


def test_rejected_tokens_keep_their_place_in_the_estimator() -> None:
    """It acts on the policy loss alone. Taken out before, the last token would take the terminal reward along."""
    plain, _, _ = step()
    rejecting, metrics, _ = step(rollout_is={"mode": None, "reject": {"stat": "k2", "threshold": 0.1}})
    assert metrics["is/rejected_frac"] == 1
    assert rejecting.loss_weights is not None
    assert not rejecting.loss_weights.any()
    for name in ("advantages", "returns", "action_mask", "sample_mask"):
        assert torch.equal(getattr(rejecting, name), getattr(plain, name))
