"""The keys of RLinf whose values are computed, of reasoning runs and of both.

`rlinf_embodied.py` has those of environments, `rlinf_policies.py` of embodied policies, `rlinf_placement.py` the
placement.
"""

from __future__ import annotations

from pathlib import PurePath

from rl_platform.launch.tools.convert.conversion import System
from rl_platform.launch.tools.convert.outcome import (
    MANY_STEPS,
    NO_STEPS,
    REASONS,
    ForeignConfig,
    Outcome,
    Rule,
    Table,
    Value,
    choice,
    dtype,
    lacking,
    loggers,
    number,
    part_of,
    same,
    texts,
    untranslated,
    while_,
    write,
)
from rl_platform.launch.tools.convert.rlinf_embodied import EMBODIED, embodied
from rl_platform.launch.tools.convert.rlinf_placement import (
    node_groups,
    placement,
    share_processes,
    shared_heads,
    tensor_parallel,
)
from rl_platform.launch.tools.convert.rlinf_policies import POLICIES, constant_entropy
from rl_platform.launch.tools.convert.rlinf_stand_ins import stand_ins

_UNREAD = "RLinf reads it in reasoning runs only"
_IMAGE_REWARD = "a reward model of images: compute its reward in the environment"


def _in_reasoning(rule: str | Rule) -> Rule:
    return while_(lambda source: not embodied(source), rule, _UNREAD)


def _task_type(value: Value, _: ForeignConfig) -> Outcome:
    values = {"runner.task_type": value}
    if value == "embodied":
        return write(
            {**values, "env.normalize_observations": False, "env.normalize_rewards": False},
            "observations and rewards are not normalised there",
        )
    return write(values) if value == "reasoning" else untranslated("only embodied and reasoning runs")


def _max_epochs(value: Value, source: ForeignConfig) -> Outcome:
    steps = source.positive("runner.max_steps")
    if embodied(source):
        return write({"runner.max_steps": min(number(value), steps) if steps else value}, "an epoch there is a step")
    if steps:
        return write({"runner.max_epochs": value, "runner.max_steps": steps})
    return write({"runner.max_epochs": value, "runner.max_steps": MANY_STEPS}, NO_STEPS)


def _adv_type(value: Value, source: ForeignConfig) -> Outcome:
    names = {"gae": "gae", "grpo": "grpo", "raw": "raw"}
    baseline = source("algorithm.use_reinpp_baseline")
    names["reinpp"] = "reinforce_plus_plus_baseline" if baseline else "reinforce_plus_plus"
    return choice("algorithm.adv_type", names)(value, source)


def _normalize(value: Value, source: ForeignConfig) -> Outcome:
    kind = source("algorithm.adv_type")
    if kind == "gae":
        if embodied(source) and value is False:
            return untranslated("RLinf whitens in every embodied GAE run", {"algorithm.normalize_advantages": True})
        return write({"algorithm.normalize_advantages": value})
    if kind == "grpo" and value and not embodied(source):
        return untranslated("group advantages are not whitened over the batch again")
    return same(f"{kind} decides")


