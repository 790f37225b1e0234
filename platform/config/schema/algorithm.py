"""The `algorithm` section: estimators, losses and schedules of PPO. The formulas are in `algorithms/`."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from rl_platform.config.schema.base import Section, key

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


class EstimatorNeeds(NamedTuple):
    """values: needs a critic's; groups: compares samples of one prompt; whitens: always or never (None: as
    `normalize_advantages` says); keys: those of `algorithm` that only some estimators read, and this one does."""

    values: bool = False
    groups: bool = False
    whitens: bool | None = None
    keys: tuple[str, ...] = ()


_GAE = ("gamma", "gae_lambda", "gae_lambda_policy", "gae_lambda_value", "length_adaptive_alpha", "bootstrap_truncated")
ESTIMATORS = {  # by their name in `adv_type`
    "gae": EstimatorNeeds(values=True, keys=_GAE),
    "grpo": EstimatorNeeds(groups=True, whitens=False, keys=("grpo_std_normalization", "grpo_leave_one_out")),
    "rloo": EstimatorNeeds(groups=True, whitens=False),
    "reinforce_plus_plus": EstimatorNeeds(whitens=True, keys=("gamma", "reinforce_kl_credit")),
    "reinforce_plus_plus_baseline": EstimatorNeeds(groups=True, whitens=True, keys=("whiten_over",)),
    "raw": EstimatorNeeds(),
}


def estimator_needs(adv_type: str) -> EstimatorNeeds:
    """The needs of `adv_type`. A user's function has none; it may read any key, and the values of a critic."""
    return ESTIMATORS.get(adv_type, EstimatorNeeds())


