"""The algorithm card: the computation of a config in words, printed at the start of every run.

It covers the points in which public systems differ silently: denominators, placement of the KL, source of the old
log-probs, number of optimizer steps, meaning of the warm-up.
"""

from __future__ import annotations

from typing import Literal

from rl_platform.config.schema.algorithm import ESTIMATORS, PFPPO, Algorithm, estimator_needs
from rl_platform.config.schema.data import Data
from rl_platform.config.schema.reward import Reward

DENOMINATORS = {
    "token-mean": "active positions of the mini-batch",
    "seq-mean-token-sum": "sequences of the mini-batch with an active position",
    "seq-mean-token-mean": "length of each sequence, then sequences of the mini-batch with an active position",
    "seq-mean-token-sum-norm": "sequences of the mini-batch with an active position, times the horizon {horizon}",
    "token-sum": "nothing: it grows with the mini-batch",
}
WHITENED = {"tokens": "active positions", "sequences": "responses, each counting once,"}
OLD_LOG_PROBS = {
    "recompute": "recomputed by the training engine before the first update",
    "rollout": "those of the rollout engine; the training engine makes no pass before the update",
    "current": "the current ones, so the ratio is 1: a rollout is one optimizer step, and no pass is made before it",
}
MISMATCH = {
    "rollout": "in the ratio, which is to the rollout engine; not measured by itself",
    "current": "not measured, not corrected: the training engine's log-probs are not known before the update",
}
KL_GRADIENTS = {
    "full": "over the whole vocabulary",
    "path": "its plain gradient",
    "k2": "with the gradient of k2",
    "score": "times the ratio to the old policy: the gradient of its expectation",
}


def algorithm_card(
    algorithm: Algorithm,
    *,
    rows_per_rollout: int,
    mini_batch_size: int,
    critic_mini_batch_size: int | None = None,
    task_type: Literal["embodied", "reasoning"],
    has_values: bool = True,
    num_action_chunks: int = 1,
) -> list[tuple[str, str]]:
    """Returns (topic, text) lines in reading order. Rows are sequences (reasoning) or transitions (embodied).

    `has_values`: a value function is trained, as a head on the policy or as a critic. `num_action_chunks`: actions per
    transition.
    """
    reasoning = task_type == "reasoning"
    with_values = "recomputed with the values before the first update"
    old = OLD_LOG_PROBS[algorithm.old_log_probs] if reasoning or not has_values else with_values
    unit = "sequences" if reasoning else "transitions"
    sizes = {"actor": mini_batch_size, "critic": critic_mini_batch_size or mini_batch_size}
    steps = _optimizer_steps(algorithm, rows_per_rollout, sizes, unit)
    steps.append(("critic warm-up", _warm_up(algorithm)))
    return [
        ("advantages", _advantages(algorithm)),
        *([("rewards", _rewards(algorithm))] if reasoning else _action_chunks(algorithm, num_action_chunks)),
        ("policy loss", _policy_loss(algorithm)),
        ("rollout mismatch", _mismatch(algorithm)),
        ("value loss", _value_loss(algorithm) if has_values else "none: there is no critic"),
        ("loss is divided by", _denominators(algorithm)),
        ("KL to the reference", _kl(algorithm)),
        ("old log-probs", old),
        *_rows(algorithm),
        *((topic, text) for topic, text in steps if has_values or not topic.startswith("critic")),
        *_early_stop(algorithm),
    ]


def sources_card(data: Data) -> list[tuple[str, str]]:
    """Returns the shares of several sources of questions, and those that are validated; nothing of one source."""
    if not data.sources:
        return []
    total = sum(source.weight for source in data.sources)
    shares = [f"{source.label} {source.weight / total:.1%}" for source in data.sources if source.weight]
    validated = [source.label for source in data.sources if data.validation_size(source)]
    text = f"{', '.join(shares)} of the prompts of a step, up to rounding; each source is repeated in a new order"
    return [("sources", f"{text}; validated one by one: {', '.join(validated)}")]


def functions_card(reward: Reward) -> list[tuple[str, str]]:
    """Returns the sum of several reward functions; nothing of one."""
    if not reward.functions:
        return []
    terms = " + ".join(f"{each.weight:g} * {each.label} ({each.type})" for each in reward.functions)
    return [("score", f"{terms}; a response that one of them cannot score does not count")]


def _advantages(algorithm: Algorithm) -> str:
    whitens = estimator_needs(algorithm.adv_type).whitens
    whitening = (
        f"whitened over all {WHITENED[algorithm.whiten_over]} of the rollout batch (unbiased variance)"
        if (algorithm.normalize_advantages if whitens is None else whitens)
        else "not whitened"
    )
    if algorithm.distillation_coef:
        whitening += f"; - {algorithm.distillation_coef:g} (log-prob - the teacher's log-prob) on every token"
    if (clip := algorithm.advantage_clip) is not None:
        whitening += f", bounded by [{clip[0]:g}, {clip[1]:g}]"
    return f"{_estimator(algorithm)}; {whitening}"


