"""Rules of `algorithm`: estimator, losses, KL terms, and the rows that a step trains on.

The rules of its keys that change scores are in `reward.py`.
"""

from __future__ import annotations

from rl_platform.config.estimators import ESTIMATORS, estimator_of
from rl_platform.config.rules.data import rows_of_step
from rl_platform.config.rules.models import policy_is
from rl_platform.config.rules.rule import CHUNKS, FUNCTION, TASK, Condition, Rule, always, embodied, only, reasoning
from rl_platform.config.schema import Config
from rl_platform.config.schema.algorithm import POLICY_LOSSES
from rl_platform.config.suggest import nearest

_TYPE, _LOSS, _AGGREGATION = "algorithm.adv_type", "algorithm.policy_loss", "algorithm.loss_agg_func"
_KL_REWARD, _KL_LOSS, _BOTH_KL = "algorithm.use_kl_in_reward", "algorithm.use_kl_loss", "algorithm.allow_both_kl"
_CORRECTION, _OLD, _DYNAMIC = "algorithm.rollout_is", "algorithm.old_log_probs", "algorithm.dynamic_sampling"
_PF_PPO, _GROUP_SIZE, _SEPARATE = "algorithm.use_pf_ppo", "algorithm.group_size", "critic.use_critic_model"
_MINI, _EPOCHS, _POLICY = "data.mini_batch_size", "algorithm.ppo_epochs", "actor.model.type"
_ALPHA, _FILTER = "algorithm.length_adaptive_alpha", "algorithm.overlong.filter"


# The estimator and the loss


def _is_unknown_estimator(config: Config) -> bool:
    name = config.algorithm.adv_type
    return name not in ESTIMATORS and not FUNCTION.fullmatch(name)


def _nearest_estimator(config: Config) -> str:
    close = nearest(config.algorithm.adv_type, ESTIMATORS)
    return f"did you mean {close}?" if close else ""


def _nearest_loss(config: Config) -> str:
    close = nearest(config.algorithm.policy_loss, POLICY_LOSSES)
    return f"did you mean {close}?" if close else ""


def _fitting_loss_type(config: Config) -> str:
    return "actor_critic" if embodied(config) else "actor"


def _why_loss_type(config: Config) -> str:
    reason = {
        "embodied": "the values of an embodied policy come from a head on its own backbone",
        "reasoning": "the values of a language model come from a separate critic",
    }[config.runner.task_type]
    return f"{config.runner.task_type} training needs {_fitting_loss_type(config)}: {reason}"


def _policy_loss_is(*kinds: str) -> Condition:
    return lambda config: config.algorithm.policy_loss in kinds


_LEVELS = {  # why a policy of this type has no log-prob per component of an action
    "vla": "actor.model.type vla has one log-prob and one entropy per action, the sums over its components",
    "gru": "a position of a recurrent policy's sequence is a step, whose components share one log-prob",
}


def _level_rule(name: str, policy: str, reason: str) -> Rule:
    is_policy = policy_is(policy)
    return Rule(
        f"algorithm.{name}",
        lambda config: is_policy(config) and getattr(config.algorithm, name) == "token_level",
        reason,
        (_POLICY, TASK),
        f"algorithm.{name}: chunk_level",
    )