class KLControl(Section):
    """`algorithm.kl_ctrl`: the coefficient of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = key("fixed", "constant, or adapted towards target_kl")
    kl_coef: float = key(0.001, "(initial) coefficient", ge=0)
    horizon: float = key(10_000, "adaptive: trajectories over which the coefficient reacts", gt=0)
    target_kl: float = key(0.1, "adaptive: the KL aimed at", gt=0)


class PFPPO(Section):
    """`algorithm.pf_ppo`: which rows of a rollout PF-PPO trains on, by the task reward of each."""

    method: Literal["pow", "max_min", "max_random"] = key(
        "pow", "weight of a row: |reward|^power; only the best and the worst; mostly the best"
    )
    power: float = key(2.0, "pow: the exponent", gt=0)
    mode: Literal["resample", "weight"] = key(
        "resample", "draw rows anew with these weights, or multiply the policy loss by them"
    )


class DynamicSampling(Section):
    """`algorithm.dynamic_sampling`: only groups whose samples differ are trained on, others are generated instead."""

    tolerance: float = key(1e-6, "a group is kept if its metrics differ by more than this", ge=0)
    prompts_per_round: int | None = key(None, "prompts generated at once; null: data.train_batch_size", ge=1)
    max_rounds: int = key(10, "batches of prompts generated for one step at most", ge=1)
    on_exhausted: Literal["error", "train_partial", "fill_with_rejected"] = key(
        "error", "what happens when max_rounds did not give enough groups"
    )
    surplus: Literal["carry", "drop"] = key(
        "carry", "kept groups beyond the step's: first of the next step, or dropped"
    )


class RewardScaling(Section):
    """`algorithm.reward_scaling`: a linear map of scores; those outside the source range are clipped and counted."""

    source_min: float = key(0.0, "score that becomes target_min")
    source_max: float = key(1.0, "score that becomes target_max")
    target_min: float = key(-1.0, "lowest reward")
    target_max: float = key(1.0, "highest reward")


class Overlong(Section):
    """`algorithm.overlong`: what happens to responses that are too long, or are cut at the length limit."""

    buffer_length: int | None = key(None, "soft punishment over the last tokens before max_length; null: off", ge=1)
    penalty: float = key(1.0, "soft punishment at max_length and beyond", gt=0)
    max_length: int | None = key(None, "where it is full; null: data.max_response_length", ge=1)
    stop_properly_coef: float | None = key(None, "factor on rewards of truncated responses; null: off", ge=0, lt=1)
    filter: bool = key(False, "truncated responses do not count")


class Rejection(Section):
    """`algorithm.rollout_is.reject`: what is left out of the policy loss because the two engines disagree too much."""

    stat: Literal["k1", "k2", "k3"] = key("k3", "estimate of KL(rollout || training)")
    level: Literal["token", "sequence"] = key("sequence", "each token by its own, or whole sequences by their mean")
    threshold: float = Field(gt=0, description="above it a token or sequence gets weight 0")


class RolloutIS(Section):
    """`algorithm.rollout_is`: weights on the policy loss where rollout and training engine give other log-probs."""

    mode: Literal["truncate", "icepop", "sequence_mask"] | None = key(
        "truncate",
        "what happens outside [low, high]: cut to it (TIS), weight 0, or whole sequences weight 0 by their "
        "geometric mean; null: no weights, only reject",
    )
    level: Literal["token", "sequence"] = key("token", "a ratio per token, or their product")
    low: float = key(0.0, "lower bound of the weights", ge=0, le=1)
    high: float | None = key(2.0, "upper bound of the weights; null: none", ge=1)
    batch_normalize: bool = key(False, "divide by the mean weight of the rollout batch")
    reject: Rejection | None = key(None, "null: nothing is rejected")
    denominator: Literal["original", "kept"] = key(
        "original", "tokens of weight 0 stay in the denominators of the actor's loss, or leave it altogether"
    )


class Algorithm(Section):
    """`algorithm`: estimator, losses and schedule of PPO."""

    adv_type: str = key(
        "gae",
        "advantage estimator: gae, grpo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, raw, "
        "or module:function",
    )
    gamma: float = key(1.0, "discount", ge=0, le=1)
    gae_lambda: float = key(0.95, "GAE lambda", ge=0, le=1)
    gae_lambda_policy: float | None = key(None, "lambda of the advantages; null: gae_lambda", ge=0, le=1)
    gae_lambda_value: float | None = key(None, "lambda of the critic's returns; null: gae_lambda", ge=0, le=1)
    length_adaptive_alpha: float = key(
        0.0, "lambda of the advantages by response length, 1 - 1 / (alpha length); 0: off", ge=0
    )
    bootstrap_truncated: bool = key(
        False, "responses cut at the length limit go on with the critic's value; false: worth 0"
    )
    grpo_std_normalization: bool = key(True, "grpo: divide by the deviation of the group; false: Dr. GRPO")
    grpo_leave_one_out: bool = key(False, "grpo: mean and deviation of the other samples of the group, not of all")
    group_ignore_masked: bool = key(
        False, "responses that overlong.filter drops leave the statistics of their group too"
    )
    reinforce_kl_credit: Literal["to_go", "local"] = key(
        "to_go", "reinforce_plus_plus: the KL penalty of a token counts for all tokens up to it, or for it only"
    )
    whiten_over: Literal["tokens", "sequences"] = key(
        "tokens", "reinforce_plus_plus_baseline: each token counts once in mean and variance, or each sequence"
    )
    normalize_advantages: bool = key(True, "whiten advantages over the whole rollout batch")
    advantage_clip: Bounds | None = key(None, "lowest and highest advantage, after all normalisation; null: no bounds")
    group_size: int = key(1, "samples per prompt", ge=1)

    loss_type: Literal["actor_critic", "actor"] = key(
        "actor", "actor_critic (embodied): one shared model and backward; actor (reasoning): separate critic"
    )
    policy_loss: str = key(
        "ppo_clip",
        "ppo_clip, reinforce, gspo (sequence ratio), cispo (clipped weight), dppo_tv, dppo_kl (bounded "
        "divergence), or module:function",
        min_length=1,
    )
    loss_agg_func: LossAggregation = key("token-mean", "how per-token losses become one number")
    loss_agg_horizon: int | None = key(
        None, "constant H of seq-mean-token-sum-norm; null: the longest response allowed", ge=1
    )
    loss_agg_denominator: Literal["active", "nominal"] = key(
        "active", "sequences that the seq-mean modes divide by: those with an active position, or all of the mini-batch"
    )
    clip_ratio_low: float = key(0.2, "ratio clipped below 1 - this", ge=0, le=1)
    clip_ratio_high: float = key(0.2, "ratio clipped above 1 + this", ge=0)
    clip_ratio_c: float | None = key(None, "dual clip for negative advantages; null: off", gt=1)
    value_clip: float | None = key(None, "value may move this far from the old value; null: off", gt=0)
    huber_delta: float | None = key(None, "Huber threshold of the value loss; null: squared error", gt=0)
    value_loss_scale: float = key(1.0, "factor on the value loss", gt=0)
    entropy_bonus: float = key(0.0, "coefficient of the entropy bonus", ge=0)
    positive_nll_coef: float = key(0.0, "coefficient of the negative log-likelihood of correct responses; 0: off", ge=0)
    positive_nll_norm: PositiveNLLNorm = key(
        "correct_tokens", "what it is divided by: active tokens of correct responses, or of all"
    )
    old_log_probs: OldLogProbs = key(
        "recompute",
        "what the ratio divides by: log-probs of the training engine before the update, those of the "
        "rollout engine, or the current ones",
    )
    rollout_is: RolloutIS | None = key(None, "correction for the mismatch of rollout and training log-probs; null: off")

    ppo_epochs: int = key(1, "passes over the rollout batch for the actor", ge=1)
    critic_ppo_epochs: int | None = key(None, "passes for the critic; null: as ppo_epochs", ge=1)
    shuffle_mini_batches: bool = key(
        True, "a new order of the rollout's rows in every epoch; false: as they were generated"
    )
    policy_training_start_step: int = key(0, "steps that train only the critic", ge=0)
    target_kl: float | None = key(None, "a mini-batch that drifted further ends the actor's update; null: off", gt=0)

    use_pf_ppo: bool = key(False, "resample or weight rows by their reward before the update")
    pf_ppo: PFPPO = Field(default_factory=PFPPO, description="how")
    dynamic_sampling: DynamicSampling | None = key(
        None, "generate until enough groups have samples that differ; null: off"
    )

    use_kl_in_reward: bool = key(False, "subtract a KL penalty to the reference from the reward")
    kl_penalty: KLPenalty = key("k1", "its estimator")
    kl_output_clip: float | None = key(10.0, "largest k3 in the reward and its metric; null: no bound", gt=0)
    kl_ctrl: KLControl = Field(default_factory=KLControl, description="its coefficient")
    use_kl_loss: bool = key(False, "add a KL term to the actor loss")
    kl_loss_coef: float = key(0.001, "its coefficient", ge=0)
    kl_loss_type: KLLossType = key("k3", "its estimator; + has the gradient of k2")
    kl_loss_grad: KLGradient = key(
        "path", "its gradient: the estimator's own, that of k2 (as +), or of its expectation"
    )
    kl_loss_output_clip: float | None = key(
        None, "largest k3 in the loss, without gradient beyond; null: no bound", gt=0
    )
    allow_both_kl: bool = key(False, "accept the KL in the reward and in the loss at once")

    reward_scaling: RewardScaling | None = key(None, "map scores to another range; null: off")
    overlong: Overlong = Field(default_factory=Overlong, description="rewards of long and truncated responses")
    reward_whitening: bool = key(False, "scale rewards to unit variance over the rollout batch")

    reward_type: RewardLevel = key(
        "chunk_level", "embodied: one reward, value and advantage per action chunk (its rewards added up) or per action"
    )
    logprob_type: ActionLevel = key(
        "chunk_level", "embodied: one log-prob and ratio per action chunk, per action, or per component of an action"
    )
    entropy_type: ActionLevel = key("chunk_level", "embodied: whose entropy the entropy term is a mean of")
    bootstrap_type: Bootstrap = key(
        "standard",
        "embodied: where an episode ends, its last state's value counts if it was cut by its time limit "
        "(standard), always, or never (none)",
    )

    rollout_micro_batch_size: int | None = key(
        None, "rows per forward of the rollout policy; null: all that wait", ge=1
    )
    logprob_forward_micro_batch_size: int | None = key(
        None, "rows per forward when log-probs and values are computed; null: as in training", ge=1
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