def _estimator(algorithm: Algorithm) -> str:
    name = algorithm.adv_type
    if name not in ESTIMATORS:
        return f"{name}, a function of your own"
    return (
        f"{name}, "
        + {
            "gae": f"gamma {algorithm.gamma:g}, {_lambdas(algorithm)}, masked positions are skipped"
            + (", truncated responses bootstrapped with the critic's value" if algorithm.bootstrap_truncated else ""),
            "grpo": _grpo(algorithm),
            "rloo": "score minus mean of the other samples of the group",
            "opo": "score minus mean of the group, each sample weighted by its length",
            "optimal_token_baseline": "reward to go minus mean of the group at the same token, each sample weighted by "
            "the squared gradients of its tokens so far",
            "reinforce_plus_plus": f"reward to go, gamma {algorithm.gamma:g}, masked positions are skipped"
            + (", the KL penalty of each token its own" if algorithm.reinforce_kl_credit == "local" else ""),
            "reinforce_plus_plus_baseline": "score minus mean of the group",
            "remax": "score minus the score of the greedy response to the same prompt",
            "raw": "the score itself",
            "distillation": "0 for every score",
        }[name]
    )


def _grpo(algorithm: Algorithm) -> str:
    if algorithm.grpo_leave_one_out:
        return "score minus mean of the other samples of the group, divided by the others' unbiased deviation + 1e-6"
    divided = "divided by its unbiased deviation + 1e-6" if algorithm.grpo_std_normalization else "not divided by it"
    return f"score minus mean of the group, {divided}"


def _lambdas(algorithm: Algorithm) -> str:
    policy, value = algorithm.gae_lambda_policy, algorithm.gae_lambda_value
    plain = f"{algorithm.gae_lambda:g}"
    if policy is None and value is None and not algorithm.length_adaptive_alpha:
        return f"lambda {plain}"
    of_policy = plain if policy is None else f"{policy:g}"
    if algorithm.length_adaptive_alpha:
        of_policy = f"1 - 1 / ({algorithm.length_adaptive_alpha:g} length)"
    return f"lambda {of_policy} for advantages and {plain if value is None else f'{value:g}'} for returns"


def _action_chunks(algorithm: Algorithm, num_actions: int) -> list[tuple[str, str]]:
    """Nothing where each transition is one action with one log-prob, and episodes continue and bootstrap as usual."""
    rows = []
    if num_actions > 1 or {algorithm.logprob_type, algorithm.entropy_type} != {"chunk_level"}:
        unit = {
            "chunk_level": "chunk" if num_actions > 1 else "action",
            "action_level": "action",
            "token_level": "component of an action",
        }
        rewards = unit[algorithm.reward_type]
        added = ", its rewards added up without discount" if rewards == "chunk" else ""
        text = (
            f"{num_actions} executed per choice; one reward, value and advantage per {rewards}{added}, gamma per "
            f"{rewards}; one ratio per {unit[algorithm.logprob_type]}; entropy per {unit[algorithm.entropy_type]}"
        )
        rows.append(("actions", text))
    if algorithm.loss_type == "actor":
        alike = f"{algorithm.group_size} environments begin each of them in one state"
        compared = alike if algorithm.group_size > 1 else "each begins in a state of its own"
        rows.append(("episodes", f"a rollout begins new ones and plays them to their ends; {compared}"))
    elif algorithm.bootstrap_type != "standard":
        always = algorithm.bootstrap_type == "always"
        text = f"the value of an episode's last state {'always counts' if always else 'never counts, truncated or not'}"
        rows.append(("ends of episodes", text))
    return rows