def _mini_batches(value: Value, source: ForeignConfig) -> Outcome:
    rows = source.number("data.rollout_batch_size") * source.number("algorithm.group_size")
    return write({"data.mini_batch_size": rows // number(value)}, f"{rows} sequences in {value} mini-batches")


def _response(value: Value, source: ForeignConfig) -> Outcome:
    if embodied(source):
        return same(_UNREAD)
    prompt, tokens = source.number("data.max_prompt_length"), number(value)
    room = number(source("runner.seq_length") or tokens + prompt) - prompt
    why = "" if tokens <= room else "what runner.seq_length leaves"
    return write({"data.max_response_length": min(tokens, room)}, why)


def _ratio(value: Value, source: ForeignConfig) -> Outcome:
    sides = {side: source(f"algorithm.clip_ratio_{side}") for side in ("low", "high")}
    unset = {f"algorithm.clip_ratio_{side}": value for side, each in sides.items() if each is None}
    return write(unset) if unset else same("clip_ratio_low and clip_ratio_high decide")


def _dual_clip(value: Value, source: ForeignConfig) -> Outcome:
    if "algorithm.clip_ratio_c" not in source.given and source("actor.training_backend") != "fsdp":
        return same("off by default with Megatron")
    return write({"algorithm.clip_ratio_c": value})


def _kl_beta(value: Value, _: ForeignConfig) -> Outcome:
    if not value:
        return same("no KL term")
    return write({"algorithm.use_kl_loss": True, "algorithm.kl_loss_coef": value}, "a term of the loss")


def _reinpp_kl(value: Value, source: ForeignConfig) -> Outcome:
    if not value:
        return same("no KL term")
    return write(
        {
            "algorithm.use_kl_in_reward": True,
            "algorithm.kl_ctrl.kl_coef": value,
            "algorithm.kl_penalty": source("algorithm.kl_penalty_type"),
        },
        "a penalty in the reward",
    )


def _kl_type(value: Value, source: ForeignConfig) -> Outcome:
    if not source.positive("algorithm.kl_beta"):
        return same("no KL term")
    bound = {"algorithm.kl_loss_output_clip": 10.0} if value in ("k3", "low_var_kl") else {}
    return write({"algorithm.kl_loss_type": value, **bound})


def _entropy(value: Value, source: ForeignConfig) -> Outcome:
    if value and not embodied(source) and not source("algorithm.calculate_entropy"):
        return untranslated("RLinf ignores it while calculate_entropy is false")
    if value and constant_entropy(source):
        return untranslated("the entropy of its noise is constant: flow_noise learns it")
    return write({"algorithm.entropy_bonus": value})


def _loss_type(value: Value, source: ForeignConfig) -> Outcome:
    if value == "actor" and shared_heads(source):
        why = "an embodied policy with GAE has a value head here"
        return untranslated(why, {"algorithm.loss_type": "actor_critic"})
    names = {"actor": "actor", "actor_critic": "actor_critic", "decoupled_actor_critic": "actor_critic"}
    return choice("algorithm.loss_type", names)(value, source)


def _staleness(value: Value, source: ForeignConfig) -> Outcome:
    """The decoupled loss multiplies the clipped loss by pi_old / pi_rollout, where pi_old is the newest policy."""
    if not value:
        return same("off there")
    values: dict[str, Value] = {"runner.max_staleness": value}
    if source("algorithm.loss_type") == "decoupled_actor_critic":
        high = source("algorithm.behave_weight_threshold")
        mode = "truncate" if high is None else "icepop"
        values |= {f"algorithm.rollout_is.{key}": each for key, each in (("level", "token"), ("mode", mode))}
        values["algorithm.rollout_is.high"] = high
    return write(values, "old log-probs are recomputed here, approximated there")


def _behaviour_weight(value: Value, source: ForeignConfig) -> Outcome:
    return part_of("algorithm.rollout_is") if source("algorithm.staleness_threshold") else same("no stale rollouts")


def _importance_sampling(value: Value, source: ForeignConfig) -> Outcome:
    """RLinf multiplies advantages by pi_recomputed / pi_rollout, at most importance_sampling_clip."""
    if not value:
        return same("off there")
    high = source("algorithm.importance_sampling_clip")
    values: dict[str, Value] = {"level": "token", "mode": "truncate", "high": high}
    return write({f"algorithm.rollout_is.{name}": each for name, each in values.items()})


def _loss_agg(value: Value, source: ForeignConfig) -> Outcome:
    """Embodied runs do not read it: without auto_reset and ignore_terminations, every episode weighs the same."""
    key = "algorithm.loss_agg_func"
    if not embodied(source):
        return choice(key, {name: name for name in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")})(
            value, source
        )
    unread = "RLinf ignores it in embodied runs"
    if source("env.train.auto_reset") is not False or source("env.train.ignore_terminations"):
        return write({key: value}) if value == "token-mean" else untranslated(unread, {key: "token-mean"})
    by_episode = "without auto_reset every episode weighs the same there"
    if source("algorithm.adv_type") == "gae":
        return untranslated(f"{unread}; {by_episode}", {key: "token-mean"})
    return write({key: "seq-mean-token-mean"}, by_episode)


def _scale(value: Value, source: ForeignConfig) -> Outcome:
    """A correct answer pays scale times reward_max_val (1), a wrong one scale times reward_min_val (-1)."""
    if embodied(source) or source("reward.reward_type") != "math":
        return same("not read") if embodied(source) else untranslated("only for reward_type math")
    low, high = (source.number(f"reward.reward_{name}_val") for name in ("min", "max"))
    key, scale = "algorithm.reward_scaling", number(value)
    values = {"source_min": 0.0, "source_max": 1.0, "target_min": low * scale, "target_max": high * scale}
    return write({f"{key}.{name}": each for name, each in values.items()}, "scores of 0 and 1 become these")


def _reward_setting(value: Value, source: ForeignConfig) -> Outcome:
    if not embodied(source):
        return untranslated("see reward")
    return untranslated(_IMAGE_REWARD) if source("reward.use_reward_model") else same("no reward model")


def _seed(value: Value, source: ForeignConfig) -> Outcome:
    first = source("actor.seed")
    return part_of("runner.seed") if value == first or first is None else untranslated("runner.seed is the seed of all")


def _train_files(value: Value, source: ForeignConfig) -> Outcome:
    train, val = texts(value), texts(source("data.val_data_paths"))
    columns = {"prompt_column": source("data.prompt_key"), "answer_column": source("data.answer_key")}
    kind = "jsonl" if all(path.endswith(".jsonl") for path in train) else "file"
    sources: list[dict[str, Value]] = [
        {"type": kind, "path": path, **columns, **({"val_path": val[index]} if index < len(val) else {})}
        for index, path in enumerate(train)
    ]
    why = "only data.val_size rows of a validation file are used" if val else ""
    if len(sources) == 1:
        return write({f"data.task.{key}": each for key, each in sources[0].items()}, why)
    named = [{"label": PurePath(path).stem, **each} for path, each in zip(train, sources, strict=True)]
    return write({"data.sources": named}, "sources of equal weight here")


def _val_files(value: Value, source: ForeignConfig) -> Outcome:
    if len(texts(value)) != len(texts(source("data.train_data_paths"))):
        return untranslated("as many validation files as training files: pairs here")
    return part_of("data.task")


def _rollout_model(value: Value, source: ForeignConfig) -> Outcome:
    own, why = source("actor.model.model_path"), "the rollout has the actor's weights"
    if embodied(source) or (own and own == value):
        return same(why)
    return write({"actor.model.path": value}) if value and not own else untranslated(why)


def _value_lr(value: Value, source: ForeignConfig) -> Outcome:
    if value is None or value == source("actor.optim.lr"):
        return same("as optim.lr")
    if embodied(source) and not shared_heads(source):
        return same("there is no value head to train")
    return untranslated("one learning rate for policy and value head")


def _equal(other: str, why: str, otherwise: str) -> Rule:
    return lambda value, source: same(why) if value is None or value == source(other) else untranslated(otherwise)


def _schedule(role: str) -> Table:
    """The learning rate of Megatron's workers; optimizer steps there, PPO steps here."""

    def warmup(value: Value, source: ForeignConfig) -> Outcome:
        if not value:
            return same("no warm-up")
        steps = -(-number(value) // _updates(source))
        return write({f"{role}.optim.lr_warmup_steps": steps}, "optimizer steps there, PPO steps here")

    def warmup_share(value: Value, source: ForeignConfig) -> Outcome:
        iterations = number(value or 0) * number(source(f"{role}.lr_sched.lr_decay_iters") or 100_000)
        return warmup(int(iterations), source)

    def decay(value: Value, source: ForeignConfig) -> Outcome:
        if value == "constant":
            return write({f"{role}.optim.lr_schedule": value})
        steps, iterations = source.positive("runner.max_steps"), source(f"{role}.lr_sched.lr_decay_iters")
        if value in ("linear", "cosine") and steps and iterations == steps * _updates(source):
            return write({f"{role}.optim.lr_schedule": value})
        return untranslated("it decays over runner.max_steps here; constant until both are set")

    def by_megatron(rule: Rule) -> Rule:
        key, why = f"{role}.training_backend", "RLinf's FSDP workers do not read lr_sched"
        return while_(lambda source: source(key) == "megatron", rule, why)

    weight_decay = _equal(f"{role}.optim.weight_decay", "constant", "weight decay is constant")
    return {
        "lr_sched.max_lr": _equal(f"{role}.optim.lr", "as optim.lr", "optim.lr decides"),
        "lr_sched.lr_warmup_iters": by_megatron(warmup),
        "lr_sched.lr_warmup_fraction": by_megatron(warmup_share),
        "lr_sched.lr_decay_style": by_megatron(decay),
        "lr_sched.start_weight_decay": weight_decay,
        "lr_sched.end_weight_decay": weight_decay,
    }


def _updates(source: ForeignConfig) -> int | float:
    """Optimizer steps in one of our steps."""
    return number(source("algorithm.n_minibatches") or 1)


def _learner(role: str) -> Table:
    """Returns the rules that actor and critic share."""
    offloaded = [f"{role}.offload_{part}" for part in ("weight", "grad", "optimizer")]

    def precision(value: Value, source: ForeignConfig) -> Outcome:
        """Of the forward pass: FSDP's mixed precision or autocast decide before that of the weights."""
        autocast = f"{role}.fsdp_config.amp_autocast"
        forward = source(f"{role}.fsdp_config.mixed_precision.param_dtype")
        if source(f"{autocast}.enabled"):
            forward = source(f"{autocast}.precision")
        used = forward if forward is not None else value
        if used in ("fp16", "16", "float16"):
            return untranslated(REASONS["no_float16"])
        return dtype(f"{role}.model.dtype")(used, source)

    def betas(value: Value, source: ForeignConfig) -> Outcome:
        return write({f"{role}.optim.betas": [value, source(f"{role}.optim.adam_beta2")]})

    def tokenizer(value: Value, source: ForeignConfig) -> Outcome:
        own = value in [source("actor.model.model_path"), source("rollout.model.model_path")]
        return same("the model's own") if own else write({f"{role}.model.tokenizer": value})

    def offload(_: Value, source: ForeignConfig) -> Outcome:
        any_part = any(source(part) for part in offloaded)
        return write({f"{role}.offload": any_part}, "all parts of a model at once here")

    table: Table = {
        "micro_batch_size": while_(embodied, f"{role}.micro_batch_size", "training_batch_size_per_gpu decides"),
        "global_batch_size": while_(embodied, "data.mini_batch_size", "n_minibatches decides"),
        "model.precision": precision,
        "optim.value_lr": _value_lr,
        "optim.adam_beta1": betas,
        "tokenizer.tokenizer_model": tokenizer,
        **_schedule(role),
    }
    return {f"{role}.{name}": rule for name, rule in table.items()} | dict.fromkeys(offloaded, offload)


def _log_path(value: Value, source: ForeignConfig) -> Outcome:
    name = source("runner.logger.experiment_name")
    if name is None or str(value).endswith(f"/{name}"):
        return write({"runner.output_dir": value})
    return write({"runner.output_dir": f"{value}/{name}"}, "a folder per experiment: a run resumes from its folder")


_HAS_PROJECTS = {"wandb", "swanlab"}
RULES: Table = {
    "runner.task_type": _task_type,
    "runner.max_epochs": _max_epochs,
    "runner.logger.project_name": while_(
        lambda source: not _HAS_PROJECTS.isdisjoint(texts(source("runner.logger.logger_backends"))),
        lacking("the project of wandb is runner.experiment_name"),
        "only wandb and swanlab have projects",
    ),
    "runner.logger.log_path": _log_path,
    "runner.logger.logger_backends": loggers,
    "cluster.component_placement": placement,
    "cluster.node_groups": node_groups,
    "algorithm.n_minibatches": _in_reasoning(_mini_batches),
    "algorithm.loss_type": _loss_type,
    "algorithm.staleness_threshold": _staleness,
    "algorithm.behave_weight_threshold": while_(
        lambda source: source("algorithm.loss_type") == "decoupled_actor_critic",
        _behaviour_weight,
        "only the decoupled loss reads it",
    ),
    "algorithm.importance_sampling_fix": _importance_sampling,
    "algorithm.loss_agg_func": _loss_agg,
    "algorithm.kl_beta": _in_reasoning(_kl_beta),
    "algorithm.reinpp_kl_beta": _in_reasoning(_reinpp_kl),
    "algorithm.kl_penalty_type": _in_reasoning(_kl_type),
    "algorithm.ratio_clip_eps": _ratio,
    "algorithm.clip_ratio_c": _in_reasoning(_dual_clip),
    "algorithm.entropy_bonus": _entropy,
    "algorithm.adv_type": _adv_type,
    "algorithm.normalize_advantages": _normalize,
    "algorithm.sampling_params.max_new_tokens": _response,
    **_learner("actor"),
    **_learner("critic"),
    "critic.seed": _seed,
    "rollout.model.model_path": _rollout_model,
    "rollout.tensor_parallel_size": tensor_parallel,
    "data.seed": _seed,
    "data.train_data_paths": _train_files,
    "data.val_data_paths": _val_files,
    "reward.reward_scale": _scale,
    "reward.*": _reward_setting,
    "weight_syncer.type": while_(
        lambda source: not share_processes(source),
        choice("rollout.sync", {"patch": "delta", "bucket": "full"}),
        "the rollout shares the actor's process, so no weights are sent",
    ),
    **EMBODIED,
    **POLICIES,
}
RLINF = System(
    "rlinf",
    "RLinf",
    ("runner.task_type", "cluster.component_placement*", "runner.logger.*", "algorithm.adv_type", "rollout.model.*"),
    RULES,
    leaves=("cluster.component_placement",),
    stand_ins=stand_ins,
)
