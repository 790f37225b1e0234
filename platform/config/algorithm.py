"""The `algorithm:` section: what PPO computes. Names follow the systems users know; formulas are in docs/algorithms.md."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rl_platform.config.base import Section

KLEstimator = Literal["k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl"]
LossAggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


class KLControl(Section):
    """`algorithm.kl_ctrl`: the coefficient of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = Field("fixed", description="constant, or adapted towards target_kl")
    kl_coef: float = Field(0.001, ge=0, description="(initial) coefficient")
    horizon: float = Field(10_000, gt=0, description="adaptive: trajectories over which the coefficient reacts")
    target_kl: float = Field(0.1, gt=0, description="adaptive: the KL aimed at")


class Algorithm(Section):
    """`algorithm`: estimator, losses and schedule of PPO."""

    adv_type: Literal["gae"] = Field("gae", description="advantage estimator")
    gamma: float = Field(1.0, ge=0, le=1, description="discount")
    gae_lambda: float = Field(0.95, ge=0, le=1, description="GAE lambda")
    normalize_advantages: bool = Field(True, description="whiten advantages over the whole rollout batch")
    group_size: int = Field(1, ge=1, description="samples per prompt")

    loss_type: Literal["actor_critic", "actor"] = Field(
        "actor", description="actor_critic: one shared model, one backward; actor: policy loss only, the critic is a model of its own"
    )
    loss_agg_func: LossAggregation = Field("token-mean", description="how per-token losses become one number")
    loss_agg_horizon: int | None = Field(
        None, ge=1, description="constant H of seq-mean-token-sum-norm; null: the longest response allowed"
    )
    clip_ratio_low: float = Field(0.2, ge=0, le=1, description="ratio clipped below 1 - this")
    clip_ratio_high: float = Field(0.2, ge=0, description="ratio clipped above 1 + this")
    clip_ratio_c: float | None = Field(None, gt=1, description="dual clip for negative advantages; null: off")
    value_clip: float | None = Field(None, gt=0, description="value may move this far from the old value; null: off")
    huber_delta: float | None = Field(None, gt=0, description="Huber threshold of the value loss; null: squared error")
    value_loss_scale: float = Field(1.0, gt=0, description="factor on the value loss")
    entropy_bonus: float = Field(0.0, ge=0, description="coefficient of the entropy bonus")

    ppo_epochs: int = Field(1, ge=1, description="passes over the rollout batch for the actor")
    critic_ppo_epochs: int | None = Field(None, ge=1, description="passes for the critic; null: as ppo_epochs")
    policy_training_start_step: int = Field(0, ge=0, description="steps of critic-only training before the actor learns")

    use_kl_in_reward: bool = Field(False, description="subtract a KL penalty to the reference from the reward")
    kl_penalty: KLEstimator = Field("k1", description="its estimator")
    kl_ctrl: KLControl = Field(default_factory=KLControl, description="its coefficient")
    use_kl_loss: bool = Field(False, description="add a KL term to the actor loss")
    kl_loss_coef: float = Field(0.001, ge=0, description="its coefficient")
    kl_loss_type: KLEstimator = Field("k3", description="its estimator")

    rollout_micro_batch_size: int | None = Field(
        None, ge=1, description="rows per forward of the rollout policy; null: all that wait"
    )
    logprob_forward_micro_batch_size: int | None = Field(
        None, ge=1, description="rows per forward when log-probs and values are computed; null: as in training"
    )

    @property
    def critic_epochs(self) -> int:
        return self.critic_ppo_epochs if self.critic_ppo_epochs is not None else self.ppo_epochs

    @property
    def needs_reference(self) -> bool:
        return self.use_kl_in_reward or self.use_kl_loss