def _policy_loss(algorithm: Algorithm) -> str:
    bounds = f"[{1 - algorithm.clip_ratio_low:g}, {1 + algorithm.clip_ratio_high:g}]"
    cov = algorithm.covariance
    chosen, inside = f"{cov.fraction:g} of the positions, those", f"({cov.low:g}, {cov.high:g})"
    taus = f"{algorithm.sapo_tau_neg:g} (A < 0), {algorithm.sapo_tau_pos:g} (A > 0)"
    log_bounds = f"[{-algorithm.clip_ratio_low:g}, {algorithm.clip_ratio_high:g}]"
    dual = f", dual clip {algorithm.clip_ratio_c:g}" if algorithm.clip_ratio_c is not None else ""
    thresholds = f"{algorithm.clip_ratio_low:g} (A < 0), {algorithm.clip_ratio_high:g} (A > 0)"
    text = {
        "ppo_clip": f"ratio clipped to {bounds}{dual}",
        "gspo": f"one ratio per sequence (geometric mean), clipped to {bounds}{dual}",
        "gspo_token": f"one ratio per sequence (geometric mean), clipped to {bounds}{dual}, a gradient per token",
        "gmpo": f"geometric mean of a sequence's ratios, each clipped to exp({log_bounds})",
        "sapo": f"ratio through a soft gate, tau {taus}",
        "cispo": f"-A log-prob, weighted by the ratio clipped to {bounds}",
        "clip_cov": f"ratio clipped to {bounds}{dual}; no loss at {chosen} of a covariance in {inside}",
        "kl_cov": f"ratio, + {cov.kl_coef:g} |log ratio| at {chosen} of the largest covariance",
        "reinforce": "-A log-prob, without a ratio",
        "dppo_tv": f"ratio, 0 where total variation exceeds {thresholds} and grows",
        "dppo_kl": f"ratio, 0 where KL(old || new) exceeds {thresholds} and grows",
    }.get(algorithm.policy_loss, f"the function {algorithm.policy_loss}")
    text += f"; entropy bonus {algorithm.entropy_bonus:g}" if algorithm.entropy_bonus else "; no entropy bonus"
    if algorithm.positive_nll_coef:
        text += f"; + {algorithm.positive_nll_coef:g} * negative log-likelihood of correct responses, per token of "
        text += "them" if algorithm.positive_nll_norm == "correct_tokens" else "all responses"
    return text


def _mismatch(algorithm: Algorithm) -> str:
    correction = algorithm.rollout_is
    if algorithm.old_log_probs != "recompute":
        return MISMATCH[algorithm.old_log_probs]
    if correction is None:
        return "measured, not corrected"
    parts = []
    if correction.mode is not None:
        ratio = (
            "geometric mean of the sequence" if correction.mode == "sequence_mask" else f"ratio per {correction.level}"
        )
        bounds = f"[{correction.low:g}, {'inf' if correction.high is None else f'{correction.high:g}'}]"
        outside = {"truncate": "cut to it", "icepop": "weight 0", "sequence_mask": "the sequence has weight 0"}
        text = f"{ratio} (training over rollout), outside {bounds} {outside[correction.mode]}"
        parts.append(text + (", divided by the mean weight" if correction.batch_normalize else ""))
    if (reject := correction.reject) is not None:
        below = "" if reject.low is None else f" or below {reject.low:g}"
        parts.append(f"every {reject.level} with {reject.stat} above {reject.threshold:g}{below} has weight 0")
    if correction.veto is not None:
        parts.append(f"a sequence with a token whose ratio is below {correction.veto:g} has weight 0")
    zeros = "denominators unchanged" if correction.denominator == "original" else "tokens of weight 0 leave the loss"
    where = (
        "on the policy loss and, as V-trace, on the value targets" if correction.vtrace else "on the policy loss only"
    )
    return "; ".join(parts) + f"; {where}, {zeros}"


def _value_loss(algorithm: Algorithm) -> str:
    kind = "half the squared error" if algorithm.huber_delta is None else f"Huber, delta {algorithm.huber_delta:g}"
    clip = "not clipped" if algorithm.value_clip is None else f"values clipped to old values +-{algorithm.value_clip:g}"
    where = "one backward with the policy loss" if algorithm.loss_type == "actor_critic" else "in a critic of its own"
    return f"{kind}, {clip}, times {algorithm.value_loss_scale:g}; {where}"


def _denominators(algorithm: Algorithm) -> str:
    horizon = "(longest response)" if algorithm.loss_agg_horizon is None else str(algorithm.loss_agg_horizon)
    text = DENOMINATORS[algorithm.loss_agg_func].format(horizon=horizon)
    if algorithm.loss_agg_denominator == "nominal":
        text = text.replace(" with an active position", ", masked ones included")
    return f"{algorithm.loss_agg_func}: {text}"


def _rewards(algorithm: Algorithm) -> str:
    scaling, overlong = algorithm.reward_scaling, algorithm.overlong
    parts = ["the score"]
    if scaling is not None:
        source, target = (scaling.source_min, scaling.source_max), (scaling.target_min, scaling.target_max)
        parts.append("clipped to [{:g}, {:g}] and mapped to [{:g}, {:g}]".format(*source, *target))
    if overlong.stop_properly_coef is not None:
        parts.append(f"times {overlong.stop_properly_coef:g} if truncated")
    if overlong.buffer_length is not None:
        limit = "the longest response" if overlong.max_length is None else f"{overlong.max_length} tokens"
        parts.append(f"minus up to {overlong.penalty:g} over the last {overlong.buffer_length} tokens before {limit}")
    if overlong.filter:
        groups = ", nor in their group's statistics" if algorithm.group_ignore_masked else ""
        parts.append(f"truncated responses do not count{groups}")
    if algorithm.reward_whitening:
        parts.append("scaled to unit variance over the rollout batch, without a shift of the mean")
    return ", ".join([*parts, "on the last action of the response"])


