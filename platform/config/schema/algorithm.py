"""The `algorithm` section: estimators, losses and schedules of PPO. The formulas are in `algorithms/`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rl_platform.config.schema.base import Section

KLEstimator = Literal["k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl"]
# In a loss the estimator may have a '+': its own value with the gradient of k2.
KLLossEstimator = Literal[KLEstimator, "k1+", "kl+", "abs+", "k3+", "low_var_kl+"]
# full: no estimate from the sampled token, but the sum over the vocabulary
KLPenalty = Literal[KLEstimator, "full"]
KLLossType = Literal[KLLossEstimator, "full"]
KLGradient = Literal["path", "k2", "score"]
LossAggregation = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum"
]
OldLogProbs = Literal["recompute", "rollout", "current"]
PositiveNLLNorm = Literal["correct_tokens", "all_tokens"]
Bounds = Annotated[tuple[float, float], Field(strict=False)]  # strict would refuse the list that YAML gives
# How much of an action chunk one reward, log-prob or entropy is of: all its actions, one of them, a component of one.
RewardLevel = Literal["chunk_level", "action_level"]
ActionLevel = Literal[RewardLevel, "token_level"]
Bootstrap = Literal["standard", "always", "none"]

POLICY_LOSSES = ("ppo_clip", "reinforce", "gspo", "cispo", "dppo_tv", "dppo_kl")


class KLControl(Section):
    """`algorithm.kl_ctrl`: the coefficient of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = Field(default="fixed", description="constant, or adapted towards target_kl")
    kl_coef: float = Field(default=0.001, ge=0, description="(initial) coefficient")
    horizon: float = Field(default=10_000, gt=0, description="adaptive: trajectories over which the coefficient reacts")
    target_kl: float = Field(default=0.1, gt=0, description="adaptive: the KL aimed at")


class PFPPO(Section):
    """`algorithm.pf_ppo`: which rows of a rollout PF-PPO trains on, by the task reward of each."""

    method: Literal["pow", "max_min", "max_random"] = Field(
        default="pow", description="weight of a row: |reward|^power; only the best and the worst; mostly the best"
    )
    power: float = Field(default=2.0, gt=0, description="pow: the exponent")
    mode: Literal["resample", "weight"] = Field(
        default="resample", description="draw rows anew with these weights, or multiply the policy loss by them"
    )


class DynamicSampling(Section):
    """`algorithm.dynamic_sampling`: only groups whose samples differ are trained on, others are generated instead."""

    tolerance: float = Field(default=1e-6, ge=0, description="a group is kept if its metrics differ by more than this")
    prompts_per_round: int | None = Field(
        default=None, ge=1, description="prompts generated at once; null: data.train_batch_size"
    )
    max_rounds: int = Field(default=10, ge=1, description="batches of prompts generated for one step at most")
    on_exhausted: Literal["error", "train_partial", "fill_with_rejected"] = Field(
        default="error", description="what happens when max_rounds did not give enough groups"
    )
    surplus: Literal["carry", "drop"] = Field(
        default="carry", description="kept groups beyond the step's: first of the next step, or dropped"
    )


class RewardScaling(Section):
    """`algorithm.reward_scaling`: a linear map of scores; those outside the source range are clipped and counted."""

    source_min: float = Field(default=0.0, description="score that becomes target_min")
    source_max: float = Field(default=1.0, description="score that becomes target_max")
    target_min: float = Field(default=-1.0, description="lowest reward")
    target_max: float = Field(default=1.0, description="highest reward")


class Overlong(Section):
    """`algorithm.overlong`: what happens to responses that are too long, or are cut at the length limit."""

    buffer_length: int | None = Field(
        default=None, ge=1, description="soft punishment over the last tokens before max_length; null: off"
    )
    penalty: float = Field(default=1.0, gt=0, description="soft punishment at max_length and beyond")
    max_length: int | None = Field(default=None, ge=1, description="where it is full; null: data.max_response_length")
    stop_properly_coef: float | None = Field(
        default=None, ge=0, lt=1, description="factor on rewards of truncated responses; null: off"
    )
    filter: bool = Field(default=False, description="truncated responses do not count")


class Rejection(Section):
    """`algorithm.rollout_is.reject`: what is left out of the policy loss because the two engines disagree too much."""

    stat: Literal["k1", "k2", "k3"] = Field(default="k3", description="estimate of KL(rollout || training)")
    level: Literal["token", "sequence"] = Field(
        default="sequence", description="each token by its own, or whole sequences by their mean"
    )
    threshold: float = Field(gt=0, description="above it a token or sequence gets weight 0")