_ESTIMATOR_RULES = (
    Rule(
        "algorithm.loss_type",
        lambda config: config.algorithm.loss_type != _fitting_loss_type(config),
        _why_loss_type,
        (TASK,),
        lambda config: f"algorithm.loss_type: {_fitting_loss_type(config)}",
    ),
    Rule(
        _GROUP_SIZE,
        lambda config: embodied(config) and config.algorithm.group_size > 1,
        "embodied episodes have no prompt to group by",
        (TASK,),
        "more samples: env.num_envs",
    ),
    Rule(
        _TYPE,
        _is_unknown_estimator,
        f"neither one of {', '.join(ESTIMATORS)} nor a function written as module:function",
        hint=_nearest_estimator,
    ),
    Rule(
        _TYPE,
        lambda config: embodied(config) and config.algorithm.adv_type != "gae" and not _is_unknown_estimator(config),
        "embodied training has gae only: its policy trains values anyway, and its rows hold many episodes",
        (TASK,),
        f"{_TYPE}: gae",
    ),
    Rule(
        _ALPHA,
        lambda config: (
            embodied(config) and config.algorithm.adv_type == "gae" and config.algorithm.length_adaptive_alpha > 0
        ),
        "a row of an embodied rollout holds several episodes: there is no response length to adapt to",
        (TASK,),
    ),
    Rule(
        _GROUP_SIZE,
        lambda config: (
            reasoning(config) and estimator_of(config.algorithm.adv_type).groups and config.algorithm.group_size < 2
        ),
        lambda config: (
            f"adv_type {config.algorithm.adv_type} compares the samples of a prompt: it needs at least 2, of 1 every "
            "advantage is 0"
        ),
        (_TYPE, TASK),
        f"{_GROUP_SIZE}: 8",
    ),
    Rule(
        "algorithm.grpo_leave_one_out",
        lambda config: (
            config.algorithm.adv_type == "grpo"
            and config.algorithm.grpo_leave_one_out
            and not config.algorithm.grpo_std_normalization
        ),
        "score minus mean of the others, not divided (algorithm.grpo_std_normalization is false), is the estimator "
        "rloo",
        ("algorithm.grpo_std_normalization",),
        "algorithm.adv_type: rloo",
    ),
    Rule(
        "algorithm.advantage_clip",
        lambda config: (
            (clip := config.algorithm.advantage_clip) is not None
            and not (clip[0] <= 0 <= clip[1] and clip[0] < clip[1])
        ),
        "an advantage of 0 must stay 0: give [lowest, highest] with lowest <= 0 <= highest, not both 0",
    ),
    Rule(
        "algorithm.policy_training_start_step",
        lambda config: config.runner.max_steps <= config.algorithm.policy_training_start_step,
        lambda config: (
            f"the policy would never train: it starts at step {config.algorithm.policy_training_start_step} of "
            f"{config.runner.max_steps}"
        ),
        ("runner.max_steps",),
    ),
)

_LOSS_RULES = (
    Rule(
        _LOSS,
        lambda config: (
            config.algorithm.policy_loss not in POLICY_LOSSES and not FUNCTION.fullmatch(config.algorithm.policy_loss)
        ),
        f"neither one of {', '.join(POLICY_LOSSES)} nor a function written as module:function",
        hint=_nearest_loss,
    ),
    Rule(
        _LOSS,
        lambda config: embodied(config) and config.algorithm.policy_loss == "gspo",
        "an embodied row is one transition, and its one ratio is that of ppo_clip (algorithm.logprob_type)",
        (TASK,),
        f"{_LOSS}: ppo_clip",
    ),
    Rule(
        _LOSS,
        lambda config: embodied(config) and config.algorithm.policy_loss in ("dppo_tv", "dppo_kl"),
        "its divergence is that of token probabilities, and continuous actions have densities, which can exceed 1",
        (TASK,),
        f"{_LOSS}: ppo_clip",
    ),
    Rule(
        _AGGREGATION,
        lambda config: (
            reasoning(config)
            and config.algorithm.policy_loss == "gspo"
            and config.algorithm.loss_agg_func != "seq-mean-token-mean"
        ),
        "policy_loss gspo has one ratio per sequence: each sequence must weigh the same, whatever its length",
        (_LOSS,),
        f"{_AGGREGATION}: seq-mean-token-mean",
    ),
    Rule(
        "algorithm.positive_nll_coef",
        lambda config: embodied(config) and config.algorithm.positive_nll_coef,
        "no row of an embodied rollout is a correct answer: it holds transitions",
        (TASK,),
    ),
    Rule(
        "algorithm.logprob_type",
        lambda config: (
            embodied(config)
            and config.algorithm.reward_type == "action_level"
            and config.algorithm.logprob_type == "chunk_level"
            and config.actor.model.num_action_chunks > 1
        ),
        "the one log-prob of a chunk cannot be weighed with the advantages of its actions (reward_type)",
        ("algorithm.reward_type", CHUNKS, TASK),
        "algorithm.logprob_type: action_level, or algorithm.reward_type: chunk_level",
    ),
    *(_level_rule(name, *rule) for name in ("logprob_type", "entropy_type") for rule in _LEVELS.items()),
    Rule(
        _AGGREGATION,
        lambda config: policy_is("gru")(config) and config.algorithm.loss_agg_func != "token-mean",
        "a sequence is a piece of a rollout, cut where its steps are full: every step weighs the same",
        (_POLICY, TASK),
        f"{_AGGREGATION}: token-mean",
    ),
)


