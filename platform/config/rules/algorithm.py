"""Rules of `algorithm`: estimator, losses, KL terms, and the rows that a step trains on.

The rules of its keys that change scores are in `reward.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from rl_platform.config.rules.models import policy_is
from rl_platform.config.rules.rule import CHUNKS, TASK, Unread, embodied, reasoning, unknown_name, unread_keys, when
from rl_platform.config.schema import Config
from rl_platform.config.schema.algorithm import (
    COVARIANCE,
    ESTIMATORS,
    POLICY_LOSSES,
    SEQUENCE_RATIO,
    LossType,
    RolloutIS,
    estimator_needs,
)
from rl_platform.errors import Problem

_LOSS_TYPE, _TEACHER = "algorithm.loss_type", "algorithm.distillation_coef"
_TYPE, _LOSS, _AGGREGATION = "algorithm.adv_type", "algorithm.policy_loss", "algorithm.loss_agg_func"
_KL_REWARD, _KL_LOSS, _BOTH_KL = "algorithm.use_kl_in_reward", "algorithm.use_kl_loss", "algorithm.allow_both_kl"
_CORRECTION, _OLD, _DYNAMIC = "algorithm.rollout_is", "algorithm.old_log_probs", "algorithm.dynamic_sampling"
_PF_PPO, _GROUP_SIZE, _SEPARATE = "algorithm.use_pf_ppo", "algorithm.group_size", "critic.use_critic_model"
_MINI, _EPOCHS = "data.mini_batch_size", "algorithm.ppo_epochs"
_ALPHA, _FILTER = "algorithm.length_adaptive_alpha", "algorithm.overlong.filter"
_SAMPLE_FILTER = "algorithm.sample_filter"
_BOOTSTRAP, _IGNORE_MASKED = "algorithm.bootstrap_truncated", "algorithm.group_ignore_masked"
_BOUNDED_DIVERGENCE = ("dppo_tv", "dppo_kl")
_CLIPS = "clip_ratio_low clip_ratio_high"
_DUAL_CLIP, _DIVERGENCE = "has no clipped ratio that a dual clip could bound", "bounds a divergence and clips no ratio"
_UNREAD_BY_LOSS = {  # policy loss -> keys that it does not read, with the reason
    "clip_cov": {"covariance.kl_coef": "has no KL"},
    "kl_cov": {
        "covariance.low covariance.high": "takes the largest ones",
        f"{_CLIPS} clip_ratio_c": "adds a KL and clips no ratio",
    },
    "reinforce": {_CLIPS: "has no ratio to clip", "clip_ratio_c": _DUAL_CLIP},
    "cispo": {"clip_ratio_c": _DUAL_CLIP},
    "sapo": {f"{_CLIPS} clip_ratio_c": "has a gate and no clip"},
    "gmpo": {"clip_ratio_c": "clips log-ratios before their mean, and has no bound that a dual clip could set"},
    **{loss: {"clip_ratio_c": _DIVERGENCE} for loss in _BOUNDED_DIVERGENCE},
}
_NO_COMPONENTS = {  # why a policy of this type has no log-prob per component of an action
    "vla": "actor.model.type vla has one log-prob and one entropy per action, the sums over its components",
    "gru": "a recurrent policy has one log-prob and one entropy per step, the sums over the components of its action",
}


def refused(config: Config) -> Iterator[Problem]:
    """Yields the problems of the keys of `algorithm`."""
    for rules in (_estimator, _kl_terms, _losses, _correction, _rows, _old_log_probs):
        yield from rules(config)


def unread(config: Config) -> Iterator[Unread]:
    """Yields the keys of `algorithm` that this config does not read, each with the reason."""
    for rules in (_unread_by_estimator, _unread_by_kl, _unread_by_losses, _unread_by_correction, _unread_rows):
        yield from rules(config)


def _estimator(config: Config) -> Iterator[Problem]:
    algorithm = config.algorithm
    fitting = when(lambda: _fitting_loss_type(config))
    if fitting and when(lambda: fitting[0] != algorithm.loss_type):
        message = f"{config.runner.task_type} training needs {fitting[0]}: {fitting[1]}"
        yield Problem(_LOSS_TYPE, message, hint=f"{_LOSS_TYPE}: {fitting[0]}")
    if when(lambda: embodied(config) and algorithm.group_size > 1 and algorithm.loss_type == "actor_critic"):
        message = "loss_type actor_critic continues episodes from rollout to rollout: none begin alike to form a group"
        yield Problem(_GROUP_SIZE, message, hint="more samples: env.num_envs")
    elif when(lambda: embodied(config) and algorithm.group_size > 1 and _compares_no_groups(algorithm.adv_type)):
        message = f"adv_type {algorithm.adv_type} does not compare the episodes of a group"
        yield Problem(_GROUP_SIZE, message, hint="more samples: env.num_envs")
    if unknown := when(lambda: unknown_name(_TYPE, algorithm.adv_type, ESTIMATORS)):
        yield unknown
    if when(lambda: embodied(config) and algorithm.adv_type == "gae" and algorithm.length_adaptive_alpha > 0):
        message = "a row of an embodied rollout contains several episodes, so it has no response length"
        yield Problem(_ALPHA, message)
    if when(lambda: estimator_needs(algorithm.adv_type).groups and algorithm.group_size < 2):
        samples = "episodes that begin alike" if when(lambda: embodied(config)) else "samples of a prompt"
        message = (
            f"adv_type {algorithm.adv_type} compares the {samples}, so it needs at least 2; the advantage of a "
            "single one is always 0"
        )
        yield Problem(_GROUP_SIZE, message, hint=f"{_GROUP_SIZE}: 8")
    if when(
        lambda: algorithm.adv_type == "grpo" and algorithm.grpo_leave_one_out and not algorithm.grpo_std_normalization
    ):
        yield Problem(
            "algorithm.grpo_leave_one_out",
            "without division by the deviation (algorithm.grpo_std_normalization is false) this estimator is rloo",
            hint="algorithm.adv_type: rloo",
        )
    if when(lambda: estimator_needs(algorithm.adv_type).greedy):
        yield from _greedy(config)
    if when(lambda: reasoning(config) and estimator_needs(algorithm.adv_type).groups):
        yield from _equal_samples(config)
    if when(lambda: estimator_needs(algorithm.adv_type).squared_probs):
        yield from _token_baseline(config)
    clip = when(lambda: algorithm.advantage_clip)
    if clip is not None and not (clip[0] <= 0 <= clip[1] and clip[0] < clip[1]):
        message = "an advantage of 0 must stay 0: needs [lowest, highest] with lowest <= 0 <= highest, not both 0"
        yield Problem("algorithm.advantage_clip", message)
    if when(lambda: config.runner.max_steps <= algorithm.policy_training_start_step):
        start = algorithm.policy_training_start_step
        message = (
            f"the policy would never train: it starts at step {start} of {config.runner.max_steps} (runner.max_steps)"
        )
        yield Problem("algorithm.policy_training_start_step", message)


def _equal_samples(config: Config) -> Iterator[Problem]:
    """Yields a problem if all samples of a prompt are the likeliest response. With tools and environments their texts
    may differ."""
    rollout = config.rollout
    if when(lambda: rollout.multi_turn is not None or rollout.agent is not None):
        return
    for name, likeliest, hint in (("temperature", 0, 1), ("top_k", 1, 0)):
        if when(lambda: getattr(rollout.sampling, name) == likeliest):  # noqa: B023
            message = (
                f"adv_type {config.algorithm.adv_type} compares the samples of a prompt, and the likeliest token "
                "makes them identical: advantages would be 0"
            )
            yield Problem(f"rollout.sampling.{name}", message, hint=f"rollout.sampling.{name}: {hint}")


def _greedy(config: Config) -> Iterator[Problem]:
    adv_type = f"adv_type {config.algorithm.adv_type}"
    if when(lambda: embodied(config)):
        message = f"{adv_type} compares with the greedy response to a prompt, and embodied training has no prompts"
        yield Problem(_TYPE, message, hint=f"{_TYPE}: reinforce_plus_plus, or grpo with {_GROUP_SIZE}: 4")
    if not when(lambda: reasoning(config)):
        return
    if when(lambda: config.rollout.sampling.temperature == 0):
        message = f"{adv_type} compares with the greedy response, and all responses are greedy: advantages would be 0"
        yield Problem("rollout.sampling.temperature", message, hint="rollout.sampling.temperature: 1")
    if when(lambda: config.rollout.partial_rollout is not None):
        message = f"{adv_type} generates every greedy response to its end, so a step would wait for the longest one"
        yield Problem("rollout.partial_rollout", message, hint="rollout.partial_rollout: null")
    if when(lambda: config.algorithm.reward_whitening):
        message = f"the baseline of {adv_type} would keep the scale that the rewards had before whitening"
        yield Problem("algorithm.reward_whitening", message, hint="algorithm.reward_whitening: false")


def _token_baseline(config: Config) -> Iterator[Problem]:
    adv_type = f"adv_type {config.algorithm.adv_type}"
    if when(lambda: embodied(config)):
        message = f"{adv_type} sums probabilities over a vocabulary, and actions of a robot have none"
        yield Problem(_TYPE, message, hint=f"{_TYPE}: opo")
    elif when(lambda: reasoning(config) and config.algorithm.old_log_probs != "recompute"):
        message = f"{adv_type} reads sums over the vocabulary from the pass before the update, which this leaves out"
        yield Problem(_OLD, message, hint=f"{_OLD}: recompute")


def _fitting_loss_type(config: Config) -> tuple[LossType, str]:
    """Returns the loss_type that the config needs, and why."""
    algorithm = config.algorithm
    if reasoning(config):
        return "actor", "the values of a language model come from a separate critic"
    if estimator_needs(algorithm.adv_type).values:
        return "actor_critic", "the values of an embodied policy come from a head on its own backbone"
    if algorithm.adv_type in ESTIMATORS:
        return "actor", f"adv_type {algorithm.adv_type} scores whole episodes, without values"
    return algorithm.loss_type, "a function of your own may read values or not"


def _compares_no_groups(adv_type: str) -> bool:
    return adv_type in ESTIMATORS and not estimator_needs(adv_type).groups


def _kl_terms(config: Config) -> Iterator[Problem]:
    algorithm = config.algorithm
    if when(lambda: algorithm.use_kl_in_reward and algorithm.use_kl_loss and not algorithm.allow_both_kl):
        message = "the KL term is already in the reward (algorithm.use_kl_in_reward), so it would count twice"
        yield Problem(_KL_LOSS, message, hint=f"to use both: {_BOTH_KL}: true")
    if when(
        lambda: algorithm.use_kl_in_reward and algorithm.kl_ctrl.type == "adaptive" and algorithm.kl_ctrl.kl_coef == 0
    ):
        message = "an adaptive coefficient is multiplied by a factor in each step, so it stays 0; start above 0"
        yield Problem("algorithm.kl_ctrl.kl_coef", message)
    yield from _distillation(config)
    random_start = "an embodied policy starts from random weights, which are no useful reference"
    if when(lambda: embodied(config) and algorithm.use_kl_in_reward):
        yield Problem(_KL_REWARD, random_start)
    if when(lambda: embodied(config) and algorithm.use_kl_loss):
        yield Problem(_KL_LOSS, random_start)


def _distillation(config: Config) -> Iterator[Problem]:
    algorithm = config.algorithm
    if when(lambda: algorithm.adv_type == "distillation" and not algorithm.distillation_coef):
        message = "adv_type distillation has no advantages but those of the teacher, and their coefficient is 0"
        yield Problem(_TEACHER, message, hint=f"{_TEACHER}: 1")
    if not when(lambda: algorithm.distillation_coef):
        return
    if when(lambda: embodied(config)):
        yield Problem(_TEACHER, "a teacher is a language model, which embodied training does not have")
    elif when(lambda: config.reference.model is None):
        message = f"{_TEACHER} needs a teacher, which is the model of the reference"
        yield Problem("reference.model", message, hint="as reference.model.path: FOLDER")
    if when(lambda: algorithm.use_kl_in_reward or algorithm.use_kl_loss):
        message = "KL terms compare with the same reference, the teacher, so its KL would count twice"
        yield Problem(_TEACHER, message, hint=f"{_KL_REWARD}: false and {_KL_LOSS}: false, and a larger {_TEACHER}")


def _losses(config: Config) -> Iterator[Problem]:
    algorithm = config.algorithm
    if unknown := when(lambda: unknown_name(_LOSS, algorithm.policy_loss, POLICY_LOSSES)):
        yield unknown
    if when(lambda: embodied(config) and algorithm.policy_loss in SEQUENCE_RATIO):
        message = "a row of an embodied rollout is one transition, and its one ratio is that of ppo_clip"
        yield Problem(_LOSS, message, hint=f"{_LOSS}: ppo_clip")
    if when(lambda: embodied(config) and algorithm.policy_loss in _BOUNDED_DIVERGENCE):
        message = (
            f"{algorithm.policy_loss} bounds a divergence of token probabilities; continuous actions have densities, "
            "which can exceed 1"
        )
        yield Problem(_LOSS, message, hint=f"{_LOSS}: ppo_clip")
    if when(lambda: embodied(config) and algorithm.policy_loss in COVARIANCE):
        message = "it is about the entropy of tokens, whose log-probs have no density"
        yield Problem(_LOSS, message, hint=f"{_LOSS}: ppo_clip, with algorithm.entropy_bonus")
    if when(lambda: algorithm.policy_loss == "clip_cov" and algorithm.covariance.low >= algorithm.covariance.high):
        yield Problem("algorithm.covariance.low", "no covariance lies between low and high")
    by_sequence = "seq-mean-token-mean"
    whole = ("gspo", "gmpo")
    if when(lambda: reasoning(config) and algorithm.policy_loss in whole and algorithm.loss_agg_func != by_sequence):
        loss = f"policy_loss {algorithm.policy_loss}"
        message = f"{loss} has one ratio per sequence, so all sequences must have the same weight"
        yield Problem(_AGGREGATION, message, hint=f"{_AGGREGATION}: {by_sequence}")
    if when(lambda: embodied(config) and algorithm.positive_nll_coef):
        message = "embodied rollouts contain transitions, and no correct responses"
        yield Problem("algorithm.positive_nll_coef", message)
    if when(
        lambda: (
            embodied(config)
            and algorithm.reward_type == "action_level"
            and algorithm.logprob_type == "chunk_level"
            and config.actor.model.num_action_chunks > 1
        )
    ):
        yield Problem(
            "algorithm.logprob_type",
            "a chunk has one log-prob, but an advantage for each action (algorithm.reward_type is action_level)",
            hint="algorithm.logprob_type: action_level, or algorithm.reward_type: chunk_level",
        )
    if when(lambda: policy_is(config, *_NO_COMPONENTS)):
        for name in ("logprob_type", "entropy_type"):
            if when(lambda name=name: getattr(algorithm, name) == "token_level"):  # type: ignore[misc]
                reason = _NO_COMPONENTS[config.actor.model.type]
                yield Problem(f"algorithm.{name}", reason, hint=f"algorithm.{name}: chunk_level")
    if when(lambda: policy_is(config, "gru") and algorithm.loss_agg_func != "token-mean"):
        message = (
            "sequences of a recurrent policy are arbitrary pieces of a rollout, so all steps must have the same weight"
        )
        yield Problem(_AGGREGATION, message, hint=f"{_AGGREGATION}: token-mean")


def _correction(config: Config) -> Iterator[Problem]:
    correction = when(lambda: config.algorithm.rollout_is)
    if correction is None:
        return
    if when(lambda: embodied(config) and not config.runner.max_staleness):
        message = "rollout and training compute embodied policies by the same code, so there is no mismatch to correct"
        yield Problem(_CORRECTION, message)
    elif when(lambda: embodied(config) and _by_sequence(correction)):
        message = "a row of an embodied rollout is no sequence, so it has no weight as one"
        yield Problem(_CORRECTION, message, hint=f"{_CORRECTION}: {{level: token, mode: truncate}}")
    elif when(lambda: correction.mode is None and not _rejects(correction)):
        message = "mode, reject and veto are all null, so the correction has no effect"
        yield Problem(_CORRECTION, message, hint=f"{_CORRECTION}: null")
    elif when(lambda: correction.mode is not None and correction.low == correction.high):
        yield Problem(f"{_CORRECTION}.low", "low and high are equal, so no weight lies between them")
    if when(lambda: correction.vtrace):
        yield from _vtrace(config, correction)


def _vtrace(config: Config, correction: RolloutIS) -> Iterator[Problem]:
    """Yields the problems of V-trace, which needs a truncated ratio per action and one lambda."""
    algorithm, key = config.algorithm, f"{_CORRECTION}.vtrace"
    if when(lambda: algorithm.adv_type != "gae"):
        yield Problem(key, f"adv_type {algorithm.adv_type} has no value targets to correct", hint=f"{_TYPE}: gae")
    if when(lambda: (correction.mode, correction.level) != ("truncate", "token") or correction.batch_normalize):
        yield Problem(key, "V-trace takes the truncated ratio of each action", hint=f"{_CORRECTION}: {{vtrace: true}}")
    if when(
        lambda: (
            algorithm.gae_lambda_policy is not None
            or algorithm.gae_lambda_value is not None
            or algorithm.length_adaptive_alpha > 0
        )
    ):
        yield Problem(key, "V-trace has one lambda", hint="algorithm.gae_lambda alone")
    if when(lambda: config.actor.model.num_action_chunks > 1):
        yield Problem(
            key, "V-trace has a ratio per step, and a chunk of actions is several steps", hint=f"{key}: false"
        )


def _by_sequence(correction: RolloutIS) -> bool:
    return correction.level == "sequence" or correction.mode == "sequence_mask" or correction.veto is not None


def _rejects(correction: RolloutIS) -> bool:
    return correction.reject is not None or correction.veto is not None


def _rows(config: Config) -> Iterator[Problem]:
    algorithm = config.algorithm
    if when(lambda: embodied(config) and algorithm.use_pf_ppo):
        message = (
            "PF-PPO weights whole responses by their rewards; the reward of one transition does not measure its quality"
        )
        yield Problem(_PF_PPO, message)
    if when(lambda: algorithm.use_pf_ppo and estimator_needs(algorithm.adv_type).groups):
        adv_type = f"adv_type {algorithm.adv_type}"
        message = f"{adv_type} compares the samples of a group, and PF-PPO breaks up groups"
        yield Problem(_PF_PPO, message, hint=f"{_TYPE}: gae")
    for name in ("dynamic_sampling.filter", "sample_filter"):
        if unknown := when(lambda name=name: _unknown_filter(config, name)):  # type: ignore[misc]
            yield unknown
    if when(lambda: reasoning(config) and algorithm.dynamic_sampling is not None):
        if when(lambda: algorithm.group_size < 2):
            message = "it compares the samples of a prompt, and algorithm.group_size is 1"
            yield Problem(_DYNAMIC, message, hint=f"{_GROUP_SIZE}: 8")
        if when(lambda: config.rollout.sampling.temperature == 0):
            message = "greedy responses to a prompt are identical (rollout.sampling.temperature is 0)"
            yield Problem(_DYNAMIC, message, hint="rollout.sampling.temperature: 1")
        yield from _rounds(config)


def _rounds(config: Config) -> Iterator[Problem]:
    """Yields a problem if all rounds of a step together have fewer prompts than a step needs."""
    dynamic, needed = config.algorithm.dynamic_sampling, config.data.train_batch_size
    assert dynamic is not None
    if when(lambda: dynamic.on_exhausted != "train_partial" and dynamic.prompts_per_round is not None):
        prompts = when(lambda: dynamic.max_rounds * (dynamic.prompts_per_round or needed))
        if prompts is not None and prompts < needed:
            message = f"all rounds of a step have {prompts} prompts, and a step trains on {needed}"
            hint = f"{_DYNAMIC}.max_rounds: {-(-needed // (dynamic.prompts_per_round or needed))} or more"
            yield Problem(f"{_DYNAMIC}.prompts_per_round", message, hint=hint)


def _unknown_filter(config: Config, key: str) -> Problem | None:
    algorithm = config.algorithm
    name = algorithm.sample_filter
    if key != "sample_filter":
        name = None if algorithm.dynamic_sampling is None else algorithm.dynamic_sampling.filter
    return None if name is None else unknown_name(f"algorithm.{key}", name, ())


def _steps_of_rollout(config: Config) -> int:
    """Returns the number of optimizer steps on one rollout."""
    return config.algorithm.ppo_epochs * -(-config.rows_per_step // config.data.mini_batch_size)


def _old_log_probs(config: Config) -> Iterator[Problem]:
    algorithm, mini_batch, recompute = config.algorithm, config.data, f"{_OLD}: recompute"
    source = when(lambda: algorithm.old_log_probs)
    if source not in ("rollout", "current"):
        return
    if when(lambda: embodied(config)):
        message = "an embodied run computes log-probs together with the values, so no forward pass would be saved"
        yield Problem(_OLD, message, hint=recompute)
    if not when(lambda: reasoning(config)):
        return
    if when(lambda: algorithm.rollout_is is not None):
        reason = {
            "rollout": "the ratio to the rollout's log-probs already contains the correction, which would count twice",
            "current": "its weights need log-probs before the update, which old_log_probs current does not compute",
        }[source]
        yield Problem(_OLD, f"{_CORRECTION} is on: {reason}", hint=f"{_CORRECTION}: null")
    if when(lambda: algorithm.full_kl_in_reward):
        message = "algorithm.kl_penalty full computes the training engine's log-probs anyway"
        yield Problem(_OLD, message, hint=recompute)
    elif source == "current" and when(lambda: algorithm.use_kl_in_reward):
        yield Problem(_OLD, "the KL in the reward needs log-probs before the update", hint=recompute)
    if source == "current" and when(lambda: algorithm.distillation_coef > 0):
        message = f"{_TEACHER} needs log-probs before the update"
        yield Problem(_OLD, message, hint=recompute)
    if source == "current" and when(lambda: algorithm.policy_loss in COVARIANCE):
        message = f"policy_loss {algorithm.policy_loss} compares log-probs before the update"
        yield Problem(_OLD, message, hint=recompute)
    if source == "current" and when(
        lambda: _steps_of_rollout(config) > 1 and config.rows_per_step % mini_batch.mini_batch_size == 0
    ):
        message = (
            f"a rollout has {_steps_of_rollout(config)} optimizer steps, and from the second on the current policy "
            "differs from the old one"
        )
        yield Problem(_OLD, message, hint=f"{_MINI}: {config.rows_per_step}, and {_EPOCHS}: 1")


def _unread_by_estimator(config: Config) -> Iterator[Unread]:
    algorithm = config.algorithm
    adv_type = when(lambda: algorithm.adv_type)
    if adv_type is not None:
        yield from _unread_by_known_estimator(config, adv_type)
    if adv_type == "gae":
        if when(lambda: algorithm.length_adaptive_alpha > 0):
            yield Unread("algorithm.gae_lambda_policy", f"{_ALPHA} sets the lambda of the advantages", (_ALPHA,))
        if when(
            lambda: (
                (algorithm.length_adaptive_alpha > 0 or algorithm.gae_lambda_policy is not None)
                and algorithm.gae_lambda_value is not None
            )
        ):
            switches = (_ALPHA, "algorithm.gae_lambda_policy", "algorithm.gae_lambda_value")
            yield Unread(
                "algorithm.gae_lambda", "the lambdas of advantages and returns are both set by other keys", switches
            )
    if when(lambda: embodied(config)):
        reason = "it belongs to responses; see algorithm.bootstrap_type for episodes"
        yield Unread(_BOOTSTRAP, reason, (TASK,))
    elif when(lambda: reasoning(config) and algorithm.overlong.filter):
        yield Unread(_BOOTSTRAP, f"{_FILTER} drops truncated responses", (_FILTER,))
    elif when(lambda: reasoning(config) and not config.critic.use_critic_model):
        yield Unread(_BOOTSTRAP, "there is no critic", (_SEPARATE,))
    if adv_type == "reinforce_plus_plus" and when(lambda: not algorithm.use_kl_in_reward):
        reason = f"{_KL_REWARD} is off, so there is no KL penalty"
        yield Unread("algorithm.reinforce_kl_credit", reason, (_KL_REWARD,))


def _unread_by_known_estimator(config: Config, adv_type: str) -> Iterator[Unread]:
    algorithm, known, estimator = config.algorithm, adv_type in ESTIMATORS, estimator_needs(adv_type)
    for key in dict.fromkeys(key for other in ESTIMATORS.values() for key in other.keys):
        if known and key not in estimator.keys:
            readers = ", ".join(name for name, other in ESTIMATORS.items() if key in other.keys)
            yield Unread(f"algorithm.{key}", f"adv_type {adv_type} does not read it (read by {readers})", (_TYPE,))
    if estimator.whitens is not None and when(lambda: algorithm.normalize_advantages != estimator.whitens):
        within = "normalises within groups and " if estimator.groups else ""
        how = "always whitens" if estimator.whitens else f"{within}never whitens"
        yield Unread("algorithm.normalize_advantages", f"adv_type {adv_type} {how}", (_TYPE,))
    if not estimator.values and when(lambda: not config.has_values):
        reason = f"adv_type {adv_type} without a critic trains no values"
        yield from unread_keys("algorithm", "value_clip huber_delta value_loss_scale", reason, _TYPE, _SEPARATE)
    if known and not estimator.groups:
        yield Unread(_IGNORE_MASKED, f"adv_type {adv_type} uses no groups", (_TYPE,))
    elif when(lambda: not algorithm.overlong.filter and algorithm.sample_filter is None):
        reason = f"{_FILTER} is off and {_SAMPLE_FILTER} null, so no scored response is masked out"
        yield Unread(_IGNORE_MASKED, reason, (_FILTER, _SAMPLE_FILTER))


def _unread_by_kl(config: Config) -> Iterator[Unread]:
    algorithm = config.algorithm
    if when(lambda: not algorithm.use_kl_in_reward):
        yield from unread_keys("algorithm", "kl_penalty kl_ctrl", f"{_KL_REWARD} is off", _KL_REWARD)
    if when(lambda: algorithm.use_kl_in_reward and algorithm.kl_ctrl.type == "fixed"):
        reason = "it belongs to algorithm.kl_ctrl.type adaptive"
        yield from unread_keys("algorithm.kl_ctrl", "horizon target_kl", reason, "algorithm.kl_ctrl.type")
    if when(lambda: not algorithm.use_kl_loss):
        names = "kl_loss_coef kl_loss_type kl_loss_grad"
        yield from unread_keys("algorithm", names, f"{_KL_LOSS} is off", _KL_LOSS)
    kind = when(lambda: algorithm.kl_loss_type if algorithm.use_kl_loss else "")
    if kind and kind.endswith("+"):
        reason = f"the + in algorithm.kl_loss_type {kind} selects the gradient of k2"
        yield Unread("algorithm.kl_loss_grad", reason, ("algorithm.kl_loss_type",))
    elif kind == "full":
        reason = "algorithm.kl_loss_type full always has the exact gradient"
        yield Unread("algorithm.kl_loss_grad", reason, ("algorithm.kl_loss_type",))
    if when(lambda: not (algorithm.use_kl_in_reward and algorithm.use_kl_loss)):
        yield Unread(_BOTH_KL, f"{_KL_REWARD} and {_KL_LOSS} are not both on", (_KL_REWARD, _KL_LOSS))
    yield from _unread_clip(config, "kl_output_clip", "use_kl_in_reward", "kl_penalty")
    yield from _unread_clip(config, "kl_loss_output_clip", "use_kl_loss", "kl_loss_type")


def _unread_clip(config: Config, clip: str, switch: str, kind: str) -> Iterator[Unread]:
    algorithm = config.algorithm
    if when(lambda: not getattr(algorithm, switch)):
        yield Unread(f"algorithm.{clip}", f"algorithm.{switch} is off", (f"algorithm.{switch}",))
    elif when(lambda: getattr(algorithm, kind).removesuffix("+") not in ("k3", "low_var_kl")):
        reason = f"it belongs to k3, and algorithm.{kind} is {getattr(algorithm, kind)}"
        yield Unread(f"algorithm.{clip}", reason, (f"algorithm.{kind}",))


def _unread_by_losses(config: Config) -> Iterator[Unread]:
    algorithm = config.algorithm
    aggregation = when(lambda: algorithm.loss_agg_func)
    if aggregation not in (None, "seq-mean-token-sum-norm"):
        reason = f"it belongs to {_AGGREGATION} seq-mean-token-sum-norm"
        yield Unread("algorithm.loss_agg_horizon", reason, (_AGGREGATION,))
    if aggregation in ("token-mean", "token-sum"):
        reason = f"{_AGGREGATION} {aggregation} does not divide by a number of sequences"
        yield Unread("algorithm.loss_agg_denominator", reason, (_AGGREGATION,))
    if when(lambda: not algorithm.positive_nll_coef):
        reason = "algorithm.positive_nll_coef is 0"
        yield Unread("algorithm.positive_nll_norm", reason, ("algorithm.positive_nll_coef",))
    loss = when(lambda: algorithm.policy_loss)
    for names, reason in _UNREAD_BY_LOSS.get(loss or "", {}).items():
        yield from unread_keys("algorithm", names, f"policy_loss {loss} {reason}", _LOSS)
    if loss in POLICY_LOSSES and loss not in COVARIANCE:
        yield Unread("algorithm.covariance", f"policy_loss {loss} treats all positions alike", (_LOSS,))
    if loss in POLICY_LOSSES and loss != "sapo":
        yield from unread_keys("algorithm", "sapo_tau_pos sapo_tau_neg", f"policy_loss {loss} has no gate", _LOSS)
    if loss in POLICY_LOSSES and loss not in ("sapo", "kl_cov") and when(lambda: algorithm.old_log_probs == "current"):
        reason = f"{_OLD} is current, so the ratio is always 1"
        yield from unread_keys("algorithm", f"{_CLIPS} clip_ratio_c", reason, _OLD)
    if when(lambda: reasoning(config)):
        reason = "it belongs to action chunks and episodes of embodied training"
        yield from unread_keys("algorithm", "reward_type logprob_type entropy_type bootstrap_type", reason, TASK)
    elif when(lambda: embodied(config)):
        if when(lambda: config.whole_episodes):
            reason = "with loss_type actor there are no values that an end could be worth"
            yield Unread("algorithm.bootstrap_type", reason, (_LOSS_TYPE,))
        if when(lambda: config.actor.model.num_action_chunks == 1):
            reason = f"{CHUNKS} is 1, so chunks and actions are the same"
            yield Unread("algorithm.reward_type", reason, (CHUNKS,))
        if aggregation in ("seq-mean-token-sum", "seq-mean-token-sum-norm"):
            reason = f"loss_agg_func {aggregation} sums entropies, with the same result at all levels"
            yield Unread("algorithm.entropy_type", reason, (_AGGREGATION,))


def _unread_by_correction(config: Config) -> Iterator[Unread]:
    correction, mode = when(lambda: config.algorithm.rollout_is), f"{_CORRECTION}.mode"
    if correction is None:
        return
    if when(lambda: correction.mode is None):
        reason = f"{mode} is null, so there are no weights"
        yield from unread_keys(_CORRECTION, "level low high batch_normalize", reason, mode)
    if when(lambda: correction.mode == "sequence_mask"):
        reason = "mode sequence_mask masks whole sequences and does not change the ratios of their tokens"
        yield Unread(f"{_CORRECTION}.level", reason, (mode,))
    if when(lambda: correction.mode in (None, "truncate") and not _rejects(correction)):
        reason = f"no weight is 0: {mode} does not set weights to 0, and nothing is rejected"
        yield Unread(f"{_CORRECTION}.denominator", reason, (mode, f"{_CORRECTION}.reject", f"{_CORRECTION}.veto"))
    stat = when(lambda: correction.reject and correction.reject.stat)
    if stat not in (None, "k1"):
        reason = f"only stat k1 can be negative, and {_CORRECTION}.reject.stat is {stat}"
        yield Unread(f"{_CORRECTION}.reject.low", reason, (f"{_CORRECTION}.reject.stat",))


def _unread_rows(config: Config) -> Iterator[Unread]:
    algorithm = config.algorithm
    if when(lambda: embodied(config)):
        yield Unread(_DYNAMIC, "embodied training has no prompts", (TASK,))
        yield Unread(_SAMPLE_FILTER, "it belongs to responses; embodied training has none", (TASK,))
    elif when(lambda: algorithm.dynamic_sampling is not None and algorithm.dynamic_sampling.filter is not None):
        key = f"{_DYNAMIC}.filter"
        yield Unread(f"{_DYNAMIC}.tolerance", f"{key} selects the groups", (key,))
    if when(lambda: not algorithm.use_pf_ppo):
        yield Unread("algorithm.pf_ppo", f"{_PF_PPO} is off", (_PF_PPO,))
    elif when(lambda: algorithm.pf_ppo.method != "pow"):
        reason = "it belongs to algorithm.pf_ppo.method pow"
        yield Unread("algorithm.pf_ppo.power", reason, ("algorithm.pf_ppo.method",))
    if when(lambda: config.rows_per_step <= config.data.mini_batch_size):
        prompts, envs = ("data.train_batch_size", _GROUP_SIZE), ("env.num_envs", "env.rollout_steps", CHUNKS)
        sizes = (_MINI, *(envs if embodied(config) else prompts), TASK)
        if when(lambda: algorithm.ppo_epochs == 1):
            reason = f"a rollout has one optimizer step ({_EPOCHS}, {_MINI}), after which none could be skipped"
            yield Unread("algorithm.target_kl", reason, (_EPOCHS, *sizes))
        if when(lambda: not config.critic.use_critic_model or config.rows_per_step <= config.mini_batch_size("critic")):
            reason = f"a rollout is one mini-batch ({_MINI}), in which the order of rows has no effect"
            yield Unread("algorithm.shuffle_mini_batches", reason, (*sizes, "critic.mini_batch_size"))
