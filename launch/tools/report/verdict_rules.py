"""The rules of the verdict, as pure functions of the run's numbers. A threshold stands beside the reason for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import correlation, fmean, median, pstdev

from rl_platform.launch.tools.report.facts import Facts, Finding, Level, VerdictRule
from rl_platform.launch.views.headline import number
from rl_platform.runners.ppo import MISMATCH_LIMITS

KL_USUAL, KL_HIGH, KL_TOO_HIGH = 0.01, 0.05, 0.1  # nats a step; the usual one is the target of most PPO recipes
CLIPPED = 0.3  # share of positions: above it most of the batch no longer moves the policy
CONFIDENT = 0.1  # share of the entropy at the start that is left
FROZEN = 0.02  # the same: sampling hardly differs from greedy decoding
EXPLAINED = 0.05  # of the returns' variance; below it a constant would do
WORSE_THAN_CONSTANT = -0.5  # values that add half of the returns' variance
TRUNCATED, MOSTLY_TRUNCATED = 0.2, 0.5  # share of the responses
FIXED_LENGTH = 8  # tokens: with a limit this short every response ends at it
LONGER = 1.5  # times the length at the start
TOGETHER = 0.8  # correlation of reward and length
SPIKE = 10.0  # times the median norm
UNSCORED, MANY_UNSCORED = 0.05, 0.3  # share of the responses
EFFECTIVE = 0.5  # of the tokens: half of the data is thrown away
IMBALANCE = 0.2  # share of the time that ranks wait for the busiest one
IDLE, MOSTLY_IDLE = 0.4, 0.6  # share of the time; turns of components on one device count as work
SLOW_RANK = 2.0  # times the median of the other ranks, as in runners/watching/stragglers.py
OVERHEAD = 0.3  # share of the time of validations and checkpoints
LOST = 0.5  # of the improvement so far
CEILING = 0.95  # of a share: there is nothing left to gain
MOST_EQUAL = 0.8  # share of the groups without a difference
FEW_STEPS = 8  # with fewer steps a trend is noise
NO_PROGRESS_STEPS = 20  # tasks of the examples show a trend by then
STILL = 1e-5  # nats: the policy is the same up to rounding


def _not_finite(facts: Facts) -> Finding | None:
    names = {name for row in facts.rows for name, value in row.items() if not math.isfinite(value)}
    learners = sorted(name for name in names if name.startswith(("actor/", "critic/", "adv/", "reward/")))
    skipped = {kind: sum(facts.values(f"{kind}/skipped_updates")) for kind in ("actor", "critic")}
    if not learners and not any(skipped.values()):
        return None
    parts = [f"{int(count)} optimizer steps of the {kind} were skipped" for kind, count in skipped.items() if count]
    parts += [f"not finite: {', '.join(learners[:6])}"] if learners else []
    return Finding(
        "bad",
        "Losses or gradients are not finite",
        "; ".join(parts) + ".",
        "Lower actor.optim.lr or critic.optim.lr. failures/ holds the rows of the first failures.",
        ("actor/skipped_updates", "critic/skipped_updates"),
    )


def _kl_high(facts: Facts) -> Finding | None:
    kl = median(facts.late("actor/approx_kl"))
    if abs(kl) < KL_HIGH:
        return None
    level: Level = "bad" if abs(kl) >= KL_TOO_HIGH else "warning"
    return Finding(
        level,
        "The policy moves too far in one step",
        f"Median actor/approx_kl of {facts.late_steps('actor/approx_kl')}: {number(kl)} nats. About {KL_USUAL} is "
        "usual.",
        "Lower actor.optim.lr or algorithm.ppo_epochs, or set algorithm.target_kl.",
        ("actor/approx_kl", "actor/approx_kl_last"),
    )


def _policy_still(facts: Facts) -> Finding | None:
    kl = [abs(value) for value in facts.late("actor/approx_kl")]
    moved = [abs(value) for value in facts.late("actor/approx_kl_last")] or kl
    if len(facts.values("actor/approx_kl")) < FEW_STEPS or max((*kl, *moved)) > STILL:
        return None
    return Finding(
        "warning",
        "The policy hardly moves",
        f"Largest actor/approx_kl of {facts.late_steps('actor/approx_kl')}: {number(max(kl))} nats.",
        "Raise actor.optim.lr; check that rewards differ and that the learning-rate schedule has not reached 0.",
        ("actor/approx_kl", "actor/lr"),
    )


def _clipped(facts: Facts) -> Finding | None:
    share = median(facts.late("actor/clip_frac"))
    if share <= CLIPPED:
        return None
    return Finding(
        "warning",
        "Most of the batch is clipped",
        f"Median actor/clip_frac of {facts.late_steps('actor/clip_frac')}: {share:.0%}; clipped positions have no "
        "gradient.",
        "Lower actor.optim.lr or algorithm.ppo_epochs; a larger data.mini_batch_size means fewer optimizer steps.",
        ("actor/clip_frac", "actor/clip_frac_high", "actor/clip_frac_low"),
    )


def _entropy_collapsed(facts: Facts) -> Finding | None:
    values = facts.values("actor/entropy")
    if len(values) < FEW_STEPS or min(values) < 0:  # a differential entropy has no zero to fall to
        return None
    first, last = median(facts.early("actor/entropy")), median(facts.late("actor/entropy"))
    if last > CONFIDENT * first or _solved(facts):
        return None
    return Finding(
        "bad" if last <= FROZEN * first else "warning",
        "The entropy collapsed: the policy no longer explores",
        f"actor/entropy fell from {number(first)} to {number(last)} nats ({last / first:.1%}).",
        "Raise algorithm.entropy_bonus or algorithm.clip_ratio_high, lower actor.optim.lr, or add a KL term to the "
        "reference.",
        ("actor/entropy",),
    )


def _entropy_exploded(facts: Facts) -> Finding | None:
    values = facts.values("actor/entropy")
    if len(values) < FEW_STEPS or min(values) <= 0:
        return None
    first, last = median(facts.early("actor/entropy")), median(facts.late("actor/entropy"))
    if last < 2 * first:
        return None
    return Finding(
        "warning",
        "The entropy grows: the policy becomes random",
        f"actor/entropy rose from {number(first)} to {number(last)} nats.",
        "Lower algorithm.entropy_bonus; look at mismatch/ and at the samples for text without meaning.",
        ("actor/entropy",),
    )


def _critic_useless(facts: Facts) -> Finding | None:
    valid = [
        row["critic/explained_var"]
        for row in facts.rows
        if math.isfinite(row.get("critic/explained_var", math.nan)) and row.get("critic/explained_var_valid", 1) > 0
    ]
    if len(valid) < FEW_STEPS:
        return None
    explained = median(valid[-max(len(valid) // 4, 1) :])
    if explained >= EXPLAINED:
        return None
    worse = explained < WORSE_THAN_CONSTANT
    return Finding(
        "bad" if worse else "warning",
        "The critic is worse than a constant" if worse else "The critic explains nothing",
        f"Median critic/explained_var of the last {max(len(valid) // 4, 1)} steps: {number(explained)}. 1 is perfect, "
        "0 is a constant.",
        "Raise critic.optim.lr (actor.optim.lr with a shared backbone) or algorithm.critic_ppo_epochs, warm the critic "
        "up with algorithm.policy_training_start_step, or loosen algorithm.value_clip.",
        ("critic/explained_var", "critic/loss"),
    )


def _value_clipped(facts: Facts) -> Finding | None:
    share = median(facts.late("critic/clip_frac"))
    if share <= CLIPPED:
        return None
    return Finding(
        "warning",
        "Value clipping holds the critic back",
        f"Median critic/clip_frac of {facts.late_steps('critic/clip_frac')}: {share:.0%}, with algorithm.value_clip "
        f"{facts.key('algorithm.value_clip')}.",
        "Raise algorithm.value_clip to the scale of the returns, or set it to null.",
        ("critic/clip_frac", "critic/out_of_range_frac", "critic/returns_max"),
    )


def _truncated(facts: Facts) -> Finding | None:
    share = median(facts.late("len/response_clip_frac"))
    limit = facts.key("data.max_response_length")
    if share <= TRUNCATED or (isinstance(limit, int) and limit <= FIXED_LENGTH):
        return None
    return Finding(
        "bad" if share > MOSTLY_TRUNCATED else "warning",
        "Responses are cut by the length limit",
        f"Median len/response_clip_frac of {facts.late_steps('len/response_clip_frac')}: {share:.0%}, with "
        f"data.max_response_length {limit}.",
        "Raise data.max_response_length, penalise length with algorithm.overlong, or check that the model can end: its "
        "EOS token and rollout.stop.",
        ("len/response_clip_frac", "len/response_mean"),
    )


def _length_hacked(facts: Facts) -> Finding | None:
    rows = [row for row in facts.rows if {"reward/mean", "len/response_mean"} <= row.keys()]
    rewards, lengths = ([row[name] for row in rows] for name in ("reward/mean", "len/response_mean"))
    validation = facts.values(facts.headline.validation)
    if len(rows) < FEW_STEPS or len(validation) < 2 or pstdev(rewards) == 0 or pstdev(lengths) == 0:
        return None
    first, last = median(facts.early("len/response_mean")), median(facts.late("len/response_mean"))
    together = correlation(rewards, lengths)
    gained = fmean(facts.late("reward/mean")) > fmean(facts.early("reward/mean"))
    if not gained or last < LONGER * first or together < TOGETHER or validation[-1] > validation[0]:
        return None
    return Finding(
        "bad",
        "The reward seems to be hacked by length",
        f"Responses grew from {number(first)} to {number(last)} tokens and reward/mean with them (correlation "
        f"{together:.2f}). {facts.headline.validation} went from {number(validation[0])} to {number(validation[-1])}.",
        "Read the longest conversations below. Penalise length (algorithm.overlong), or score the answer alone.",
        ("len/response_mean", "reward/mean", facts.headline.validation),
    )


def _validation_falls(facts: Facts) -> Finding | None:
    series = facts.series(facts.headline.validation)
    if len(series) < 3:
        return None
    first, (step, best), last = series[0][1], max(series, key=lambda point: point[1]), series[-1][1]
    rewards = facts.values(facts.headline.objective)
    rising = bool(rewards) and fmean(facts.late(facts.headline.objective)) > fmean(
        facts.early(facts.headline.objective)
    )
    if best <= first or best - last <= LOST * (best - first) or not rising:
        return None
    return Finding(
        "warning",
        "Training improves and validation gets worse",
        f"{facts.headline.validation} fell from {number(best)} at step {step} to {number(last)}, while "
        f"{facts.headline.objective} rose.",
        "The policy over-fits or exploits the reward. Take an earlier checkpoint, read the conversations, add data or "
        "a KL term to the reference.",
        (facts.headline.validation, facts.headline.objective),
    )


def _lost(facts: Facts) -> Finding | None:
    values = facts.values(facts.headline.objective)
    if len(values) < 2 * FEW_STEPS:
        return None
    window = len(values) // 4
    means = [fmean(values[at : at + window]) for at in range(len(values) - window + 1)]
    best = max(means)
    if best - means[-1] <= LOST * (best - means[0]) or best - means[0] <= 2 * pstdev(values[:window]):
        return None
    return Finding(
        "bad",
        "The run lost what it had learned",
        f"Mean of {facts.headline.objective} over {window} steps: {number(means[0])} at the start, {number(best)} at "
        f"best, {number(means[-1])} at the end.",
        "Look at KL, gradient norm and entropy where it turns. Lower the learning rate and resume from a checkpoint "
        "before that step.",
        (facts.headline.objective, "actor/approx_kl", "actor/grad_norm"),
    )


def _no_progress(facts: Facts) -> Finding | None:
    validation = facts.values(facts.headline.validation)
    metric = facts.headline.validation if len(validation) > 2 else facts.headline.objective
    values = facts.values(metric)
    steps = len(facts.values(facts.headline.objective))
    if steps < NO_PROGRESS_STEPS or len(values) < 3 or _solved(facts):
        return None
    early, late = facts.early(metric), facts.late(metric)
    noise = pstdev(values) / math.sqrt(len(late))
    if fmean(late) - fmean(early) > 2 * noise:
        return None
    return Finding(
        "warning",
        "There is no progress",
        f"{metric} was {number(fmean(early))} in the first and {number(fmean(late))} in the last quarter of the "
        f"values. The noise of such a mean is {number(noise)}.",
        "Check that some responses or episodes are rewarded at all (samples below), that the policy moves (KL) and "
        "that the critic explains returns.",
        (metric, "actor/approx_kl", "critic/explained_var"),
    )


def _no_signal(facts: Facts) -> Finding | None:
    pairs = [(row["reward/min"], row["reward/max"]) for row in facts.rows if {"reward/min", "reward/max"} <= row.keys()]
    equal = sum(low == high for low, high in pairs)
    if len(pairs) < 2 or equal <= len(pairs) / 2:
        return None
    return Finding(
        "bad",
        "All rewards are equal, so there is nothing to learn",
        f"reward/min equals reward/max in {equal} of {len(pairs)} steps.",
        "Use easier questions or a better model to start from, reward partial success, or check the verifier on the "
        "samples below.",
        ("reward/min", "reward/max", "adv/std"),
    )


def _unscored(facts: Facts) -> Finding | None:
    share = sum(facts.values("reward/unscored")) / max(sum(facts.values("perf/samples")), 1.0)
    if share <= UNSCORED:
        return None
    return Finding(
        "bad" if share > MANY_UNSCORED else "warning",
        "Responses are left without a score",
        f"{share:.1%} of all responses have no score and were not trained on.",
        "The verifier raised, hung or crashed, or a reward server did: see the log, and reward.timeout_s.",
        ("reward/unscored",),
    )


def _mismatch(facts: Facts) -> Finding | None:
    if max(facts.values("staleness/max"), default=0.0) > 0:  # then weights differ, and the metrics measure that too
        return None
    late = {name: median(facts.late(name)) for name in MISMATCH_LIMITS}
    if not (passed := {name: value for name, value in late.items() if value > MISMATCH_LIMITS[name]}):
        return None
    values = ", ".join(f"{name} {number(value)} (limit {MISMATCH_LIMITS[name]:g})" for name, value in passed.items())
    corrected = facts.key("algorithm.rollout_is") is not None
    return Finding(
        "note" if corrected else "warning",
        "Rollout and training engine give the same tokens different probabilities",
        f"Median of the last quarter: {values}." + (" algorithm.rollout_is corrects for it." if corrected else ""),
        "Use one precision in both engines, or set algorithm.rollout_is. For mixtures of experts actor.router_replay "
        "removes most of it.",
        tuple(passed),
    )


def _weights_wasted(facts: Facts) -> Finding | None:
    ess = median(facts.late("is/ess"))
    if ess >= EFFECTIVE:
        return None
    return Finding(
        "warning",
        "Importance weights throw most of the data away",
        f"Median is/ess of {facts.late_steps('is/ess')}: {ess:.0%} of the tokens.",
        "Reduce the mismatch or the staleness at its source; see mismatch/ and staleness/.",
        ("is/ess", "is/oob_frac", "is/rejected_frac"),
    )


def _gradients(facts: Facts) -> Finding | None:
    for kind in ("actor", "critic"):
        values = facts.values(f"{kind}/grad_norm")
        if len(values) < FEW_STEPS:
            continue
        usual, largest = median(values), max(facts.late(f"{kind}/grad_norm"))
        if usual > 0 and largest > SPIKE * usual:
            return Finding(
                "warning",
                f"The gradients of the {kind} explode",
                f"Largest {kind}/grad_norm of the last quarter: {number(largest)}, {largest / usual:.0f} times the "
                f"median {number(usual)}. optim.clip_grad is {facts.key(f'{kind}.optim.clip_grad')}.",
                f"Lower {kind}.optim.lr, set {kind}.optim.clip_grad, and look at the rewards of those steps.",
                (f"{kind}/grad_norm", f"{kind}/loss"),
            )
    return None


def _stale(facts: Facts) -> Finding | None:
    age, allowed = max(facts.values("staleness/max")), facts.key("runner.max_staleness") or 0
    limit = max(allowed, 1)
    if age <= limit:
        return None
    return Finding(
        "warning",
        "Responses are old when they are trained on",
        f"Largest staleness/max: {number(age)} updates; runner.max_staleness is {allowed}.",
        "Fewer prompts in work (rollout.partial_rollout), shorter responses, or more rollout devices.",
        ("staleness/max", "staleness/mean"),
    )


def _imbalance(facts: Facts) -> Finding | None:
    share = median(facts.late("balance/imbalance"))
    if share <= IMBALANCE:
        return None
    return Finding(
        "warning",
        "Learner ranks wait for the busiest one",
        f"Median balance/imbalance of {facts.late_steps('balance/imbalance')}: {share:.0%} of the time.",
        "A larger data.mini_batch_size gives more rows to share; a few very long responses cannot be shared.",
        ("balance/imbalance", "balance/after_max"),
    )


def _stragglers(facts: Facts) -> Finding | None:
    slow = []
    for method, seconds in facts.rank_seconds.items():
        for rank, own in seconds.items():
            others = [value for other, value in seconds.items() if other != rank]
            if others and own > SLOW_RANK * median(others) and own - median(others) > 0.5:
                slow.append(
                    f"{rank} took {number(own)} s for {method}, the median of the others is {median(others):.2g} s"
                )
    if not slow:
        return None
    return Finding(
        "warning",
        "A rank is much slower than the others",
        "; ".join(slow[:3]) + ".",
        "Look for another job, a throttled GPU or a slow disk on its machine.",
    )


def _idle(facts: Facts) -> Finding | None:
    idle = [busy for busy in facts.busy if 1 - busy.share > IDLE and busy.waiting]
    if not idle:
        return None
    worst = min(idle, key=lambda busy: busy.share)
    phases = ", ".join(f"{name} {share:.0%}" for name, share in list(worst.waiting.items())[:3])
    return Finding(
        "warning" if 1 - worst.share > MOSTLY_IDLE else "note",
        f"{worst.device} is idle for {1 - worst.share:.0%} of the time",
        f"It holds {', '.join(worst.components)} and waits during: {phases} (shares of the recorded time). "
        f"{len(idle)} of {len(facts.busy)} devices are idle for more than {IDLE:.0%}.",
        "Let components share devices, give the longest phase more of them, or overlap with runner.max_staleness: 1. "
        "platform-launch --plan=search proposes placements.",
    )


def _overhead(facts: Facts) -> Finding | None:
    training = [row for row in facts.rows if row["step"] > 0]  # step 0 loads and validates
    total = sum(row.get("time/step", 0.0) for row in training)
    names = ("validate", "checkpoint", "log tokens")
    seconds = {name: sum(row.get(f"time/{name}", 0.0) for row in training) for name in names}
    share = sum(seconds.values()) / total if total else 0.0
    if share <= OVERHEAD or len(facts.values("time/step")) < FEW_STEPS:
        return None
    parts = ", ".join(f"{name} {value / total:.0%}" for name, value in seconds.items() if value)
    return Finding(
        "note",
        "Validations and checkpoints take much of the time",
        f"Shares of the time of all steps: {parts}.",
        "Raise runner.val_check_interval or runner.save_interval, or validate on fewer questions or episodes.",
        ("time/validate", "time/checkpoint"),
    )


def _failures(facts: Facts) -> Finding | None:
    names = ("env/failures", "episode/invalid", "val/invalid", "tool/errors")
    counts = {name: sum(facts.values(name)) for name in names}
    restarts = max(facts.values("runtime/restarts"), default=0.0)
    if not any(counts.values()) and not restarts:
        return None
    parts = [f"{name} {number(count)} in all" for name, count in counts.items() if count]
    parts += [f"{number(restarts)} processes were started again"] if restarts else []
    return Finding(
        "note",
        "Environments, tools or processes failed and were replaced",
        "; ".join(parts) + ".",
        "The log of the run has each reason.",
        tuple(name for name, count in counts.items() if count),
    )


def _equal_groups(facts: Facts) -> Finding | None:
    generated = sum(facts.values("dynamic_sampling/generated"))
    right, wrong = (sum(facts.values(f"dynamic_sampling/{name}")) for name in ("all_correct", "all_wrong"))
    if (right + wrong) <= MOST_EQUAL * max(generated, 1.0):
        return None
    hard = "too hard" if wrong > right else "too easy"
    return Finding(
        "warning",
        f"Most questions are {hard}",
        f"Of {number(generated)} groups {number(right)} were all right and {number(wrong)} all wrong.",
        "Choose questions of fitting difficulty, or a larger algorithm.group_size.",
        ("dynamic_sampling/all_correct", "dynamic_sampling/all_wrong"),
    )


def _early_stopped(facts: Facts) -> Finding | None:
    share = fmean(facts.late("actor/early_stopped"))
    if share <= MOST_EQUAL:
        return None
    return Finding(
        "note",
        "algorithm.target_kl ends most updates early",
        f"{share:.0%} of the updates of {facts.late_steps('actor/early_stopped')} ended before their last mini-batch.",
        "Lower actor.optim.lr, or save the time of the skipped epochs with a smaller algorithm.ppo_epochs.",
        ("actor/early_stopped", "actor/optimizer_steps"),
    )


def _solved(facts: Facts) -> bool:
    """Returns whether a share that the run is measured by is at its ceiling, where entropy may go and progress must
    end."""
    names = [*facts.headline.rates.values(), "val/accuracy"]
    return any(values and values[-1] >= CEILING for values in map(facts.values, names))


SOURCES: Mapping[str, Callable[[Facts], object]] = {
    "trace.json": lambda facts: facts.busy,
    "several ranks in trace.json": lambda facts: facts.rank_seconds,
}
RULES = (
    VerdictRule("Are all numbers finite?", (), _not_finite),
    VerdictRule("Do rewards differ?", ("reward/min", "reward/max"), _no_signal),
    VerdictRule("Did the run keep what it learned?", (), _lost),
    VerdictRule("Is there progress?", (), _no_progress),
    VerdictRule("Does validation follow training?", (), _validation_falls),
    VerdictRule("Is the step of the policy small enough (KL)?", ("actor/approx_kl",), _kl_high),
    VerdictRule("Does the policy move?", ("actor/approx_kl",), _policy_still),
    VerdictRule("Is little clipped?", ("actor/clip_frac",), _clipped),
    VerdictRule("Does the policy still explore (entropy)?", ("actor/entropy",), _entropy_collapsed),
    VerdictRule("Is the policy still ordered (entropy)?", ("actor/entropy",), _entropy_exploded),
    VerdictRule("Does the critic explain the returns?", ("critic/explained_var",), _critic_useless),
    VerdictRule("Is value clipping wide enough?", ("critic/clip_frac",), _value_clipped),
    VerdictRule("Are gradient norms steady?", ("actor/grad_norm",), _gradients),
    VerdictRule("Do responses end by themselves?", ("len/response_clip_frac",), _truncated),
    VerdictRule("Is the reward free of length?", ("len/response_mean", "reward/mean"), _length_hacked),
    VerdictRule("Are all responses scored?", ("reward/unscored", "perf/samples"), _unscored),
    VerdictRule("Do rollout and training engine agree?", tuple(MISMATCH_LIMITS), _mismatch),
    VerdictRule("Do importance weights keep the data?", ("is/ess",), _weights_wasted),
    VerdictRule("Are responses fresh?", ("staleness/max",), _stale),
    VerdictRule("Are questions neither too easy nor too hard?", ("dynamic_sampling/generated",), _equal_groups),
    VerdictRule("Does target_kl let updates end?", ("actor/early_stopped",), _early_stopped),
    VerdictRule("Do learner ranks share the work?", ("balance/imbalance",), _imbalance),
    VerdictRule("Are ranks equally fast?", ("several ranks in trace.json",), _stragglers),
    VerdictRule("Do devices work?", ("trace.json",), _idle),
    VerdictRule("Does training have the time?", ("time/step",), _overhead),
    VerdictRule("Did everything run without failures?", (), _failures),
)
