"""The `algorithm` section: estimators, losses and schedules of PPO. The formulas are in `algorithms/`."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from rl_platform.config.schema.section import Section, key

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
Bounds = Annotated[tuple[float, float], Field(strict=False)]  # strict validation refuses YAML's lists
# A reward, log-prob or entropy belongs to a whole action chunk, to one of its actions, or to a component of an action.
RewardLevel = Literal["chunk_level", "action_level"]
ActionLevel = Literal[RewardLevel, "token_level"]
LossType = Literal["actor_critic", "actor"]
Bootstrap = Literal["standard", "always", "none"]

POLICY_LOSSES = (
    "ppo_clip", "reinforce", "gspo", "gspo_token", "gmpo", "sapo", "cispo", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl"
)  # fmt: skip
COVARIANCE = ("clip_cov", "kl_cov")  # those that treat positions of large covariance apart
SEQUENCE_RATIO = ("gspo", "gspo_token", "gmpo")  # those with one ratio per sequence


class EstimatorNeeds(NamedTuple):
    """The inputs of an advantage estimator, and whether it whitens.

    values: the values of a critic. groups: several samples of one prompt. greedy: the reward of a greedy response to
    each prompt. squared_probs: the sum of the squared probabilities over the vocabulary. whitens: True: always, False:
    never, None: `normalize_advantages` decides. keys: the keys of `algorithm` that it reads and others do not.
    """

    values: bool = False
    groups: bool = False
    greedy: bool = False
    squared_probs: bool = False
    whitens: bool | None = None
    keys: tuple[str, ...] = ()


_GAE = ("gamma", "gae_lambda", "gae_lambda_policy", "gae_lambda_value", "length_adaptive_alpha", "bootstrap_truncated")
ESTIMATORS = {  # by their name in `adv_type`
    "gae": EstimatorNeeds(values=True, keys=_GAE),
    "grpo": EstimatorNeeds(groups=True, whitens=False, keys=("grpo_std_normalization", "grpo_leave_one_out")),
    "rloo": EstimatorNeeds(groups=True, whitens=False),
    "opo": EstimatorNeeds(groups=True, whitens=False),
    "reinforce_plus_plus": EstimatorNeeds(whitens=True, keys=("gamma", "reinforce_kl_credit")),
    "reinforce_plus_plus_baseline": EstimatorNeeds(groups=True, whitens=True, keys=("whiten_over",)),
    "optimal_token_baseline": EstimatorNeeds(groups=True, squared_probs=True, whitens=False),
    "remax": EstimatorNeeds(greedy=True, whitens=False),
    "raw": EstimatorNeeds(),
    "distillation": EstimatorNeeds(whitens=False),
}


def estimator_needs(adv_type: str) -> EstimatorNeeds:
    """Returns the needs of `adv_type`. A user's function has none; it may read any key, and the values of a critic."""
    return ESTIMATORS.get(adv_type, EstimatorNeeds())


