from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from rl_platform.config import load_config
from rl_platform.config.schema.algorithm import ESTIMATORS, PFPPO, Algorithm, DynamicSampling, KLControl
from rl_platform.config.schema.data import Data, Source
from rl_platform.config.schema.reward import Reward, WeightedReward
from rl_platform.launch.card.algorithm_card import algorithm_card, functions_card, sources_card
from rl_platform.launch.card.run_card import run_card

CONFIGS = Path(__file__).parents[3] / "configs"


def card(
    task_type: Literal["embodied", "reasoning"] = "reasoning", has_values: bool = True, **keys: Any
) -> dict[str, str]:
    """Of rollouts of 128 rows in mini-batches of 64."""
    options = {"rows_per_rollout": 128, "mini_batch_size": 64, "has_values": has_values}
    return dict(algorithm_card(Algorithm(**keys), task_type=task_type, **options))


def test_embodied_card() -> None:
    found = card("embodied", loss_type="actor_critic", huber_delta=10.0, value_clip=0.2, ppo_epochs=10, gamma=0.99)
    assert found["optimizer steps per rollout"].startswith("20 (10 epochs x 2 mini-batches of 64 transitions)")
    assert found["value loss"].startswith("Huber, delta 10, values clipped to old values +-0.2")
    assert found["old log-probs"].startswith("recomputed with the values")
    assert found["KL to the reference"] == "none"
    assert found["critic warm-up"].startswith("none")
    assert "actor steps per rollout" not in found


def test_reasoning_card() -> None:
    found = card(
        clip_ratio_high=0.28,
        clip_ratio_c=3.0,
        loss_agg_func="seq-mean-token-sum-norm",
        loss_agg_horizon=512,
        critic_ppo_epochs=2,
        policy_training_start_step=3,
        use_kl_in_reward=True,
        kl_ctrl=KLControl(type="adaptive", target_kl=0.05),
        use_kl_loss=True,
        normalize_advantages=False,
    )
    assert found["actor steps per rollout"].startswith("2 ")
    assert found["critic steps per rollout"].startswith("4 ")
    assert found["policy loss"] == "ratio clipped to [0.8, 1.28], dual clip 3; no entropy bonus"
    assert "not whitened" in found["advantages"]
    assert found["loss is divided by"].endswith("times the horizon 512")
    assert "in the reward: k1, coefficient 0.001, adaptive to 0.05" in found["KL to the reference"]
    assert "in the actor loss: k3" in found["KL to the reference"]
    assert found["old log-probs"].startswith("recomputed")
    assert found["critic warm-up"].startswith("exactly 3 PPO steps")
    assert card(policy_training_start_step=1)["critic warm-up"].startswith("exactly 1 PPO step trains the critic only")


def test_rewards_are_told_in_their_order() -> None:
    assert card()["rewards"] == "the score, on the last action of the response"
    found = card(reward_scaling={}, overlong={"buffer_length": 64, "filter": True}, reward_whitening=True)
    assert found["rewards"] == (
        "the score, clipped to [0, 1] and mapped to [-1, 1], minus up to 1 over the last 64 tokens before the longest "
        "response, truncated responses do not count, scaled to unit variance over the rollout batch, "
        "without a shift of the mean, on the last action of the response"
    )
    assert "times 0.5 if truncated" in card(overlong={"stop_properly_coef": 0.5})["rewards"]


def test_the_gradient_of_the_kl_loss_is_told() -> None:
    def kl(**keys: Any) -> str:
        return card(use_kl_loss=True, kl_loss_coef=0.5, **keys)["KL to the reference"]

    assert kl() == "in the actor loss: k3, coefficient 0.5, its plain gradient"
    of_k2 = "in the actor loss: k3, coefficient 0.5, with the gradient of k2"
    assert kl(kl_loss_type="k3+") == kl(kl_loss_grad="k2") == of_k2
    assert "times the ratio to the old policy" in kl(kl_loss_grad="score")
    assert kl(use_kl_in_reward=True, allow_both_kl=True).endswith("; both on purpose")