def _kl(algorithm: Algorithm) -> str:
    parts = []
    if algorithm.use_kl_in_reward:
        control = algorithm.kl_ctrl
        adaptive = f", adaptive to {control.target_kl:g}" if control.type == "adaptive" else ""
        kind = f"{algorithm.kl_penalty}{_at_most(algorithm.kl_penalty, algorithm.kl_output_clip)}"
        parts.append(f"in the reward: {kind}, coefficient {control.kl_coef:g}{adaptive}")
    if algorithm.use_kl_loss:
        kind, coefficient = algorithm.kl_loss_type, algorithm.kl_loss_coef
        gradient = KL_GRADIENTS["full" if kind == "full" else "k2" if kind.endswith("+") else algorithm.kl_loss_grad]
        limit = _at_most(kind, algorithm.kl_loss_output_clip)
        parts.append(f"in the actor loss: {kind.removesuffix('+')}{limit}, coefficient {coefficient:g}, {gradient}")
    if len(parts) > 1 and algorithm.allow_both_kl:
        parts.append("both on purpose")
    return "; ".join(parts) or "none"


def _at_most(estimator: str, output_clip: float | None) -> str:
    bounded = estimator.removesuffix("+") in ("k3", "low_var_kl") and output_clip is not None
    return f" (at most {output_clip:g})" if bounded else ""


def _rows(algorithm: Algorithm) -> list[tuple[str, str]]:
    """Nothing where each row of the rollout is trained on alike."""
    rows = []
    if (sampling := algorithm.dynamic_sampling) is not None:
        then = {
            "error": "then the run ends",
            "train_partial": "then the step is smaller",
            "fill_with_rejected": "then others fill the step",
        }
        prompts = f"{sampling.prompts_per_round} prompts" if sampling.prompts_per_round else "prompts"
        which = f"whose metrics differ by more than {sampling.tolerance:g}"
        if sampling.filter is not None:
            which = f"that {sampling.filter} keeps"
        text = (
            f"only groups of {algorithm.group_size} {which}; "
            f"up to {sampling.max_rounds} rounds of {prompts}, {then[sampling.on_exhausted]}; "
            f"surplus groups are {'first in the next step' if sampling.surplus == 'carry' else 'dropped'}"
        )
        rows.append(("dynamic sampling", text))
    if algorithm.sample_filter is not None:
        groups = ", nor in their group's statistics" if algorithm.group_ignore_masked else ""
        rows.append(("responses", f"those that {algorithm.sample_filter} drops do not count{groups}"))
    if algorithm.use_pf_ppo:
        rows.append(("PF-PPO", _pf_ppo(algorithm.pf_ppo)))
    return rows


def _pf_ppo(options: PFPPO) -> str:
    text = {
        "pow": f"|reward|^{options.power:g} (rewards of 0 and 1: successes only)",
        "max_min": "1 for the highest and the lowest reward, 0 for the others",
        "max_random": "0.4 for the highest reward, 0.1 for the others",
    }[options.method]
    if options.mode == "weight":
        return f"policy loss of a row times {text}, mean 1; value loss as without"
    return f"rows resampled with weights {text}, for actor and critic"


def _early_stop(algorithm: Algorithm) -> list[tuple[str, str]]:
    if algorithm.target_kl is None:
        return []
    who = "actor's and critic's" if algorithm.loss_type == "actor_critic" else "actor's"
    text = (
        f"the {who} update ends after a mini-batch whose mean k3 to the rollout policy exceeds {algorithm.target_kl:g}"
    )
    return [("early stop", text)]


def _optimizer_steps(algorithm: Algorithm, rows: int, sizes: dict[str, int], unit: str) -> list[tuple[str, str]]:
    def text(name: str, epochs: int) -> str:
        steps = rows // sizes[name]
        return f"{epochs * steps} ({epochs} epochs x {steps} mini-batches of {sizes[name]} {unit})"

    actor = text("actor", algorithm.ppo_epochs)
    if algorithm.loss_type == "actor_critic":
        return [("optimizer steps per rollout", f"{actor}, actor and critic together")]
    return [("actor steps per rollout", actor), ("critic steps per rollout", text("critic", algorithm.critic_epochs))]


def _warm_up(algorithm: Algorithm) -> str:
    count = algorithm.policy_training_start_step
    if count == 0:
        return "none: the actor learns from the first step on"
    steps = "1 PPO step trains" if count == 1 else f"{count} PPO steps train"
    return f"exactly {steps} the critic only; the actor learns from step {count} on, counted from 0"