class KLControl(Section):
    """`algorithm.kl_ctrl`: the coefficient of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = key("fixed", "constant coefficient, or adapted towards target_kl")
    kl_coef: float = key(0.001, "coefficient; adaptive: its initial value", ge=0)
    horizon: float = key(10_000, "adaptive: trajectories over which the coefficient reacts", gt=0)
    target_kl: float = key(0.1, "adaptive: target of the KL", gt=0)


class PFPPO(Section):
    """`algorithm.pf_ppo`: PF-PPO resamples or weights the rows of a rollout by their task rewards."""

    method: Literal["pow", "max_min", "max_random"] = key(
        "pow", "weight of a row: |reward|^power (pow), best and worst rows only (max_min), mostly the best (max_random)"
    )
    power: float = key(2.0, "pow: exponent", gt=0)
    mode: Literal["resample", "weight"] = key(
        "resample", "draw rows with these weights, or multiply their policy loss by them"
    )


class DynamicSampling(Section):
    """`algorithm.dynamic_sampling`: groups whose samples have equal rewards are replaced by further groups."""

    tolerance: float = key(1e-6, "groups with a smaller difference of rewards are replaced", ge=0)
    filter: str | None = key(
        None, "module:function that selects groups, instead of tolerance; null: those whose rewards differ"
    )
    prompts_per_round: int | None = key(None, "prompts per round of generation; null: data.train_batch_size", ge=1)
    max_rounds: int = key(10, "largest number of rounds per step", ge=1)
    on_exhausted: Literal["error", "train_partial", "fill_with_rejected"] = key(
        "error", "reaction to too few groups after max_rounds"
    )
    surplus: Literal["carry", "drop"] = key("carry", "surplus groups: use them in the next step, or drop them")


class RewardScaling(Section):
    """`algorithm.reward_scaling`: a linear map of scores. Scores outside the source range are clipped and counted."""

    source_min: float = key(0.0, "score mapped to target_min")
    source_max: float = key(1.0, "score mapped to target_max")
    target_min: float = key(-1.0, "smallest reward")
    target_max: float = key(1.0, "largest reward")


class Overlong(Section):
    """`algorithm.overlong`: rewards of responses that are too long, or truncated at the length limit."""

    buffer_length: int | None = key(
        None, "tokens before max_length over which the penalty grows; null: no penalty", ge=1
    )
    penalty: float = key(1.0, "penalty at max_length and beyond", gt=0)
    max_length: int | None = key(None, "length with the full penalty; null: data.max_response_length", ge=1)
    stop_properly_coef: float | None = key(
        None, "factor on the rewards of truncated responses; null: no factor", ge=0, lt=1
    )
    filter: bool = key(False, "leave truncated responses out of the losses")


class Rejection(Section):
    """`algorithm.rollout_is.reject`: leaves tokens or sequences with too large a mismatch out of the policy loss."""

    stat: Literal["k1", "k2", "k3"] = key("k3", "estimator of KL(rollout || training)")
    level: Literal["token", "sequence"] = key("sequence", "reject single tokens, or whole sequences by their mean")
    threshold: float = Field(gt=0, description="largest estimate that is not rejected")
    low: float | None = key(None, "k1: smallest estimate that is not rejected; null: none", lt=0)


class RolloutIS(Section):
    """`algorithm.rollout_is`: importance weights for the mismatch between rollout and training log-probs."""

    mode: Literal["truncate", "icepop", "sequence_mask"] | None = key(
        "truncate",
        "weights outside [low, high]: clip them (truncate: TIS), set them to 0 (icepop), or set whole sequences to 0 "
        "by their geometric mean (sequence_mask); null: no weights, only reject",
    )
    level: Literal["token", "sequence"] = key("token", "a weight per token, or their product per sequence")
    low: float = key(0.0, "lower bound of the weights", ge=0, le=1)
    high: float | None = key(2.0, "upper bound of the weights; null: none", ge=1)
    vtrace: bool = key(
        False, "V-trace: the weights correct the value targets, and each advantage for the steps that follow it, too"
    )
    batch_normalize: bool = key(False, "divide weights by their mean over the rollout batch")
    reject: Rejection | None = key(None, "rejection of large mismatches; null: none")
    veto: float | None = key(None, "sequences with a token whose ratio is below it get weight 0; null: off", gt=0, lt=1)
    denominator: Literal["original", "kept"] = key(
        "original", "tokens of weight 0 count in the denominators of the actor's loss (original), or do not (kept)"
    )


class Covariance(Section):
    """`algorithm.covariance`: the positions that policy_loss clip_cov and kl_cov treat apart."""

    fraction: float = key(2e-4, "share of the active positions of a mini-batch, at least one", gt=0, le=1)
    low: float = key(1.0, "clip_cov: lower bound of their covariance")
    high: float = key(5.0, "clip_cov: upper bound of their covariance")
    kl_coef: float = key(1.0, "kl_cov: coefficient of the absolute log-ratio at these positions", gt=0)


class Algorithm(Section):
    """`algorithm`: estimator, losses and schedule of PPO."""

    adv_type: str = key("gae", f"advantage estimator: {', '.join(ESTIMATORS)}, or module:function")
    distillation_coef: float = key(
        0.0, "coefficient of the reverse KL to the teacher reference.model in each advantage; 0: off", ge=0
    )
    gamma: float = key(1.0, "discount factor", ge=0, le=1)
    gae_lambda: float = key(0.95, "GAE lambda", ge=0, le=1)
    gae_lambda_policy: float | None = key(None, "GAE lambda of the advantages; null: gae_lambda", ge=0, le=1)
    gae_lambda_value: float | None = key(None, "GAE lambda of the critic's returns; null: gae_lambda", ge=0, le=1)
    length_adaptive_alpha: float = key(
        0.0, "alpha of the lambda of the advantages, 1 - 1 / (alpha length); 0: off", ge=0
    )
    bootstrap_truncated: bool = key(False, "bootstrap truncated responses with the critic's value; false: with 0")
    grpo_std_normalization: bool = key(True, "grpo: divide by the standard deviation of the group; false: Dr. GRPO")
    grpo_leave_one_out: bool = key(False, "grpo: mean and standard deviation of the other samples of the group")
    group_ignore_masked: bool = key(
        False, "responses that overlong.filter or sample_filter drops leave the statistics of their group too"
    )
    reinforce_kl_credit: Literal["to_go", "local"] = key(
        "to_go",
        "reinforce_plus_plus: a token's KL penalty reduces the returns of all tokens up to it (to_go), or only its own",
    )
    whiten_over: Literal["tokens", "sequences"] = key(
        "tokens", "reinforce_plus_plus_baseline: mean and variance over tokens, or over sequences"
    )
    normalize_advantages: bool = key(True, "whiten advantages over the whole rollout batch")
    advantage_clip: Bounds | None = key(None, "bounds of the advantages after all normalisation; null: none")
    group_size: int = key(1, "samples per prompt; embodied: environments that begin in one state", ge=1)

    loss_type: LossType = key(
        "actor",
        "actor_critic: policy and value heads on one model, one backward (embodied, gae); actor: the policy alone "
        "(embodied, other estimators) or beside a separate critic (reasoning)",
    )
    policy_loss: str = key("ppo_clip", f"{', '.join(POLICY_LOSSES)}, or module:function", min_length=1)
    loss_agg_func: LossAggregation = key("token-mean", "aggregation of token losses to a scalar")
    loss_agg_horizon: int | None = key(
        None, "seq-mean-token-sum-norm: the constant divisor; null: the length limit of responses", ge=1
    )
    loss_agg_denominator: Literal["active", "nominal"] = key(
        "active", "divisor of the seq-mean modes: sequences with an active position, or all of the mini-batch"
    )
    clip_ratio_low: float = key(0.2, "lower clip: the ratio is clipped at 1 - clip_ratio_low", ge=0, le=1)
    clip_ratio_high: float = key(0.2, "upper clip: the ratio is clipped at 1 + clip_ratio_high", ge=0)
    clip_ratio_c: float | None = key(None, "dual clip: bound of the ratio for negative advantages; null: off", gt=1)
    covariance: Covariance = Field(default_factory=Covariance, description="positions of clip_cov and kl_cov")
    sapo_tau_pos: float = key(1.0, "sapo: how fast the gate closes where A > 0", gt=0)
    sapo_tau_neg: float = key(1.05, "sapo: how fast it closes where A < 0", gt=0)
    value_clip: float | None = key(None, "value clip: largest distance from the old value; null: off", gt=0)
    huber_delta: float | None = key(None, "threshold of the Huber value loss; null: squared error", gt=0)
    value_loss_scale: float = key(1.0, "coefficient of the value loss", gt=0)
    entropy_bonus: float = key(0.0, "coefficient of the entropy bonus", ge=0)
    positive_nll_coef: float = key(0.0, "coefficient of the NLL of correct responses; 0: off", ge=0)
    positive_nll_norm: PositiveNLLNorm = key(
        "correct_tokens", "divisor of that term: active tokens of correct responses, or of all"
    )
    old_log_probs: OldLogProbs = key(
        "recompute",
        "denominator of the ratio: log-probs of the training engine before the update (recompute), of the rollout "
        "engine, or of the current policy (ratio 1)",
    )
    rollout_is: RolloutIS | None = key(
        None, "correction for the mismatch between rollout and training log-probs; null: off"
    )

    ppo_epochs: int = key(1, "epochs of the actor over the rollout batch", ge=1)
    critic_ppo_epochs: int | None = key(None, "epochs of the critic; null: ppo_epochs", ge=1)
    shuffle_mini_batches: bool = key(True, "shuffle the rows in every epoch; false: order of generation")
    policy_training_start_step: int = key(0, "first steps that train only the critic", ge=0)
    target_kl: float | None = key(
        None, "a mini-batch with a larger KL to the old policy ends the actor's update; null: off", gt=0
    )

    use_pf_ppo: bool = key(False, "resample or weight rows by their reward before the update")
    pf_ppo: PFPPO = Field(default_factory=PFPPO, description="method of PF-PPO")
    dynamic_sampling: DynamicSampling | None = key(
        None, "generate until enough groups have different rewards; null: off"
    )

    sample_filter: str | None = key(
        None, "module:function that selects the responses to train on; null: all with a score"
    )

    use_kl_in_reward: bool = key(False, "subtract a KL penalty to the reference from the reward")
    kl_penalty: KLPenalty = key("k1", "estimator of the KL in the reward")
    kl_output_clip: float | None = key(10.0, "largest k3 in the reward and its metric; null: no bound", gt=0)
    kl_ctrl: KLControl = Field(default_factory=KLControl, description="coefficient of the KL in the reward")
    use_kl_loss: bool = key(False, "add a KL term to the actor loss")
    kl_loss_coef: float = key(0.001, "coefficient of the KL loss", ge=0)
    kl_loss_type: KLLossType = key("k3", "estimator of the KL loss; +: with the gradient of k2")
    kl_loss_grad: KLGradient = key(
        "path", "gradient of the KL loss: of the estimator (path), of k2 (as +), or of its expectation (score)"
    )
    kl_loss_output_clip: float | None = key(
        None, "largest k3 in the loss, without gradient beyond; null: no bound", gt=0
    )
    allow_both_kl: bool = key(False, "allow the KL in the reward and in the loss at once")

    reward_scaling: RewardScaling | None = key(None, "linear map of scores to another range; null: off")
    overlong: Overlong = Field(default_factory=Overlong, description="rewards of long and truncated responses")
    reward_whitening: bool = key(False, "scale rewards to unit variance over the rollout batch")

    reward_type: RewardLevel = key(
        "chunk_level",
        "embodied: one reward, value and advantage per action chunk (the sum of its rewards) or per action",
    )
    logprob_type: ActionLevel = key(
        "chunk_level", "embodied: one log-prob and ratio per action chunk, per action, or per component of an action"
    )
    entropy_type: ActionLevel = key(
        "chunk_level", "embodied: the entropy bonus is a mean over action chunks, actions, or components of actions"
    )
    bootstrap_type: Bootstrap = key(
        "standard",
        "embodied: bootstrap the end of an episode with the value of its last state if its time limit ended it "
        "(standard), always, or never (none)",
    )

    rollout_micro_batch_size: int | None = key(
        None, "rows per forward pass of the rollout policy; null: all waiting rows", ge=1
    )
    logprob_forward_micro_batch_size: int | None = key(
        None, "rows per forward pass for log-probs and values; null: as in training", ge=1
    )

    @property
    def critic_epochs(self) -> int:
        """The epochs of the critic over the rollout batch."""
        return self.critic_ppo_epochs if self.critic_ppo_epochs is not None else self.ppo_epochs

    @property
    def full_kl_in_reward(self) -> bool:
        """True if the KL in the reward sums over the vocabulary."""
        return self.use_kl_in_reward and self.kl_penalty == "full"

    @property
    def full_kl_in_loss(self) -> bool:
        """True if the KL in the loss sums over the vocabulary."""
        return self.use_kl_loss and self.kl_loss_type == "full"

    @property
    def full_kl(self) -> bool:
        """True if a KL term sums over the vocabulary, in the reward or in the loss."""
        return self.full_kl_in_reward or self.full_kl_in_loss

    @property
    def needs_reference(self) -> bool:
        """True if a term reads the log-probs of a frozen reference model."""
        return self.use_kl_in_reward or self.use_kl_loss or self.distillation_coef > 0