@pytest.mark.parametrize(
    "change",
    [
        {"gamma": 0.5},
        {"gae_lambda": 0.5},
        {"gae_lambda_policy": 0.5},
        {"gae_lambda_value": 0.5},
        {"length_adaptive_alpha": 0.05},
        {"normalize_advantages": False},
        {"loss_type": "actor_critic"},
        {"loss_agg_func": "seq-mean-token-mean"},
        {"clip_ratio_low": 0.1},
        {"clip_ratio_high": 0.1},
        {"clip_ratio_c": 2.0},
        {"value_clip": 0.3},
        {"huber_delta": 1.0},
        {"value_loss_scale": 0.5},
        {"entropy_bonus": 0.01},
        {"policy_loss": "gspo"},
        {"policy_loss": "gspo_token"},
        {"policy_loss": "gmpo"},
        {"policy_loss": "sapo"},
        {"policy_loss": "clip_cov"},
        {"policy_loss": "kl_cov"},
        {"policy_loss": "cispo"},
        {"policy_loss": "reinforce"},
        {"policy_loss": "mine:loss"},
        {"positive_nll_coef": 0.1},
        {"loss_agg_func": "token-sum"},
        {"distillation_coef": 0.5},
        {"rollout_is": {}},
        {"rollout_is": {"veto": 0.01}},
        {"rollout_is": {"vtrace": True}},
        {"rollout_is": {"reject": {"stat": "k1", "threshold": 0.1, "low": -0.1}}},
        {"rollout_is": {"mode": None, "reject": {"threshold": 0.1}}},
        {"ppo_epochs": 2},
        {"critic_ppo_epochs": 2},
        {"policy_training_start_step": 1},
        {"use_kl_in_reward": True},
        {"use_kl_loss": True},
        {"target_kl": 0.01},
        {"use_pf_ppo": True},
        {"dynamic_sampling": DynamicSampling()},
        {"reward_scaling": {}},
        {"reward_whitening": True},
        {"overlong": {"buffer_length": 64}},
        {"overlong": {"stop_properly_coef": 0.5}},
        {"overlong": {"filter": True}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_choice_shows(change: dict[str, Any]) -> None:
    assert card() != card(**change)


@pytest.mark.parametrize(
    ("base", "change", "text"),
    [
        ({"loss_agg_func": "seq-mean-token-sum"}, {"loss_agg_denominator": "nominal"}, "masked ones included"),
        ({"adv_type": "grpo"}, {"grpo_leave_one_out": True}, "divided by the others' unbiased deviation"),
        ({"adv_type": "grpo"}, {"grpo_std_normalization": False}, "not divided by it"),
        (
            {"gae_lambda_value": 1.0},
            {"length_adaptive_alpha": 0.05},
            "lambda 1 - 1 / (0.05 length) for advantages and 1 for returns",
        ),
        ({}, {"bootstrap_truncated": True}, "truncated responses bootstrapped with the critic's value"),
        ({"dynamic_sampling": {}}, {"dynamic_sampling": {"prompts_per_round": 99}}, "rounds of 99 prompts"),
        ({}, {"advantage_clip": [-2, 3.5]}, "bounded by [-2, 3.5]"),
        ({"adv_type": "reinforce_plus_plus_baseline"}, {"whiten_over": "sequences"}, "responses, each counting once"),
        ({"adv_type": "reinforce_plus_plus"}, {"reinforce_kl_credit": "local"}, "the KL penalty of each token its own"),
        ({"overlong": {"filter": True}}, {"group_ignore_masked": True}, "nor in their group's statistics"),
        ({"use_kl_in_reward": True, "kl_penalty": "k3"}, {"kl_output_clip": 5.0}, "k3 (at most 5)"),
        ({"use_kl_loss": True}, {"kl_loss_output_clip": 10.0}, "k3 (at most 10)"),
        (
            {"rollout_is": {"mode": "icepop"}},
            {"rollout_is": {"mode": "icepop", "denominator": "kept"}},
            "leave the loss",
        ),
        ({}, {"old_log_probs": "rollout"}, "those of the rollout engine"),
        ({}, {"old_log_probs": "current"}, "the current ones, so the ratio is 1"),
        ({"positive_nll_coef": 0.1}, {"positive_nll_norm": "all_tokens"}, "per token of all responses"),
    ],
    ids=str,
)
def test_every_control_shows(base: dict[str, Any], change: dict[str, Any], text: str) -> None:
    assert text in str(card(**base | change))
    assert text not in str(card(**base))


@pytest.mark.parametrize("adv_type", ESTIMATORS)
def test_estimators_with_and_without_critic(adv_type: str) -> None:
    found = card(has_values=adv_type == "gae", adv_type=adv_type, group_size=2)
    assert found["advantages"].startswith(f"{adv_type}, ")
    assert found["advantages"].endswith("; not whitened") == (ESTIMATORS[adv_type].whitens is False)
    if adv_type != "gae":
        assert found["value loss"] == "none: there is no critic"
        assert not {"critic steps per rollout", "critic warm-up"} & found.keys()


def test_choice_of_rows() -> None:
    sampling = DynamicSampling(max_rounds=3, on_exhausted="train_partial")
    found = card(use_pf_ppo=True, dynamic_sampling=sampling, group_size=4, target_kl=0.02)
    assert found["PF-PPO"].endswith("|reward|^2 (rewards of 0 and 1: successes only), for actor and critic")
    for words in ("groups of 4", "up to 3 rounds", "the step is smaller", "first in the next step"):
        assert words in found["dynamic sampling"]
    assert found["early stop"].startswith("the actor's update ends")
    assert found["early stop"].endswith("exceeds 0.02")


@pytest.mark.parametrize(
    "change", [{"method": "max_min"}, {"method": "max_random"}, {"power": 3.0}, {"mode": "weight"}]
)
def test_every_choice_of_pf_ppo_shows(change: dict[str, Any]) -> None:
    assert card(use_pf_ppo=True) != card(use_pf_ppo=True, pf_ppo=PFPPO(**change))


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({}, "ratio per token (training over rollout), outside [0, 2] cut to it"),
        ({"level": "sequence", "mode": "icepop", "high": None}, "ratio per sequence (training over rollout), outside"),
        ({"mode": "icepop", "high": None}, "outside [0, inf] weight 0"),
        ({"mode": "sequence_mask"}, "geometric mean of the sequence"),
        ({"vtrace": True}, "on the policy loss and, as V-trace, on the value targets"),
        ({"batch_normalize": True}, "divided by the mean weight"),
        ({"reject": {"threshold": 0.1, "level": "token"}}, "every token with k3 above 0.1 has weight 0"),
    ],
    ids=str,
)
def test_mismatch_correction(keys: dict[str, Any], text: str) -> None:
    assert text in card(rollout_is=keys)["rollout mismatch"]


def test_shares_of_sources() -> None:
    assert sources_card(Data()) == []
    sources = [Source(label="a", weight=3.0, val_size=0), Source(label="b"), Source(label="c", weight=0.0)]
    ((topic, text),) = sources_card(Data(sources=sources))
    assert topic == "sources"
    assert text.startswith("a 75.0%, b 25.0% of the prompts of a step")
    assert text.endswith("validated one by one: b, c")


def test_several_reward_functions() -> None:
    assert functions_card(Reward()) == []
    functions = [WeightedReward(type="math_verify", name="correct"), WeightedReward(type="own:length", weight=-0.1)]
    ((topic, text),) = functions_card(Reward(functions=functions))
    assert topic == "score"
    assert text.startswith("1 * correct (math_verify) + -0.1 * length (own:length); a response")


def test_a_warm_up_longer_than_the_run_is_a_warning() -> None:
    def warnings(*overrides: str) -> list[str]:
        loaded = load_config(CONFIGS / "reasoning" / "ppo_tiny.yaml", ["actor.optim.lr=0.01", *overrides])
        return [text for topic, text in run_card(loaded.config) if topic == "warning"]

    assert warnings("runner.max_steps=5", "actor.optim.lr_warmup_steps=5") == []
    (warning,) = warnings("runner.max_steps=5", "actor.optim.lr_warmup_steps=20")
    assert warning == (
        "actor.optim.lr_warmup_steps is 20, above runner.max_steps 5: the learning rate rises to 0.0025 and never "
        "reaches 0.01"
    )
    both = warnings("runner.max_steps=5", *(f"{role}.optim.lr_warmup_steps=6" for role in ("actor", "critic")))
    assert [text.split(".")[0] for text in both] == ["actor", "critic"]