class RolloutIS(Section):
    """`algorithm.rollout_is`: weights on the policy loss where rollout and training engine give other log-probs."""

    mode: Literal["truncate", "icepop", "sequence_mask"] | None = Field(
        default="truncate",
        description="what happens outside [low, high]: cut to it (TIS), weight 0, or whole sequences weight 0 by their "
        "geometric mean; null: no weights, only reject",
    )
    level: Literal["token", "sequence"] = Field(default="token", description="a ratio per token, or their product")
    low: float = Field(default=0.0, ge=0, le=1, description="lower bound of the weights")
    high: float | None = Field(default=2.0, ge=1, description="upper bound of the weights; null: none")
    batch_normalize: bool = Field(default=False, description="divide by the mean weight of the rollout batch")
    reject: Rejection | None = Field(default=None, description="null: nothing is rejected")
    denominator: Literal["original", "kept"] = Field(
        default="original",
        description="tokens of weight 0 stay in the denominators of the actor's loss, or leave it altogether",
    )


class Algorithm(Section):
    """`algorithm`: estimator, losses and schedule of PPO."""

    adv_type: str = Field(
        default="gae",
        description="advantage estimator: gae, grpo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, raw, "
        "or module:function",
    )
    gamma: float = Field(default=1.0, ge=0, le=1, description="discount")
    gae_lambda: float = Field(default=0.95, ge=0, le=1, description="GAE lambda")
    gae_lambda_policy: float | None = Field(
        default=None, ge=0, le=1, description="lambda of the advantages; null: gae_lambda"
    )
    gae_lambda_value: float | None = Field(
        default=None, ge=0, le=1, description="lambda of the critic's returns; null: gae_lambda"
    )
    length_adaptive_alpha: float = Field(
        default=0.0, ge=0, description="lambda of the advantages by response length, 1 - 1 / (alpha length); 0: off"
    )
    bootstrap_truncated: bool = Field(
        default=False, description="responses cut at the length limit go on with the critic's value; false: worth 0"
    )
    grpo_std_normalization: bool = Field(
        default=True, description="grpo: divide by the deviation of the group; false: Dr. GRPO"
    )
    grpo_leave_one_out: bool = Field(
        default=False, description="grpo: mean and deviation of the other samples of the group, not of all"
    )
    group_ignore_masked: bool = Field(
        default=False, description="responses that overlong.filter drops leave the statistics of their group too"
    )
    reinforce_kl_credit: Literal["to_go", "local"] = Field(
        default="to_go",
        description="reinforce_plus_plus: the KL penalty of a token counts for all tokens up to it, or for it only",
    )
    whiten_over: Literal["tokens", "sequences"] = Field(
        default="tokens",
        description="reinforce_plus_plus_baseline: each token counts once in mean and variance, or each sequence",
    )
    normalize_advantages: bool = Field(default=True, description="whiten advantages over the whole rollout batch")
    advantage_clip: Bounds | None = Field(
        default=None, description="lowest and highest advantage, after all normalisation; null: no bounds"
    )
    group_size: int = Field(default=1, ge=1, description="samples per prompt")

    loss_type: Literal["actor_critic", "actor"] = Field(
        default="actor",
        description="actor_critic (embodied): one shared model and backward; actor (reasoning): separate critic",
    )
    policy_loss: str = Field(
        default="ppo_clip",
        min_length=1,
        description="ppo_clip, reinforce, gspo (sequence ratio), cispo (clipped weight), dppo_tv, dppo_kl (bounded "
        "divergence), or module:function",
    )
    loss_agg_func: LossAggregation = Field(default="token-mean", description="how per-token losses become one number")
    loss_agg_horizon: int | None = Field(
        default=None, ge=1, description="constant H of seq-mean-token-sum-norm; null: the longest response allowed"
    )
    loss_agg_denominator: Literal["active", "nominal"] = Field(
        default="active",
        description="sequences that the seq-mean modes divide by: those with an active position, or all of the "
        "mini-batch",
    )
    clip_ratio_low: float = Field(default=0.2, ge=0, le=1, description="ratio clipped below 1 - this")
    clip_ratio_high: float = Field(default=0.2, ge=0, description="ratio clipped above 1 + this")
    clip_ratio_c: float | None = Field(default=None, gt=1, description="dual clip for negative advantages; null: off")
    value_clip: float | None = Field(
        default=None, gt=0, description="value may move this far from the old value; null: off"
    )
    huber_delta: float | None = Field(
        default=None, gt=0, description="Huber threshold of the value loss; null: squared error"
    )
    value_loss_scale: float = Field(default=1.0, gt=0, description="factor on the value loss")
    entropy_bonus: float = Field(default=0.0, ge=0, description="coefficient of the entropy bonus")
    positive_nll_coef: float = Field(
        default=0.0, ge=0, description="coefficient of the negative log-likelihood of correct responses; 0: off"
    )
    positive_nll_norm: PositiveNLLNorm = Field(
        default="correct_tokens", description="what it is divided by: active tokens of correct responses, or of all"
    )
    old_log_probs: OldLogProbs = Field(
        default="recompute",
        description="what the ratio divides by: log-probs of the training engine before the update, those of the "
        "rollout engine, or the current ones",
    )
    rollout_is: RolloutIS | None = Field(
        default=None, description="correction for the mismatch of rollout and training log-probs; null: off"
    )

    ppo_epochs: int = Field(default=1, ge=1, description="passes over the rollout batch for the actor")
    critic_ppo_epochs: int | None = Field(default=None, ge=1, description="passes for the critic; null: as ppo_epochs")
    shuffle_mini_batches: bool = Field(
        default=True, description="a new order of the rollout's rows in every epoch; false: as they were generated"
    )
    policy_training_start_step: int = Field(default=0, ge=0, description="steps that train only the critic")
    target_kl: float | None = Field(
        default=None, gt=0, description="a mini-batch that drifted further ends the actor's update; null: off"
    )

    use_pf_ppo: bool = Field(default=False, description="resample or weight rows by their reward before the update")
    pf_ppo: PFPPO = Field(default_factory=PFPPO, description="how")
    dynamic_sampling: DynamicSampling | None = Field(
        default=None, description="generate until enough groups have samples that differ; null: off"
    )

    use_kl_in_reward: bool = Field(default=False, description="subtract a KL penalty to the reference from the reward")
    kl_penalty: KLPenalty = Field(default="k1", description="its estimator")
    kl_output_clip: float | None = Field(
        default=10.0, gt=0, description="largest k3 in the reward and its metric; null: no bound"
    )
    kl_ctrl: KLControl = Field(default_factory=KLControl, description="its coefficient")
    use_kl_loss: bool = Field(default=False, description="add a KL term to the actor loss")
    kl_loss_coef: float = Field(default=0.001, ge=0, description="its coefficient")
    kl_loss_type: KLLossType = Field(default="k3", description="its estimator; + has the gradient of k2")
    kl_loss_grad: KLGradient = Field(
        default="path", description="its gradient: the estimator's own, that of k2 (as +), or of its expectation"
    )
    kl_loss_output_clip: float | None = Field(
        default=None, gt=0, description="largest k3 in the loss, without gradient beyond; null: no bound"
    )
    allow_both_kl: bool = Field(default=False, description="accept the KL in the reward and in the loss at once")

    reward_scaling: RewardScaling | None = Field(default=None, description="map scores to another range; null: off")
    overlong: Overlong = Field(default_factory=Overlong, description="rewards of long and truncated responses")
    reward_whitening: bool = Field(default=False, description="scale rewards to unit variance over the rollout batch")

    reward_type: RewardLevel = Field(
        default="chunk_level",
        description="embodied: one reward, value and advantage per action chunk (its rewards added up) or per action",
    )
    logprob_type: ActionLevel = Field(
        default="chunk_level",
        description="embodied: one log-prob and ratio per action chunk, per action, or per component of an action",
    )
    entropy_type: ActionLevel = Field(
        default="chunk_level", description="embodied: whose entropy the entropy term is a mean of"
    )
    bootstrap_type: Bootstrap = Field(
        default="standard",
        description="embodied: where an episode ends, its last state's value counts if it was cut by its time limit "
        "(standard), always, or never (none)",
    )

    rollout_micro_batch_size: int | None = Field(
        default=None, ge=1, description="rows per forward of the rollout policy; null: all that wait"
    )
    logprob_forward_micro_batch_size: int | None = Field(
        default=None, ge=1, description="rows per forward when log-probs and values are computed; null: as in training"
    )

    @property
    def critic_epochs(self) -> int:
        return self.critic_ppo_epochs if self.critic_ppo_epochs is not None else self.ppo_epochs

    @property
    def full_kl_in_reward(self) -> bool:
        return self.use_kl_in_reward and self.kl_penalty == "full"

    @property
    def full_kl_in_loss(self) -> bool:
        return self.use_kl_loss and self.kl_loss_type == "full"

    @property
    def needs_reference(self) -> bool:
        return self.use_kl_in_reward or self.use_kl_loss
