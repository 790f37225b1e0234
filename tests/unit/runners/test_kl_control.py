"""KL in the reward through the PPO step: which coefficient is used when, and that a checkpoint keeps it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from neutral_batches import neutral_batch
from stand_ins import FixedGroup, SilentReporter

from rl_platform.config.schema import Config
from rl_platform.errors import Diverged
from rl_platform.records import RolloutBatch
from rl_platform.runners.ppo import PPO
from rl_platform.runners.task_runner import Learners

SHAPE = (2, 3)


def make_ppo(kl_penalty: str = "k1", **kl_ctrl: Any) -> PPO:
    config = Config(
        runner={"task_type": "reasoning"},
        cluster={"component_placement": {"actor,critic,rollout,reward,reference": "all"}},
        algorithm={"use_kl_in_reward": True, "kl_penalty": kl_penalty, "kl_ctrl": kl_ctrl, "gae_lambda": 1.0},
    )
    learners = Learners(
        actor=FixedGroup(log_probs=torch.full(SHAPE, -1.0)),
        reference=FixedGroup(reference_log_probs=torch.full(SHAPE, -1.3)),
        critic=FixedGroup(values=torch.zeros(SHAPE)),
    )
    return PPO(config, learners, SilentReporter())


def make_batch(counts: bool = True) -> RolloutBatch:
    return neutral_batch(
        torch.ones(SHAPE, dtype=torch.bool),
        sample_mask=torch.full((2,), counts),
        rewards=torch.tensor([[0.0, 0, 1], [0, 0, 0]]),
    )


ADAPTIVE = {"type": "adaptive", "kl_coef": 0.1, "target_kl": 0.1, "horizon": 10.0}


def test_a_rollout_uses_the_coefficient_from_before_its_own_kl() -> None:
    ppo = make_ppo(**ADAPTIVE)
    first, second = ppo.update(make_batch(), 0), ppo.update(make_batch(), 1)
    assert first["reward/kl"] == pytest.approx(0.3)
    assert first["reward/kl_coef"] == 0.1
    assert second["reward/kl_coef"] == pytest.approx(0.1 * (1 + 0.2 * 2 / 10))
    (trained, _) = ppo.learners.critic.trained_on
    torch.testing.assert_close(trained.returns[0], torch.tensor([0.91, 0.94, 0.97]))


def test_rows_of_one_response_count_once_for_the_coefficient() -> None:
    ppo = make_ppo(**ADAPTIVE)
    ppo.update(replace(make_batch(), continues=torch.tensor([False, True])), 0)
    assert ppo.kl_controller.coefficient == pytest.approx(0.1 * (1 + 0.2 * 1 / 10))


def test_a_full_kl_comes_from_the_actor_and_the_states_of_the_reference_go_no_further() -> None:
    ppo = make_ppo(kl_penalty="full", kl_coef=0.1)
    ppo.learners.reference.fields["reference_states"] = torch.zeros(*SHAPE, 4)
    ppo.learners.actor.fields["full_kl"] = torch.full(SHAPE, 0.2)
    assert ppo.update(make_batch(), 0)["reward/kl"] == pytest.approx(0.2)
    (trained,) = ppo.learners.actor.trained_on
    torch.testing.assert_close(trained.rewards[0], torch.tensor([-0.02, -0.02, 0.98]))
    assert trained.reference_states is None


def test_the_adaptive_coefficient_survives_a_checkpoint_of_the_runner() -> None:
    ppo, resumed = make_ppo(**ADAPTIVE), make_ppo(**ADAPTIVE)
    ppo.update(make_batch(), 0)
    resumed.load_state_dict(ppo.state_dict())
    assert resumed.update(make_batch(), 1) == ppo.update(make_batch(), 1)
    assert resumed.kl_controller.coefficient == ppo.kl_controller.coefficient


def test_a_batch_without_any_response_that_counts_reaches_no_optimizer() -> None:
    ppo = make_ppo()
    with pytest.raises(Diverged, match=r"step 3: no action of the rollout counts.*overlong\.filter"):
        ppo.update(make_batch(counts=False), 3)
    batch = make_batch(counts=False)
    batch = replace(batch, inputs={"observations": torch.zeros(SHAPE)})
    with pytest.raises(Diverged, match=r"a reward was not finite \(episode/invalid\)"):
        ppo.update(batch, 3)
    assert ppo.learners.critic.trained_on == ppo.learners.actor.trained_on == []