# KL terms, the mismatch of rollout and training, old log-probs


def _steps_of_rollout(config: Config) -> int:
    """Optimizer steps on one rollout."""
    return config.algorithm.ppo_epochs * -(-rows_of_step(config) // config.data.mini_batch_size)


_KL_RULES = (
    Rule(
        _KL_LOSS,
        lambda config: (
            config.algorithm.use_kl_in_reward and config.algorithm.use_kl_loss and not config.algorithm.allow_both_kl
        ),
        "the KL is already in the reward; in both places it would count twice",
        (_KL_REWARD, _BOTH_KL),
        f"if you want that: {_BOTH_KL}: true",
    ),
    Rule(
        "algorithm.kl_ctrl.kl_coef",
        lambda config: (
            config.algorithm.use_kl_in_reward
            and config.algorithm.kl_ctrl.type == "adaptive"
            and config.algorithm.kl_ctrl.kl_coef == 0
        ),
        "an adaptive coefficient is multiplied at each step: from 0 it never moves",
        ("algorithm.kl_ctrl.type", _KL_REWARD),
    ),
    Rule(
        _KL_REWARD,
        lambda config: embodied(config) and config.algorithm.use_kl_in_reward,
        "the reference of an embodied policy would be its random start",
        (TASK,),
    ),
    Rule(
        _KL_LOSS,
        lambda config: embodied(config) and config.algorithm.use_kl_loss,
        "the reference of an embodied policy would be its random start",
        (TASK,),
    ),
)


def _has_nothing_to_correct(config: Config) -> bool:
    return embodied(config) and config.algorithm.rollout_is is not None and not config.runner.max_staleness


def _judges_sequences(config: Config) -> bool:
    """True if the correction of an embodied run weighs whole rows."""
    correction = config.algorithm.rollout_is
    if correction is None or not embodied(config) or not config.runner.max_staleness:
        return False
    return correction.level == "sequence" or correction.mode == "sequence_mask"


def _correction_fits(config: Config) -> bool:
    return not _has_nothing_to_correct(config) and not _judges_sequences(config)


_CORRECTION_RULES = (
    Rule(
        _CORRECTION,
        _has_nothing_to_correct,
        "an embodied policy acts and is trained by the same code, so there is no mismatch to correct",
        (TASK, "runner.max_staleness"),
    ),
    Rule(
        _CORRECTION,
        _judges_sequences,
        "an embodied row is all that one environment did, whole episodes and parts of others",
        (TASK,),
        f"{_CORRECTION}: {{level: token, mode: truncate}}",
    ),
    *only(
        _correction_fits,
        Rule(
            _CORRECTION,
            lambda config: (
                (correction := config.algorithm.rollout_is) is not None
                and correction.mode is None
                and correction.reject is None
            ),
            "it would do nothing: mode and reject are both null",
            (f"{_CORRECTION}.mode",),
            f"{_CORRECTION}: null",
        ),
        Rule(
            f"{_CORRECTION}.low",
            lambda config: (
                (correction := config.algorithm.rollout_is) is not None
                and correction.mode is not None
                and correction.low == correction.high
            ),
            "nothing lies between the bounds, low and high are equal",
            (f"{_CORRECTION}.high", f"{_CORRECTION}.mode"),
        ),
    ),
)

_OLD_LOG_PROB_RULES = (
    Rule(
        _OLD,
        lambda config: embodied(config) and config.algorithm.old_log_probs != "recompute",
        "the forward pass that it would save gives an embodied run its values, and log-probs with them",
        (TASK,),
        f"{_OLD}: recompute",
    ),
    *only(
        lambda config: reasoning(config) and config.algorithm.old_log_probs != "recompute",
        Rule(
            _OLD,
            lambda config: config.algorithm.rollout_is is not None and config.algorithm.old_log_probs == "rollout",
            f"{_CORRECTION} is on: the ratio to the rollout's log-probs contains the correction already: it would "
            "count twice",
            (_CORRECTION,),
            f"{_CORRECTION}: null",
        ),
        Rule(
            _OLD,
            lambda config: config.algorithm.rollout_is is not None and config.algorithm.old_log_probs == "current",
            f"{_CORRECTION} is on: its weights are made before the update, of log-probs that are not computed then",
            (_CORRECTION,),
            f"{_CORRECTION}: null",
        ),
        Rule(
            _OLD,
            lambda config: config.algorithm.full_kl_in_reward,
            "algorithm.kl_penalty full needs the training engine's pass over the rollout anyway",
            (_KL_REWARD, "algorithm.kl_penalty"),
            f"{_OLD}: recompute",
        ),
        Rule(
            _OLD,
            lambda config: (
                config.algorithm.old_log_probs == "current"
                and config.algorithm.use_kl_in_reward
                and not config.algorithm.full_kl_in_reward
            ),
            "the KL in the reward needs log-probs before the update",
            (_KL_REWARD,),
            f"{_OLD}: recompute",
        ),
        Rule(
            _OLD,
            lambda config: (
                config.algorithm.old_log_probs == "current"
                and _steps_of_rollout(config) > 1
                and rows_of_step(config) % config.data.mini_batch_size == 0
            ),
            lambda config: (
                f"from the second of the {_steps_of_rollout(config)} optimizer steps of a rollout on, the current "
                "policy is not the old one"
            ),
            (_EPOCHS, _MINI, "data.train_batch_size", _GROUP_SIZE),
            lambda config: f"{_MINI}: {rows_of_step(config)}, and {_EPOCHS}: 1",
        ),
    ),
)


# The rows that a step trains on

_ROW_RULES = (
    Rule(
        _PF_PPO,
        lambda config: embodied(config) and config.algorithm.use_pf_ppo,
        "PF-PPO weighs whole responses by their reward; a transition's reward does not say how good it was",
        (TASK,),
    ),
    Rule(
        _PF_PPO,
        lambda config: config.algorithm.use_pf_ppo and estimator_of(config.algorithm.adv_type).groups,
        lambda config: (
            f"adv_type {config.algorithm.adv_type} compares the samples of a group, and rows drawn anew break up groups"
        ),
        (_TYPE,),
        f"{_TYPE}: gae",
    ),
    Rule(
        _DYNAMIC,
        lambda config: (
            reasoning(config) and config.algorithm.dynamic_sampling is not None and config.algorithm.group_size < 2
        ),
        "it keeps prompts whose samples differ, and one sample per prompt never does",
        (_GROUP_SIZE,),
        f"{_GROUP_SIZE}: 8",
    ),
    Rule(
        _DYNAMIC,
        lambda config: (
            reasoning(config)
            and config.algorithm.dynamic_sampling is not None
            and config.rollout.sampling.temperature == 0
        ),
        "greedy responses to a prompt are all the same: no prompt would ever be kept",
        ("rollout.sampling.temperature",),
        "rollout.sampling.temperature: 1",
    ),
)

REFUSED = (*_ESTIMATOR_RULES, *_KL_RULES, *_LOSS_RULES, *_CORRECTION_RULES, *_ROW_RULES, *_OLD_LOG_PROB_RULES)


# Keys without effect


def _known(config: Config) -> bool:
    return config.algorithm.adv_type in ESTIMATORS


def _unread_by_estimator(key: str) -> Rule:
    readers = [name for name, estimator in ESTIMATORS.items() if key in estimator.keys]
    return Rule(
        f"algorithm.{key}",
        lambda config: _known(config) and config.algorithm.adv_type not in readers,
        lambda config: f"adv_type {config.algorithm.adv_type} does not read it (read by {', '.join(readers)})",
        (_TYPE,),
    )


def _whitening_is_fixed(config: Config) -> bool:
    whitens = estimator_of(config.algorithm.adv_type).whitens
    return whitens is not None and config.algorithm.normalize_advantages != whitens


def _advantages_have_own_lambda(config: Config) -> bool:
    return config.algorithm.length_adaptive_alpha > 0 or config.algorithm.gae_lambda_policy is not None


_UNREAD_ESTIMATES = (
    *map(_unread_by_estimator, dict.fromkeys(key for estimator in ESTIMATORS.values() for key in estimator.keys)),
    Rule(
        "algorithm.normalize_advantages",
        _whitening_is_fixed,
        lambda config: (
            f"adv_type {config.algorithm.adv_type} "
            + (
                "always whitens"
                if estimator_of(config.algorithm.adv_type).whitens
                else "compares within groups and never whitens"
            )
        ),
        (_TYPE,),
    ),
    *only(
        lambda config: config.algorithm.adv_type == "gae",
        Rule(
            "algorithm.gae_lambda_policy",
            lambda config: config.algorithm.length_adaptive_alpha > 0,
            f"{_ALPHA} sets the lambda of the advantages",
            (_ALPHA,),
        ),
        Rule(
            "algorithm.gae_lambda",
            lambda config: _advantages_have_own_lambda(config) and config.algorithm.gae_lambda_value is not None,
            "advantages and returns both have a lambda of their own",
            (_ALPHA, "algorithm.gae_lambda_policy", "algorithm.gae_lambda_value"),
        ),
    ),
    *(
        Rule(
            f"algorithm.{name}",
            lambda config: not estimator_of(config.algorithm.adv_type).values and not config.has_values,
            lambda config: f"adv_type {config.algorithm.adv_type} without a critic trains no values",
            (_TYPE, _SEPARATE),
        )
        for name in ("value_clip", "huber_delta", "value_loss_scale")
    ),
    Rule(
        "algorithm.bootstrap_truncated",
        embodied,
        "episodes that are cut always go on with the value of the state that follows",
        (TASK,),
    ),
    Rule(
        "algorithm.bootstrap_truncated",
        lambda config: reasoning(config) and config.algorithm.overlong.filter,
        f"{_FILTER} drops truncated responses",
        (_FILTER,),
    ),
    Rule(
        "algorithm.bootstrap_truncated",
        lambda config: (
            reasoning(config) and not config.algorithm.overlong.filter and not config.critic.use_critic_model
        ),
        "there is no critic whose value it could be",
        (_SEPARATE,),
    ),
    Rule(
        "algorithm.group_ignore_masked",
        lambda config: _known(config) and not estimator_of(config.algorithm.adv_type).groups,
        lambda config: f"adv_type {config.algorithm.adv_type} compares no samples of a group",
        (_TYPE,),
    ),
    Rule(
        "algorithm.group_ignore_masked",
        lambda config: (
            (not _known(config) or estimator_of(config.algorithm.adv_type).groups)
            and not config.algorithm.overlong.filter
        ),
        f"{_FILTER} is off: no response that has a score is masked out",
        (_FILTER,),
    ),
    Rule(
        "algorithm.reinforce_kl_credit",
        lambda config: config.algorithm.adv_type == "reinforce_plus_plus" and not config.algorithm.use_kl_in_reward,
        f"{_KL_REWARD} is off: there is no penalty to give credit for",
        (_KL_REWARD,),
    ),
)


def _bounds_no_k3(switch: str, kind: str) -> Condition:
    def condition(config: Config) -> bool:
        is_k3 = getattr(config.algorithm, kind).removesuffix("+") in ("k3", "low_var_kl")
        return getattr(config.algorithm, switch) and not is_k3

    return condition


def _unread_clip(key: str, switch: str, kind: str) -> tuple[Rule, ...]:
    return (
        Rule(
            f"algorithm.{key}",
            lambda config: not getattr(config.algorithm, switch),
            f"algorithm.{switch} is off",
            (f"algorithm.{switch}",),
        ),
        Rule(
            f"algorithm.{key}",
            _bounds_no_k3(switch, kind),
            lambda config: (
                f"it bounds k3, whose exponential explodes, and algorithm.{kind} is {getattr(config.algorithm, kind)}"
            ),
            (f"algorithm.{kind}",),
        ),
    )


_UNREAD_KL = (
    *(
        Rule(
            f"algorithm.{name}",
            lambda config: not config.algorithm.use_kl_in_reward,
            f"{_KL_REWARD} is off",
            (_KL_REWARD,),
        )
        for name in ("kl_penalty", "kl_ctrl")
    ),
    *(
        Rule(
            f"algorithm.kl_ctrl.{name}",
            lambda config: config.algorithm.use_kl_in_reward and config.algorithm.kl_ctrl.type == "fixed",
            "only algorithm.kl_ctrl.type adaptive reacts to the KL",
            ("algorithm.kl_ctrl.type",),
        )
        for name in ("horizon", "target_kl")
    ),
    *(
        Rule(
            f"algorithm.{name}",
            lambda config: not config.algorithm.use_kl_loss,
            f"{_KL_LOSS} is off",
            (_KL_LOSS,),
        )
        for name in ("kl_loss_coef", "kl_loss_type", "kl_loss_grad")
    ),
    Rule(
        "algorithm.kl_loss_grad",
        lambda config: config.algorithm.use_kl_loss and config.algorithm.kl_loss_type.endswith("+"),
        "the + of algorithm.kl_loss_type says it: the gradient is that of k2",
        ("algorithm.kl_loss_type",),
    ),
    Rule(
        "algorithm.kl_loss_grad",
        lambda config: config.algorithm.use_kl_loss and config.algorithm.kl_loss_type == "full",
        "algorithm.kl_loss_type full has one gradient, the exact one",
        ("algorithm.kl_loss_type",),
    ),
    Rule(
        _BOTH_KL,
        lambda config: not (config.algorithm.use_kl_in_reward and config.algorithm.use_kl_loss),
        f"{_KL_REWARD} and {_KL_LOSS} are not both on",
        (_KL_REWARD, _KL_LOSS),
    ),
    *_unread_clip("kl_output_clip", "use_kl_in_reward", "kl_penalty"),
    *_unread_clip("kl_loss_output_clip", "use_kl_loss", "kl_loss_type"),
)

_UNREAD_LOSSES = (
    Rule(
        "algorithm.loss_agg_horizon",
        lambda config: config.algorithm.loss_agg_func != "seq-mean-token-sum-norm",
        "only algorithm.loss_agg_func seq-mean-token-sum-norm divides by it",
        (_AGGREGATION,),
    ),
    Rule(
        "algorithm.loss_agg_denominator",
        lambda config: config.algorithm.loss_agg_func in ("token-mean", "token-sum"),
        lambda config: f"{_AGGREGATION} {config.algorithm.loss_agg_func} does not divide by a number of sequences",
        (_AGGREGATION,),
    ),
    Rule(
        "algorithm.positive_nll_norm",
        lambda config: not config.algorithm.positive_nll_coef,
        "algorithm.positive_nll_coef is 0: the term is off",
        ("algorithm.positive_nll_coef",),
    ),
    *(
        Rule(
            f"algorithm.{name}",
            _policy_loss_is("reinforce"),
            "policy_loss reinforce has no ratio to clip",
            (_LOSS,),
        )
        for name in ("clip_ratio_low", "clip_ratio_high")
    ),
    Rule(
        "algorithm.clip_ratio_c",
        _policy_loss_is("reinforce", "cispo"),
        lambda config: (
            f"policy_loss {config.algorithm.policy_loss} weighs log-probs, whose loss has no bound that a dual clip "
            "could set"
        ),
        (_LOSS,),
    ),
    Rule(
        "algorithm.clip_ratio_c",
        _policy_loss_is("dppo_tv", "dppo_kl"),
        lambda config: f"policy_loss {config.algorithm.policy_loss} bounds a divergence and clips no ratio",
        (_LOSS,),
    ),
    *(
        Rule(
            f"algorithm.{name}",
            lambda config: (
                config.algorithm.old_log_probs == "current" and config.algorithm.policy_loss in POLICY_LOSSES
            ),
            f"{_OLD} is current: the ratio is 1 and never clipped",
            (_OLD,),
        )
        for name in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
    ),
    *(
        Rule(
            f"{_CORRECTION}.{name}",
            lambda config: (correction := config.algorithm.rollout_is) is not None and correction.mode is None,
            f"{_CORRECTION}.mode is null, so there are no weights",
            (f"{_CORRECTION}.mode",),
        )
        for name in ("level", "low", "high", "batch_normalize")
    ),
    Rule(
        f"{_CORRECTION}.level",
        lambda config: (correction := config.algorithm.rollout_is) is not None and correction.mode == "sequence_mask",
        "mode sequence_mask judges sequences and keeps the ratios of their tokens",
        (f"{_CORRECTION}.mode",),
    ),
    Rule(
        f"{_CORRECTION}.denominator",
        lambda config: (
            (correction := config.algorithm.rollout_is) is not None
            and correction.mode in (None, "truncate")
            and correction.reject is None
        ),
        "no weight is 0: mode truncate cuts the ratios, and nothing is rejected",
        (f"{_CORRECTION}.mode", f"{_CORRECTION}.reject"),
    ),
    *only(
        embodied,
        Rule(
            "algorithm.reward_type",
            lambda config: config.actor.model.num_action_chunks == 1,
            f"a chunk is one action, {CHUNKS} is 1: both types are the same",
            (CHUNKS,),
        ),
        Rule(
            "algorithm.entropy_type",
            lambda config: config.algorithm.loss_agg_func in ("seq-mean-token-sum", "seq-mean-token-sum-norm"),
            lambda config: (
                f"loss_agg_func {config.algorithm.loss_agg_func} adds entropies up, which is the same at every level"
            ),
            (_AGGREGATION,),
        ),
    ),
    *(
        Rule(
            f"algorithm.{name}",
            reasoning,
            "a response has no action chunks, and its rows hold one episode each",
            (TASK,),
        )
        for name in ("reward_type", "logprob_type", "entropy_type", "bootstrap_type")
    ),
)

_SIZES_OF_PROMPTS = ("data.train_batch_size", _GROUP_SIZE)
_SIZES_OF_ENVS = ("env.num_envs", "env.rollout_steps", CHUNKS)


def _is_one_mini_batch(config: Config) -> bool:
    return rows_of_step(config) <= config.data.mini_batch_size


def _unread_in_one_mini_batch(task: Condition, sizes: tuple[str, ...]) -> tuple[Rule, ...]:
    return only(
        lambda config: task(config) and _is_one_mini_batch(config),
        Rule(
            "algorithm.target_kl",
            lambda config: config.algorithm.ppo_epochs == 1,
            "a rollout is one optimizer step (algorithm.ppo_epochs, data.mini_batch_size): none is left to skip",
            (_EPOCHS, _MINI, *sizes, TASK),
        ),
        Rule(
            "algorithm.shuffle_mini_batches",
            always,
            "a rollout is one mini-batch, in which the order of the rows does not matter",
            (_MINI, *sizes, TASK),
        ),
    )


_UNREAD_ROWS = (
    Rule(_DYNAMIC, embodied, "embodied training has no prompts to sample", (TASK,)),
    Rule(
        "algorithm.pf_ppo",
        lambda config: not config.algorithm.use_pf_ppo,
        f"{_PF_PPO} is off",
        (_PF_PPO,),
    ),
    Rule(
        "algorithm.pf_ppo.power",
        lambda config: config.algorithm.use_pf_ppo and config.algorithm.pf_ppo.method != "pow",
        "only algorithm.pf_ppo.method pow has an exponent",
        ("algorithm.pf_ppo.method",),
    ),
    *_unread_in_one_mini_batch(reasoning, _SIZES_OF_PROMPTS),
    *_unread_in_one_mini_batch(embodied, _SIZES_OF_ENVS),
)

WITHOUT_EFFECT = (*_UNREAD_ESTIMATES, *_UNREAD_KL, *_UNREAD_LOSSES, *_UNREAD_ROWS)
