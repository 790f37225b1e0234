"""Levels of action chunks: hand-computed advantages and losses of every combination, denominators, gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from neutral_batches import neutral_batch
from torch import Tensor

from rl_platform.algorithms.action_levels import ActionLevels, denominators_of
from rl_platform.algorithms.advantages import advantages
from rl_platform.algorithms.losses import ModelOutputs, actor_critic_loss
from rl_platform.algorithms.rollout_metrics import rollout_metrics
from rl_platform.algorithms.variants.chunk_levels import ChunkLevels
from rl_platform.config.schema.algorithm import Algorithm
from rl_platform.envs.embodied.spaces import ActionSpace
from rl_platform.launch.card.algorithm_card import algorithm_card
from rl_platform.models.policies.chunk_policy import ChunkActorCritic, ChunkPolicy
from rl_platform.models.policy import PolicyConfig
from rl_platform.records import RolloutBatch

# One environment, two chunks of K = 2 actions with D = 2 components. The episode terminates with the third action, so
# the fourth is not executed; what stands there must not matter.
EXECUTED = torch.tensor([[[True, True], [True, False]]])
REWARDS = torch.tensor([[[1.0, 2.0], [4.0, 0.0]]])
LOG_RATIOS = torch.tensor([[[0.1, 0.2], [0.3, -0.1]], [[-0.5, 0.1], [7.0, 7.0]]])  # old log-probs are 0
ENTROPIES = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [99.0, 99.0]]])
VALUES = {"chunk_level": torch.tensor([[1.0], [2.0]]), "action_level": torch.tensor([[1.0, 1.5], [2.0, 99.0]])}

CHUNK, ACTION, TOKEN = "chunk_level", "action_level", "token_level"
COMBINATIONS = [(CHUNK, CHUNK), (CHUNK, ACTION), (CHUNK, TOKEN), (ACTION, ACTION), (ACTION, TOKEN)]

# gamma = lambda = 1/2.
# Chunks: r = 3, 4 and V = 1, 2. A = 4 - 2 = 2; 3 + 2/2 - 1 + 2/4 = 3.5. R = 4.5, 4.
# Actions: r = 1, 2, 4 and V = 1, 1.5, 2. A = 2; 2 + 2/2 - 1.5 + 2/4 = 2; 1 + 1.5/2 - 1 + 2/4 = 1.25. R = 2.25, 3.5, 4.
ADVANTAGES = {
    (CHUNK, CHUNK): [[3.5], [2.0]],
    (CHUNK, ACTION): [[3.5, 3.5], [2.0, 0.0]],
    (CHUNK, TOKEN): [[3.5] * 4, [2.0, 2.0, 0.0, 0.0]],
    (ACTION, ACTION): [[1.25, 2.0], [2.0, 0.0]],
    (ACTION, TOKEN): [[1.25, 1.25, 2.0, 2.0], [2.0, 2.0, 0.0, 0.0]],
}
# With rho clipped to at most 1.2 and every A > 0 the loss is -mean(A min(rho, 1.2)):
# log rho of chunks .5, -.4; of actions .3, .2, -.4; of components .1, .2, .3, -.1, -.5, .1
POLICY_LOSS = {
    (CHUNK, CHUNK): -(3.5 * 1.2 + 2 * 0.670320) / 2,
    (CHUNK, ACTION): -(3.5 * 1.2 + 3.5 * 1.2 + 2 * 0.670320) / 3,
    (CHUNK, TOKEN): -(3.5 * (1.105171 + 1.2 + 1.2 + 0.904837) + 2 * (0.606531 + 1.105171)) / 6,
    (ACTION, ACTION): -(1.25 * 1.2 + 2 * 1.2 + 2 * 0.670320) / 3,
    (ACTION, TOKEN): -(1.25 * (1.105171 + 1.2) + 2 * (1.2 + 0.904837) + 2 * (0.606531 + 1.105171)) / 6,
}
# Values of 0: half the mean square of the returns, whatever the level of the log-probs.
VALUE_LOSS = {CHUNK: 0.5 * (4.5**2 + 4**2) / 2, ACTION: 0.5 * (2.25**2 + 3.5**2 + 4**2) / 3}
# 21 in all, over 2 chunks, 3 actions, 6 components; by rows 10 over (1, 2, 4) and 11 over (1, 1, 2).
ENTROPY = {
    "token-mean": {CHUNK: 10.5, ACTION: 7.0, TOKEN: 3.5},
    "seq-mean-token-mean": {CHUNK: (10 + 11) / 2, ACTION: (5 + 11) / 2, TOKEN: (2.5 + 5.5) / 2},
    "seq-mean-token-sum": {CHUNK: 10.5, ACTION: 10.5, TOKEN: 10.5},
}


def algorithm(rewards: str, log_probs: str, **keys: Any) -> Algorithm:
    settings = {"gamma": 0.5, "gae_lambda": 0.5, "normalize_advantages": False, "loss_type": "actor_critic"}
    return Algorithm(**settings | {"reward_type": rewards, "logprob_type": log_probs} | keys)


def rollout(levels: ChunkLevels) -> RolloutBatch:
    """[1,2P], as the environment and the actor before the update give it."""
    value_mask, units = levels.value_mask(EXECUTED), levels.entropy_units(EXECUTED)
    width = levels.num_positions
    ends = torch.zeros(1, 2 * width, dtype=torch.bool)
    ends[0, -1] = True
    return neutral_batch(
        levels.mask(EXECUTED).flatten(1),
        inputs={"observations": torch.zeros(1, 2, 3), "executed": EXECUTED},
        rewards=levels.placed_rewards(REWARDS).flatten(1),
        log_probs=torch.zeros(1, 2 * width),
        values=levels.placed_values(VALUES[levels.rewards]).reshape(1, -1),
        ends=ends,
        end_values=torch.zeros(1, 2 * width),
        value_mask=None if value_mask is None else value_mask.flatten(1),
        entropy_units=None if units is None else units.flatten(1),
    )


def estimated(settings: Algorithm) -> tuple[ChunkLevels, RolloutBatch]:
    """Rows of one chunk each, with advantages and returns."""
    levels = ChunkLevels.of(settings, 2, 2)
    batch = rollout(levels)
    found, returns = advantages(batch, settings)
    return levels, replace(batch, advantages=found, returns=returns).flatten()


def outputs(levels: ChunkLevels) -> ModelOutputs:
    """Of the model in the middle of the update."""
    return ModelOutputs(
        levels.of_components(LOG_RATIOS, EXECUTED[0]),
        levels.of_components(ENTROPIES, EXECUTED[0]),
        levels.placed_values(torch.zeros(2, levels.num_values)),
    )


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_golden(combination: tuple[str, str]) -> None:
    settings = algorithm(*combination)
    levels, batch = estimated(settings)
    assert len(batch) == 2
    assert batch.advantages is not None
    assert batch.advantages.tolist() == ADVANTAGES[combination]
    _, metrics = actor_critic_loss(outputs(levels), batch, denominators_of(batch, 1), settings)
    found = metrics.finalize()
    assert found["actor/pg_loss"] == pytest.approx(POLICY_LOSS[combination], rel=1e-5)
    assert found["critic/loss"] == pytest.approx(VALUE_LOSS[combination[0]], rel=1e-6)
    assert found["critic/predicted_values_mean"] == 0.0
    assert found["actor/ratio_max"] < 2  # the action that was not executed has none


@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize("entropy", [CHUNK, ACTION, TOKEN])
@pytest.mark.parametrize("mode", ENTROPY)
def test_entropy_golden(combination: tuple[str, str], entropy: str, mode: str) -> None:
    settings = algorithm(*combination, entropy_type=entropy, entropy_bonus=0.5, loss_agg_func=mode)
    levels, batch = estimated(settings)
    loss, metrics = actor_critic_loss(outputs(levels), batch, denominators_of(batch, 1), settings)
    found = metrics.finalize()
    assert found["actor/entropy"] == pytest.approx(ENTROPY[mode][entropy])
    expected = found["actor/pg_loss"] - 0.5 * ENTROPY[mode][entropy] + found["critic/loss"]
    assert float(loss) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_advantages_are_whitened_before_they_are_repeated(combination: tuple[str, str]) -> None:
    plain = torch.tensor([3.5, 2.0]) if combination[0] == CHUNK else torch.tensor([1.25, 2.0, 2.0])
    _, batch = estimated(algorithm(*combination, normalize_advantages=True))
    whitened = (plain - plain.mean()) / plain.std()
    assert batch.advantages is not None
    assert batch.advantages[0, 0].item() == pytest.approx(whitened[0].item(), rel=1e-5)
    assert batch.advantages[1, 0].item() == pytest.approx(whitened[-1].item(), rel=1e-5)


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_metrics_of_a_rollout_are_of_rewards_where_they_stand(combination: tuple[str, str]) -> None:
    settings = algorithm(*combination)
    levels = ChunkLevels.of(settings, 2, 2)
    batch = rollout(levels)
    found, returns = advantages(batch, settings)
    metrics = rollout_metrics(replace(batch, advantages=found, returns=returns))
    assert metrics["reward/mean"] == pytest.approx(7 / 2 if combination[0] == CHUNK else 7 / 3)
    assert metrics["reward/min"] == (3.0 if combination[0] == CHUNK else 1.0)
    assert metrics["adv/mean"] == pytest.approx(5.5 / 2 if combination[0] == CHUNK else 5.25 / 3)
    assert metrics["critic/values_min"] == 1.0
    assert metrics["batch/active_positions"] == {CHUNK: 2, ACTION: 3, TOKEN: 6}[combination[1]]


@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize("mode", ENTROPY)
def test_micro_batches_change_nothing(combination: tuple[str, str], mode: str) -> None:
    settings = algorithm(*combination, entropy_type=ACTION, entropy_bonus=0.1, loss_agg_func=mode)
    levels, batch = estimated(settings)
    denominators, whole = denominators_of(batch, 1), outputs(levels)
    expected, _ = actor_critic_loss(whole, batch, denominators, settings)
    parts = [
        actor_critic_loss(
            ModelOutputs(whole.log_probs[[row]], whole.entropy[[row]], whole.values[[row]]),
            batch.select(torch.tensor([row])),
            denominators,
            settings,
        )[0]
        for row in (0, 1)
    ]
    assert float(sum(parts)) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_a_rank_without_rows_adds_nothing(combination: tuple[str, str]) -> None:
    """It computes a row that is masked out, in the denominators of the whole mini-batch."""
    settings = algorithm(*combination, entropy_type=ACTION, entropy_bonus=0.1)
    levels, batch = estimated(settings)
    masked = replace(batch, sample_mask=torch.zeros(2, dtype=torch.bool))
    denominators = replace(denominators_of(batch, 1), full=False)
    loss, _ = actor_critic_loss(outputs(levels), masked, denominators, settings)
    assert float(loss) == 0.0


@pytest.mark.parametrize("kind", ["continuous", "discrete"])
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_gradients_by_finite_differences(kind: Any, combination: tuple[str, str]) -> None:
    torch.manual_seed(0)
    settings = algorithm(*combination, entropy_type=TOKEN, entropy_bonus=0.1, clip_ratio_low=1.0, clip_ratio_high=9.0)
    levels = ChunkLevels.of(settings, 2, 2 if kind == "continuous" else 1)
    config = PolicyConfig((4,), num_actions=2, num_values=levels.num_values)
    policy = ChunkPolicy((3,), ActionSpace(kind, 2), config)
    model = ChunkActorCritic(policy, levels).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    width, executed = levels.num_positions, EXECUTED[0][:, None].expand(2, 1, 2)
    drawn = torch.randn(2, 1, 2, 2) if kind == "continuous" else torch.randint(2, (2, 1, 2))
    value_mask, units = levels.value_mask(executed), levels.entropy_units(executed)
    batch = neutral_batch(
        levels.mask(executed).flatten(1),
        inputs={"observations": torch.randn(2, 1, 3).double(), "actions": drawn, "executed": executed},
        advantages=torch.randn(2, width).double(),
        returns=torch.randn(2, width).double(),
        values=torch.zeros(2, width).double(),
        value_mask=None if value_mask is None else value_mask.flatten(1),
        entropy_units=None if units is None else units.flatten(1),
    )
    with torch.no_grad():
        batch.log_probs = model(batch).log_probs + 0.3 * torch.rand(2, width).double()

    def loss() -> Tensor:
        found, _ = actor_critic_loss(model(batch, entropy=True), batch, denominators_of(batch, 1), settings)
        return found

    def number() -> float:
        return loss().item()

    loss().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        flat, gradient = parameter.data.view(-1), parameter.grad.view(-1)
        for i in range(0, len(flat), 3):
            before, step = float(flat[i]), 1e-6
            flat[i] = before + step
            above = number()
            flat[i] = before - step
            below = number()
            flat[i] = before
            assert float(gradient[i]) == pytest.approx((above - below) / (2 * step), rel=1e-5, abs=1e-8)


def test_one_number_per_choice_needs_no_levels() -> None:
    single = [ActionLevels(1, 6), ActionLevels(1, 6, ACTION, ACTION, ACTION), ActionLevels(1, 1, CHUNK, TOKEN, TOKEN)]
    assert all(levels.single for levels in single)
    several = [ActionLevels(2, 1), ActionLevels(1, 6, log_probs=TOKEN), ActionLevels(1, 6, entropy=TOKEN)]
    assert not any(levels.single for levels in several)


def test_card() -> None:
    def card(num_actions: int, **keys: Any) -> dict[str, str]:
        options = {"rows_per_rollout": 64, "mini_batch_size": 64, "num_action_chunks": num_actions}
        return dict(algorithm_card(Algorithm(loss_type="actor_critic", **keys), task_type="embodied", **options))

    assert not {"actions", "ends of episodes"} & card(1).keys()
    assert card(4)["actions"] == (
        "4 executed per choice; one reward, value and advantage per chunk, its rewards added up without discount, "
        "gamma per chunk; one ratio per chunk; entropy per chunk"
    )
    assert card(4, reward_type=ACTION, logprob_type=TOKEN, entropy_type=ACTION)["actions"] == (
        "4 executed per choice; one reward, value and advantage per action, gamma per action; one ratio per component "
        "of an action; entropy per action"
    )
    assert "one ratio per component" in card(1, logprob_type=TOKEN)["actions"]
    assert card(1, bootstrap_type="none")["ends of episodes"].endswith("never counts, truncated or not")
    assert card(1, bootstrap_type="always")["ends of episodes"].endswith("always counts")
