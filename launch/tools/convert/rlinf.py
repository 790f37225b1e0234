"""The keys of RLinf: Hydra YAML of its reasoning and embodied runs."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from rl_platform.launch.tools.convert.conversion import System
from rl_platform.launch.tools.convert.outcome import (
    ARCHITECTURE,
    DTYPES,
    ENGINE,
    EPISODE_REWARD,
    MANY_STEPS,
    NO_STEPS,
    PROFILER,
    ForeignConfig,
    Named,
    Outcome,
    Rule,
    Table,
    choice,
    contained,
    detail,
    details,
    interval,
    lacking,
    loggers,
    off,
    only,
    part_of,
    passed,
    same,
    to,
    top_k,
    untranslated,
    while_,
    write,
)

_UNREAD = "RLinf reads it in reasoning runs only"
_IMAGE_REWARD = "a reward model of images: compute its reward in the environment"
_MOVED = "RLinf reads rollout.sampling_params in embodied runs"
_EMBODIED = "RLinf reads it in embodied runs only"
_MLP = {"type": "mlp", "hidden_sizes": [256, 256, 256], "activation": "tanh", "initial_log_std": -0.5}
_SIMULATOR = "a setting of its simulator; environments here are registered with Gymnasium"
_SIMULATORS, _POLICIES = "simulators.py", "policies.py"  # files that the user writes
_MADE_BY_GYMNASIUM = (None, "maniskill", "maniskill_rlt")  # RLinf calls gymnasium.make(**init_params)
_ELSEWHERE = "evaluation has the environments of training here"


def embodied(source: ForeignConfig) -> bool:
    return source("runner.task_type") == "embodied"


def in_reasoning(rule: str | Rule) -> Rule:
    return while_(lambda source: not embodied(source), rule, _UNREAD)


def in_embodied(rule: str | Rule) -> Rule:
    return while_(embodied, rule, _EMBODIED)


def _task_type(value: Any, _: ForeignConfig) -> Outcome:
    values = {"runner.task_type": value}
    if value == "embodied":
        return write(
            {**values, "env.normalize_observations": False, "env.normalize_rewards": False},
            "observations and rewards are not normalised there",
        )
    return write(values) if value == "reasoning" else untranslated("only embodied and reasoning runs")


def _max_epochs(value: Any, source: ForeignConfig) -> Outcome:
    steps = source("runner.max_steps") or -1
    if embodied(source):
        return write({"runner.max_steps": min(value, steps) if steps > 0 else value}, "an epoch there is a step")
    if steps > 0:
        return write({"runner.max_epochs": value, "runner.max_steps": steps})
    return write({"runner.max_epochs": value, "runner.max_steps": MANY_STEPS}, NO_STEPS)


def _placement(value: Any, source: ForeignConfig) -> Outcome:
    """The grammar is ours. The reference, which RLinf computes inside the actor, joins it where a KL needs it."""
    if not isinstance(value, dict):
        return untranslated("a mapping of components to resources")
    with_kl = not embodied(source) and (
        (source("algorithm.kl_beta") or 0) > 0 or (source("algorithm.reinpp_kl_beta") or 0) > 0
    )
    known, lost, placed = ("actor", "critic", "rollout", "reward", "env"), [], {}
    for names, place in value.items():
        kept = [name.strip() for name in str(names).split(",")]
        lost += [name for name in kept if name not in known and name != "inference"]
        kept = [name for name in kept if name in known]
        if embodied(source):
            kept = [
                "actor_critic" if name == "actor" and _shared(source) else name for name in kept if name != "reward"
            ]
        if with_kl and "actor" in kept:
            kept.append("reference")
        if kept:
            placed[",".join(kept)] = str(place) if isinstance(place, int) else place
    if not embodied(source) and not any("reward" in names.split(",") for names in placed):
        placed = {
            f"{names},reward" if "rollout" in names.split(",") else names: place for names, place in placed.items()
        }
    if lost:
        return untranslated(f"no component {', '.join(lost)} here", {"cluster.component_placement": placed})
    return write({"cluster.component_placement": placed})


def _shared(source: ForeignConfig) -> bool:
    return source("algorithm.loss_type") in ("actor_critic", "decoupled_actor_critic")


def _share_processes(source: ForeignConfig) -> bool:
    """True if actor and rollout are in one key of the placement."""
    places = source("cluster.component_placement")
    keys = [{name.strip() for name in str(names).split(",")} for names in places] if isinstance(places, dict) else []
    return any({"actor", "rollout"} <= names for names in keys)


def _tensor_parallel(value: Any, source: ForeignConfig) -> Outcome:
    places = source("cluster.component_placement") or {}
    if value in (None, 1):
        return same("one GPU per rollout rank")
    alone = [str(place) for names, place in places.items() if "rollout" in str(names)]
    if alone and ":" in alone[0]:
        return part_of("cluster.component_placement")
    return untranslated(
        f"ranks of {value} GPUs: give the rollout a key of its own, such as rollout: 0-7:0-{8 // value - 1}"
    )


def _adv_type(value: Any, source: ForeignConfig) -> Outcome:
    names = {"gae": "gae", "grpo": "grpo", "raw": "raw"}
    baseline = source("algorithm.use_reinpp_baseline")
    names["reinpp"] = "reinforce_plus_plus_baseline" if baseline else "reinforce_plus_plus"
    return choice("algorithm.adv_type", names)(value, source)


def _normalize(value: Any, source: ForeignConfig) -> Outcome:
    kind = source("algorithm.adv_type")
    if kind == "gae":
        if embodied(source) and value is False:
            return untranslated("RLinf whitens in every embodied GAE run", {"algorithm.normalize_advantages": True})
        return write({"algorithm.normalize_advantages": value})
    if kind == "grpo" and value and not embodied(source):
        return untranslated("group advantages are not whitened over the batch again")
    return same(f"{kind} decides")


def _mini_batches(value: Any, source: ForeignConfig) -> Outcome:
    rows = source("data.rollout_batch_size") * source("algorithm.group_size")
    return write({"data.mini_batch_size": rows // value}, f"{rows} sequences in {value} mini-batches")


def _dynamic(source: ForeignConfig) -> bool:
    return bool(source("runner.enable_dynamic_batch_size"))


def _micro(value: Any, source: ForeignConfig) -> Outcome:
    if _dynamic(source):
        return same("enable_dynamic_batch_size is true: the token budget limits micro-batches")
    critic = {"critic.micro_batch_size": value} if source("critic.use_critic_model") else {}
    return write({"actor.micro_batch_size": value, **critic})


def _tokens(value: Any, source: ForeignConfig) -> Outcome:
    if not _dynamic(source):
        return same("enable_dynamic_batch_size is false")
    critic = {"critic.max_tokens_per_micro_batch": value} if source("critic.use_critic_model") else {}
    return write({"actor.max_tokens_per_micro_batch": value, **critic})


def _response(value: Any, source: ForeignConfig) -> Outcome:
    if embodied(source):
        return same(_UNREAD)
    room = (source("runner.seq_length") or value + source("data.max_prompt_length")) - source("data.max_prompt_length")
    return write(
        {"data.max_response_length": min(value, room)}, "" if value <= room else "what runner.seq_length leaves"
    )


def _ratio(value: Any, source: ForeignConfig) -> Outcome:
    sides = {side: source(f"algorithm.clip_ratio_{side}") for side in ("low", "high")}
    unset = {f"algorithm.clip_ratio_{side}": value for side, each in sides.items() if each is None}
    return write(unset) if unset else same("clip_ratio_low and clip_ratio_high decide")


def _dual_clip(value: Any, source: ForeignConfig) -> Outcome:
    if "algorithm.clip_ratio_c" not in source.given and source("actor.training_backend") != "fsdp":
        return same("off by default with Megatron")
    return write({"algorithm.clip_ratio_c": value})


def _kl_beta(value: Any, _: ForeignConfig) -> Outcome:
    if not value:
        return same("no KL term")
    return write({"algorithm.use_kl_loss": True, "algorithm.kl_loss_coef": value}, "a term of the loss")


def _reinpp_kl(value: Any, source: ForeignConfig) -> Outcome:
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


def _kl_type(value: Any, source: ForeignConfig) -> Outcome:
    if not (source("algorithm.kl_beta") or 0) > 0:
        return same("no KL term")
    bound = {"algorithm.kl_loss_output_clip": 10.0} if value in ("k3", "low_var_kl") else {}
    return write({"algorithm.kl_loss_type": value, **bound})


def _entropy(value: Any, source: ForeignConfig) -> Outcome:
    if value and not embodied(source) and not source("algorithm.calculate_entropy"):
        return untranslated("RLinf ignores it while calculate_entropy is false")
    return write({"algorithm.entropy_bonus": value})


def _warmup_steps(value: Any, _: ForeignConfig) -> Outcome:
    return write({"algorithm.policy_training_start_step": value}) if value else same("no warm-up")


def _staleness(value: Any, source: ForeignConfig) -> Outcome:
    """The decoupled loss multiplies the clipped loss by pi_old / pi_rollout, where pi_old is the newest policy."""
    if not value:
        return same("off there")
    values: dict[str, Any] = {"runner.max_staleness": 1}
    if source("algorithm.loss_type") == "decoupled_actor_critic":
        high = source("algorithm.behave_weight_threshold")
        mode = "truncate" if high is None else "icepop"
        values |= {f"algorithm.rollout_is.{key}": each for key, each in (("level", "token"), ("mode", mode))}
        values["algorithm.rollout_is.high"] = high
    if value > 1:
        return untranslated(f"rollouts are at most one update old here, {value} there", values)
    return write(values, "old log-probs are recomputed here, approximated there")


def _behaviour_weight(value: Any, source: ForeignConfig) -> Outcome:
    return part_of("algorithm.rollout_is") if source("algorithm.staleness_threshold") else same("no stale rollouts")


def _loss_agg(value: Any, source: ForeignConfig) -> Outcome:
    if not embodied(source):
        return choice(
            "algorithm.loss_agg_func",
            {name: name for name in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")},
        )(value, source)
    if value != "token-mean" or source("env.train.auto_reset") is False:
        why = "RLinf ignores it in embodied runs; without auto_reset every episode weighs the same there"
        return untranslated(why, {"algorithm.loss_agg_func": "token-mean"})
    return write({"algorithm.loss_agg_func": value})


def _scale(value: Any, source: ForeignConfig) -> Outcome:
    """A correct answer pays scale times reward_max_val (1), a wrong one scale times reward_min_val (-1)."""
    if embodied(source) or source("reward.reward_type") != "math":
        return same("not read") if embodied(source) else untranslated("only for reward_type math")
    low, high = (source(f"reward.reward_{name}_val") for name in ("min", "max"))
    key = "algorithm.reward_scaling"
    return write(
        {
            f"{key}.source_min": 0.0,
            f"{key}.source_max": 1.0,
            f"{key}.target_min": low * value,
            f"{key}.target_max": high * value,
        },
        "scores of 0 and 1 become these",
    )


def _reward_type(value: Any, source: ForeignConfig) -> Outcome:
    if embodied(source):
        return same(_UNREAD)
    return choice("reward.type", {"math": "math_verify"})(value, source)


def _reward_setting(value: Any, source: ForeignConfig) -> Outcome:
    if not embodied(source):
        return untranslated("see reward")
    return untranslated(_IMAGE_REWARD) if source("reward.use_reward_model") else same("no reward model")


def _seed(value: Any, source: ForeignConfig) -> Outcome:
    first = source("actor.seed")
    return part_of("runner.seed") if value == first or first is None else untranslated("runner.seed is the seed of all")


def _train_files(value: Any, source: ForeignConfig) -> Outcome:
    train, val = _listed(value), _listed(source("data.val_data_paths"))
    columns = {"prompt_column": source("data.prompt_key"), "answer_column": source("data.answer_key")}
    kind = "jsonl" if all(path.endswith(".jsonl") for path in train) else "file"
    sources = [{"type": kind, "path": path, **columns} for path in train]
    for each, path in zip(sources, val, strict=False):
        each["val_path"] = path
    why = "only data.val_size rows of a validation file are used" if val else ""
    if len(sources) == 1:
        return write({f"data.task.{key}": each for key, each in sources[0].items()}, why)
    named = [{"label": f"{PurePath(path).stem}", **each} for path, each in zip(train, sources, strict=True)]
    return write({"data.sources": named}, "sources of equal weight here")


def _listed(value: Any) -> list[str]:
    return [] if value is None else [str(path) for path in (value if isinstance(value, list) else [value])]


def _val_files(value: Any, source: ForeignConfig) -> Outcome:
    if len(_listed(value)) != len(_listed(source("data.train_data_paths"))):
        return untranslated("as many validation files as training files: pairs here")
    return part_of("data.task")


def _rollout_steps(value: Any, source: ForeignConfig) -> Outcome:
    epochs = source("env.train.rollout_epoch") or 1
    why = f"{epochs} rollouts of {value} steps as one; episodes go on between them" if epochs > 1 else ""
    if epochs > 1 and value == source("env.train.max_episode_steps"):
        why = f"{epochs} rollouts of {value} steps, each a whole episode at most"
    return write({"env.rollout_steps": value * epochs}, why)


def _auto_reset(value: Any, source: ForeignConfig) -> Outcome:
    if value or source("algorithm.adv_type") != "gae":
        return same("episodes restart at once with GAE; other estimators play whole episodes")
    return untranslated("an environment waits there until the rollout ends; here its next episode begins at once")


def _eval_episodes(value: Any, source: ForeignConfig) -> Outcome:
    return write({"env.evaluation.episodes": value * (source("env.eval.rollout_epoch") or 1)})


def _own_policy(source: ForeignConfig) -> bool:
    """True if the policy is a network that this platform does not have."""
    return embodied(source) and source("actor.model.model_type") not in (None, "mlp_policy")


def _class_name(kind: str) -> str:
    return "".join(part[:1].upper() + part[1:] for part in kind.split("_"))


def _of_policy(key: str, otherwise: Rule) -> Rule:
    """A setting of the policy network: with a network that the user writes, an argument of its constructor."""
    name = key.removeprefix("actor.model.").removeprefix("rollout.sampling_params.").removeprefix("rollout.")

    def rule(value: Any, source: ForeignConfig) -> Outcome:
        if not _own_policy(source):
            return otherwise(value, source)
        if value is None:
            return same("not set")
        why = f"an argument of {_class_name(source('actor.model.model_type'))} in {_POLICIES}"
        return passed(f"actor.model.kwargs.{name}", value, why)

    return rule


def _sampling(key: str) -> Rule:
    """Sampling of action tokens, which only some of RLinf's vision-language-action models have."""
    neutral = {"top_k": (-1, 0), "top_p": (1, 1.0), "repetition_penalty": (1, 1.0), "add_BOS": (False,)}
    lost = while_(embodied, lacking("action heads have no sampling parameters"), _EMBODIED)
    argument = _of_policy(key, lost)
    unchanged = neutral.get(key.rpartition(".")[2], ())
    return lambda value, source: (
        same("off there") if embodied(source) and value in unchanged else argument(value, source)
    )


def _model_type(role: str) -> Rule:
    def rule(value: Any, source: ForeignConfig) -> Outcome:
        if not embodied(source):
            return same(ARCHITECTURE)
        if value == "mlp_policy" and role == "actor":
            why = "RLinf's value network is separate; here it is a head on the same layers"
            return write({f"actor.model.{key}": each for key, each in _MLP.items()}, why)
        if role != "actor":
            return untranslated(f"{value} is another architecture: see actor.model.type")
        name = _class_name(value)
        return untranslated(
            f"another architecture: write it as the class {name} in {_POLICIES}",
            {"actor.model.type": f"{_POLICIES}:{name}"},
        )

    return rule


def _model_path(value: Any, source: ForeignConfig) -> Outcome:
    if embodied(source) and source("actor.model.model_type") == "mlp_policy":
        return same("a random network") if not value else untranslated("policies start with random weights")
    return write({"actor.model.path": value}) if value else same("not set")


def _rollout_model(value: Any, source: ForeignConfig) -> Outcome:
    own = source("actor.model.model_path")
    if embodied(source) or (own and own == value):
        return same("the rollout has the actor's weights")
    return (
        write({"actor.model.path": value}) if value and not own else untranslated("the rollout has the actor's weights")
    )


def _precision(role: str) -> Rule:
    """The precision of the forward pass: FSDP's mixed precision or autocast decide before that of the weights."""

    def rule(value: Any, source: ForeignConfig) -> Outcome:
        autocast = f"{role}.fsdp_config.amp_autocast"
        forward = source(f"{role}.fsdp_config.mixed_precision.param_dtype")
        if source(f"{autocast}.enabled"):
            forward = source(f"{autocast}.precision")
        used = forward if forward is not None else value
        if used in ("fp16", "16", "float16"):
            return untranslated("float16 is not supported: bfloat16 or float32")
        return choice(f"{role}.model.dtype", DTYPES)(used, source)

    return rule


def _value_lr(value: Any, source: ForeignConfig) -> Outcome:
    if value is None or value == source("actor.optim.lr"):
        return same("as optim.lr")
    if embodied(source) and not _shared(source):
        return same("there is no value head to train")
    return untranslated("one learning rate for policy and value head")


def _beta1(role: str) -> Rule:
    return lambda value, source: write({f"{role}.optim.betas": [value, source(f"{role}.optim.adam_beta2")]})


def _by_megatron(role: str, rule: Rule) -> Rule:
    return while_(
        lambda source: source(f"{role}.training_backend") == "megatron",
        rule,
        "RLinf's FSDP workers do not read lr_sched",
    )


def _warmup(role: str) -> Rule:
    def rule(value: Any, source: ForeignConfig) -> Outcome:
        if not value:
            return same("no warm-up")
        steps = -(-value // (source("algorithm.n_minibatches") or 1))
        return write({f"{role}.optim.lr_warmup_steps": steps}, "optimizer steps there, PPO steps here")

    return rule


def _warmup_fraction(role: str) -> Rule:
    def rule(value: Any, source: ForeignConfig) -> Outcome:
        iterations = (value or 0) * (source(f"{role}.lr_sched.lr_decay_iters") or 100_000)
        return _warmup(role)(int(iterations), source)

    return rule


def _decay(role: str) -> Rule:
    def rule(value: Any, source: ForeignConfig) -> Outcome:
        if value == "constant":
            return write({f"{role}.optim.lr_schedule": value})
        steps, updates = source("runner.max_steps") or -1, source("algorithm.n_minibatches") or 1
        if value in ("linear", "cosine") and steps > 0 and source(f"{role}.lr_sched.lr_decay_iters") == steps * updates:
            return write({f"{role}.optim.lr_schedule": value})
        return untranslated("it decays over runner.max_steps here; constant until both are set")

    return rule


def _if_schedule(role: str, rule: str) -> Rule:
    return while_(
        lambda source: source(f"{role}.lr_sched.lr_decay_style") not in (None, "constant"), rule, "the rate is constant"
    )


def _equal(other: str, why: str, otherwise: str) -> Rule:
    return lambda value, source: same(why) if value is None or value == source(other) else untranslated(otherwise)


def _tokenizer(role: str) -> Rule:
    def rule(value: Any, source: ForeignConfig) -> Outcome:
        paths = [source("actor.model.model_path"), source("rollout.model.model_path")]
        return same("the model's own") if value in paths else write({f"{role}.model.tokenizer": value})

    return rule


def _offload(role: str) -> Rule:
    names = ("weight", "grad", "optimizer")

    def rule(_: Any, source: ForeignConfig) -> Outcome:
        parts = [source(f"{role}.offload_{name}") for name in names]
        return write({f"{role}.offload": any(parts)}, "all parts of a model at once here")

    return rule


def _checkpointing(role: str) -> Rule:
    written = to(f"{role}.gradient_checkpointing")
    return lambda value, source: (
        untranslated("a network of yours recomputes its layers itself")
        if value and _own_policy(source)
        else written(value, source)
    )


def _lora(role: str, name: str) -> Rule:
    return while_(lambda source: bool(source(f"{role}.model.is_lora")), f"{role}.lora.{name}", "is_lora is false")


def _engine_of(name: str, argument: str | None) -> Rule:
    used: Rule = to(f"rollout.engine_args.{argument}") if argument else lacking("give it as rollout.engine_args")
    return while_(lambda source: source("rollout.rollout_backend") == name, used, f"the engine is not {name}")


_READ_FROM_MODEL = (
    "activation normalization position_embedding_type add_bias_linear attention_dropout hidden_dropout "
    "attn_implementation use_proprio image_size trust_remote_code"
)


def _learner(role: str) -> Table:
    """The keys that actor and critic share."""
    section: Table = {
        "group_name": f"{role}.group_name",
        "training_backend": choice(f"{role}.training_backend", {"megatron": "megatron", "fsdp": "fsdp"}),
        "seed": to("runner.seed") if role == "actor" else _seed,
        "enable_offload": f"{role}.offload",
        **{f"offload_{part}": _offload(role) for part in ("weight", "grad", "optimizer")},
        "enable_dp_load_balance": f"{role}.balance",
        "micro_batch_size": while_(embodied, f"{role}.micro_batch_size", "training_batch_size_per_gpu decides"),
        "global_batch_size": while_(embodied, "data.mini_batch_size", "n_minibatches decides"),
        "calculate_flops": detail("FLOPs are measured from the model's shape"),
        "model.precision": _precision(role),
        "model.tensor_model_parallel_size": f"{role}.parallel.tensor",
        "model.pipeline_model_parallel_size": f"{role}.parallel.pipeline",
        "model.sequence_parallel": f"{role}.parallel.sequence",
        "model.expert_model_parallel_size": f"{role}.parallel.expert",
        "model.context_parallel_size": f"{role}.parallel.context",
        "model.recompute_granularity": choice(
            f"{role}.gradient_checkpointing", {"full": True, "selective": True}, "every layer is recomputed"
        ),
        "model.recompute_*": detail("every layer is recomputed"),
        "model.seq_length": contained("data.max_response_length"),
        "model.encoder_seq_length": contained("data.max_response_length"),
        "model.model_type": _model_type(role),
        "model.is_lora": contained(f"{role}.lora"),
        "model.lora_rank": _lora(role, "rank"),
        "model.lora_path": off("adapters start at zero"),
        "optim.lr": f"{role}.optim.lr",
        "optim.value_lr": _value_lr,
        "optim.adam_beta1": _beta1(role),
        "optim.adam_beta2": contained(f"{role}.optim.betas"),
        "optim.adam_eps": f"{role}.optim.eps",
        "optim.weight_decay": f"{role}.optim.weight_decay",
        "optim.clip_grad": f"{role}.optim.clip_grad",
        "optim.min_lr": detail("lr_sched.min_lr decides"),
        "optim.optimizer": only("adam", "adamw", why="AdamW", otherwise="AdamW is the only optimizer"),
        "optim.bf16": contained(f"{role}.model.dtype"),
        "optim.fp16": off("float16 is not supported: bfloat16 or float32"),
        "optim.loss_scale": detail("for float16 only"),
        "optim.critic_warmup_steps": off("an embodied policy and its value head train together"),
        "lr_sched.max_lr": _equal(f"{role}.optim.lr", "as optim.lr", "optim.lr decides"),
        "lr_sched.min_lr": _if_schedule(role, f"{role}.optim.min_lr"),
        "lr_sched.lr_warmup_init": only(0, None, why="it starts at 0", otherwise="a warm-up starts at 0"),
        "lr_sched.lr_warmup_iters": _by_megatron(role, _warmup(role)),
        "lr_sched.lr_warmup_fraction": _by_megatron(role, _warmup_fraction(role)),
        "lr_sched.lr_decay_style": _by_megatron(role, _decay(role)),
        "lr_sched.lr_decay_iters": detail("the schedule ends with the run"),
        "lr_sched.start_weight_decay": _equal(f"{role}.optim.weight_decay", "constant", "weight decay is constant"),
        "lr_sched.end_weight_decay": _equal(f"{role}.optim.weight_decay", "constant", "weight decay is constant"),
        "lr_sched.weight_decay_incr_style": only("constant", why="constant", otherwise="weight decay is constant"),
        "tokenizer.tokenizer_model": _tokenizer(role),
        "tokenizer.use_fast": detail("how a tokenizer is loaded"),
        "tokenizer.trust_remote_code": detail("code of a model is never run; its family is built in"),
        "tokenizer.padding_side": detail("sequences are packed without padding"),
        "fsdp_config.strategy": only("fsdp", "fsdp2", why="FSDP2", otherwise="fsdp or megatron"),
        "fsdp_config.gradient_checkpointing": _checkpointing(role),
        "fsdp_config.cpu_offload": f"{role}.cpu_offload",
        "fsdp_config.mixed_precision.param_dtype": contained(f"{role}.model.dtype"),
        "fsdp_config.mixed_precision.*": detail("gradients are reduced in float32"),
        "fsdp_config.amp_autocast.*": contained(f"{role}.model.dtype"),
        "fsdp_config.grad_scaler.*": detail("for float16 only"),
        "fsdp_config.*": detail(ENGINE),
        "megatron.profiler.*": detail(PROFILER),
        "megatron.use_profiler": detail(PROFILER),
        "megatron.ckpt_convertor.*": detail("weights are read from the Hugging Face folder"),
        "megatron.*": detail(ENGINE),
        "mcore_gpt": detail(ARCHITECTURE),
        "spec_name": detail(ARCHITECTURE),
    }
    table = {f"{role}.{name}": rule for name, rule in section.items()}
    table |= details(
        f"{role}.model",
        _READ_FROM_MODEL,
        ARCHITECTURE,
    )
    table |= details(
        f"{role}.model",
        "apply_rope_fusion bias_dropout_fusion persist_layer_norm bias_activation_fusion batch_p2p_comm "
        "variable_seq_lengths gradient_accumulation_fusion moe_token_dispatcher_type use_cpu_initialization "
        "attention_softmax_in_fp32 moe_grouped_gemm moe_permute_fusion moe_router_dtype megatron_checkpoint "
        "low_cpu_mem_usage",
        ENGINE,
    )
    return table | details(
        f"{role}.optim",
        "use_distributed_optimizer overlap_grad_reduce overlap_param_gather optimizer_enable_pin "
        "overlap_param_gather_with_optimizer_step",
        ENGINE,
    )


def _own_simulator(source: ForeignConfig) -> bool:
    """True if RLinf steps the simulator by a class of its own, and not by gymnasium.make."""
    kind = source("env.train.env_type")
    return kind is not None and (kind not in _MADE_BY_GYMNASIUM or source("env.train.init_params.id") is None)


def _env_type(value: Any, source: ForeignConfig) -> Outcome:
    if not _own_simulator(source):
        return untranslated("its simulators are not part of this platform: register a single environment as env.id")
    why = f"a simulator: write the function {value} in {_SIMULATORS}, which returns one Gymnasium environment"
    return untranslated(why, {"env.id": f"{_SIMULATORS}:{value}"})


def _of_simulator(key: str, otherwise: Rule) -> Rule:
    """A setting of the simulator that has no key here: an argument of the user's function, if there is one."""
    name = key.removeprefix("env.train.").removeprefix("init_params.")

    def rule(value: Any, source: ForeignConfig) -> Outcome:
        outcome = otherwise(value, source)
        if outcome.status != "untranslated" or not _own_simulator(source):
            return outcome
        return passed(f"env.kwargs.{name}", value, f"an argument of {source('env.train.env_type')} in {_SIMULATORS}")

    return rule


def _init_param(key: str) -> Rule:
    """RLinf passes `init_params` to gymnasium.make, or its class of the simulator reads them."""
    name = key.removeprefix("env.train.init_params.")

    def rule(value: Any, source: ForeignConfig) -> Outcome:
        if value is None:
            return same("not set")
        made = source("env.train.init_params.id") is not None and not _own_simulator(source)
        return write({f"env.kwargs.{name}": value}) if made else untranslated(_SIMULATOR)

    return _of_simulator(key, rule)


def _env_id(value: Any, source: ForeignConfig) -> Outcome:
    if _own_simulator(source):
        return passed("env.kwargs.id", value, f"an argument of {source('env.train.env_type')} in {_SIMULATORS}")
    return to("env.id", why="it must be registered with Gymnasium")(value, source)


def _in_evaluation(name: str, rule: Rule) -> Rule:
    """A key of the evaluation that repeats the training's says nothing new: both share their environments here."""

    def evaluated(value: Any, source: ForeignConfig) -> Outcome:
        outcome = rule(value, source)
        key = f"env.train.{name}"
        lost = outcome.status == "untranslated"
        return same("as in training") if lost and key in source.given and source(key) == value else outcome

    return evaluated


def _differs(value: Any, _: ForeignConfig) -> Outcome:
    return same("not set") if value is None else untranslated(_ELSEWHERE)


def _environment(role: str) -> Table:
    """The keys of training and evaluation environments that are no sizes."""
    section: dict[str, Rule] = {
        "ignore_terminations": off("an episode ends where it terminates"),
        "group_size": contained("algorithm.group_size"),
        "seed": detail("runner.seed and env.evaluation.seed"),
        "reward_coef": only(1, 1.0, None, why="rewards as they are", otherwise=EPISODE_REWARD),
        "use_rel_reward": off(EPISODE_REWARD),
        "reward_mode": only("raw", None, why="rewards as they are", otherwise=EPISODE_REWARD),
        "use_fixed_reset_state_ids": lambda value, source: (
            same("groups begin in one state; other resets are random")
            if not value or (source("algorithm.group_size") or 1) > 1 or role == "eval"
            else untranslated("resets are random")
        ),
        "use_ordered_reset_state_ids": off("resets are random"),
        "enable_offload": detail(ENGINE),
        "video_cfg.info_on_video": detail("videos have no text"),
        "video_cfg.video_base_dir": detail("videos are in the output folder"),
        "is_eval": detail("evaluation has environments of its own"),
        "init_params.num_envs": contained("env.num_envs"),
        "init_params.max_episode_steps": contained("env.max_episode_steps"),
        "data_collection.*": while_(
            lambda source: bool(source(f"env.{role}.data_collection.enabled")),
            lacking("collected episodes are not stored"),
            "data_collection.enabled is false",
        ),
        "video_cfg.fps": lacking("there is no key for the frame rate of videos"),
        "wrap_obs_mode": detail("observations are those of the environment"),
        "use_full_state": detail("observations are those of the environment"),
    }
    if role == "eval":
        return {
            **{f"env.eval.{name}": _in_evaluation(name, rule) for name, rule in section.items()},
            "env.eval.*": Named(lambda key: _in_evaluation(key.removeprefix("env.eval."), _differs)),
        }
    settings = ("ignore_terminations", "reward_coef", "use_rel_reward", "reward_mode", "use_fixed_reset_state_ids")
    return {
        "env.train.env_type": _env_type,
        **{
            f"env.train.{name}": _of_simulator(f"env.train.{name}", rule)
            if name in (*settings, "use_ordered_reset_state_ids")
            else rule
            for name, rule in section.items()
        },
        "env.train.init_params.*": Named(_init_param),
        "env.train.*": Named(lambda key: _of_simulator(key, _no_setting)),
    }


def _no_setting(value: Any, _: ForeignConfig) -> Outcome:
    return same("not set") if value is None else untranslated("a setting of RLinf's environments")


TABLE: Table = {
    "runner.task_type": _task_type,
    "runner.max_epochs": _max_epochs,
    "runner.max_steps": contained("runner.max_steps"),
    "runner.val_check_interval": interval("runner.val_check_interval"),
    "runner.save_interval": interval("runner.save_interval"),
    "runner.experiment_name": "runner.experiment_name",
    "runner.output_dir": contained("runner.output_dir"),
    "runner.logger.project_name": while_(
        lambda source: bool({"wandb", "swanlab"} & {*_listed(source("runner.logger.logger_backends"))}),
        lacking("the project of wandb is runner.experiment_name"),
        "only wandb and swanlab have projects",
    ),
    "runner.logger.logger_backends": loggers("runner.logger_backends"),
    "runner.seq_length": contained("data.max_response_length"),
    "runner.enable_dynamic_batch_size": contained("actor.max_tokens_per_micro_batch"),
    "runner.max_tokens_per_mbs": _tokens,
    "runner.max_prompt_length": detail("RLinf reads data.max_prompt_length"),
    "runner.weight_sync_interval": only(1, None, why="every step", otherwise="weights are sent after every step"),
    "runner.per_worker_log": off("all ranks log into one file"),
    "runner.ckpt_path": off("runner.resume names a checkpoint"),
    "runner.only_eval": off("platform-launch --eval CHECKPOINT"),
    "runner.use_training_pipeline": detail("training and collection overlap by the placement"),
    "cluster.num_nodes": "cluster.num_nodes",
    "cluster.component_placement": _placement,
    "cluster.node_groups*": lacking("see cluster.node_groups: label, node_ranks, env_vars, accelerators"),
    "algorithm.group_size": "algorithm.group_size",
    "algorithm.n_minibatches": in_reasoning(_mini_batches),
    "algorithm.training_batch_size_per_gpu": _micro,
    "algorithm.rollout_batch_size_per_gpu": detail("prompts are divided evenly over the ranks"),
    "algorithm.val_rollout_batch_size_per_gpu": detail("all questions of a validation are generated at once"),
    "algorithm.logprob_forward_micro_batch_size": while_(
        lambda source: not _dynamic(source),
        "algorithm.logprob_forward_micro_batch_size",
        "enable_dynamic_batch_size is true",
    ),
    "algorithm.recompute_logprobs": choice("algorithm.old_log_probs", {True: "recompute", False: "rollout"}),
    "algorithm.importance_sampling_fix": off("see algorithm.rollout_is"),
    "algorithm.critic_warmup_steps": in_reasoning(_warmup_steps),
    "algorithm.loss_type": choice(
        "algorithm.loss_type",
        {"actor": "actor", "actor_critic": "actor_critic", "decoupled_actor_critic": "actor_critic"},
    ),
    "algorithm.staleness_threshold": _staleness,
    "algorithm.behave_weight_threshold": while_(
        lambda source: source("algorithm.loss_type") == "decoupled_actor_critic",
        _behaviour_weight,
        "only the decoupled loss reads it",
    ),
    "algorithm.loss_agg_func": _loss_agg,
    "algorithm.kl_beta": in_reasoning(_kl_beta),
    "algorithm.reinpp_kl_beta": in_reasoning(_reinpp_kl),
    "algorithm.kl_penalty_type": in_reasoning(_kl_type),
    "algorithm.kl_penalty": while_(lambda source: not embodied(source), lacking("see kl_penalty_type"), _UNREAD),
    "algorithm.ratio_clip_eps": _ratio,
    "algorithm.clip_ratio_low": "algorithm.clip_ratio_low",
    "algorithm.clip_ratio_high": "algorithm.clip_ratio_high",
    "algorithm.clip_ratio_c": in_reasoning(_dual_clip),
    "algorithm.entropy_bonus": _entropy,
    "algorithm.calculate_entropy": contained("algorithm.entropy_bonus", "the entropy is always measured"),
    "algorithm.adv_type": _adv_type,
    "algorithm.use_reinpp_baseline": contained("algorithm.adv_type"),
    "algorithm.gamma": "algorithm.gamma",
    "algorithm.gae_lambda": "algorithm.gae_lambda",
    "algorithm.normalize_advantages": _normalize,
    "algorithm.early_stop_imp_ratio": off(
        "it drops micro-batches with a large ratio; algorithm.target_kl ends an update"
    ),
    "algorithm.use_valid_token_scale": off("see algorithm.loss_agg_func"),
    "algorithm.max_num_gen_batches": only(
        1, None, why="no dynamic sampling", otherwise="see algorithm.dynamic_sampling"
    ),
    "algorithm.sampling_params.do_sample": only(True, why="responses are sampled", otherwise="sampling.temperature: 0"),
    "algorithm.sampling_params.temperature": in_reasoning("rollout.sampling.temperature"),
    "algorithm.sampling_params.top_p": in_reasoning("rollout.sampling.top_p"),
    "algorithm.sampling_params.top_k": in_reasoning(top_k("rollout.sampling.top_k")),
    "algorithm.sampling_params.repetition_penalty": only(1, None, why="none", otherwise="there is no penalty"),
    "algorithm.sampling_params.max_new_tokens": _response,
    "algorithm.sampling_params.min_new_tokens": only(0, 1, None, why="a response has a token", otherwise="no minimum"),
    "rollout.sampling_params.do_sample": only(True, why="actions are sampled", otherwise="actions are sampled"),
    "rollout.sampling_params.*": Named(_sampling),
    "rollout.unnorm_key": _of_policy("rollout.unnorm_key", lacking("a setting of its policy networks")),
    "rollout.recompute_logprobs": detail("RLinf reads algorithm.recompute_logprobs"),
    "algorithm.update_epoch": in_embodied("algorithm.ppo_epochs"),
    **{
        f"algorithm.{name}": in_embodied(f"algorithm.{name}")
        for name in ("reward_type", "logprob_type", "entropy_type", "bootstrap_type", "value_clip", "huber_delta")
    },
    "algorithm.reward_coef": detail("RLinf reads env.train.reward_coef"),
    "algorithm.sampling_params.*": while_(lambda source: not embodied(source), lacking("see rollout.sampling"), _MOVED),
    "algorithm.length_params.*": while_(lambda source: not embodied(source), lacking("see data"), _MOVED),
    "algorithm.filter_rewards": off(EPISODE_REWARD),
    "algorithm.rewards_*_bound": while_(
        lambda source: bool(source("algorithm.filter_rewards")), lacking(EPISODE_REWARD), "filter_rewards is off"
    ),
    "algorithm.rollout_epoch": contained("env.rollout_steps"),
    "env.group_name": "env.group_name",
    "env.train.rollout_epoch": contained("env.rollout_steps"),
    "env.train.max_steps_per_rollout_epoch": _rollout_steps,
    "env.train.total_num_envs": "env.num_envs",
    "env.train.max_episode_steps": "env.max_episode_steps",
    "env.train.auto_reset": _auto_reset,
    "env.train.init_params.id": _env_id,
    "env.train.video_cfg.save_video": off("videos show evaluations"),
    "env.eval.video_cfg.save_video": "env.evaluation.video",
    "env.eval.rollout_epoch": contained("env.evaluation.episodes"),
    "env.eval.total_num_envs": _eval_episodes,
    "env.eval.max_episode_steps": _equal("env.train.max_episode_steps", "as in training", "as in training here"),
    "env.eval.max_steps_per_rollout_epoch": detail("an evaluation lasts until its episodes end"),
    "env.eval.auto_reset": detail("an evaluation lasts until its episodes end"),
    "env.eval.env_type": _in_evaluation("env_type", _differs),
    "env.eval.init_params.id": _equal("env.train.init_params.id", "as in training", "as in training here"),
    **_environment("train"),
    **_environment("eval"),
    "env.enable_offload": detail(ENGINE),
    "env.data_collection.*": off("collected episodes are not stored"),
    **_learner("actor"),
    **_learner("critic"),
    "actor.model.model_path": _of_policy("actor.model.model_path", _model_path),
    "actor.model.num_action_chunks": "actor.model.num_action_chunks",
    "actor.model.add_value_head": contained("algorithm.loss_type"),
    **details("actor.model", "obs_dim action_dim state_dim", "read from the environment's spaces"),
    **{
        f"actor.model.{name}": _of_policy(f"actor.model.{name}", rule)
        for name, rule in {
            "policy_setup": detail("read from the environment's spaces"),
            "hidden_dim": detail("RLinf's MLP does not read it"),
            "is_lora": contained("actor.lora"),
            "lora_rank": _lora("actor", "rank"),
            "lora_path": off("adapters start at zero"),
            **dict.fromkeys(_READ_FROM_MODEL.split(), detail(ARCHITECTURE)),
        }.items()
    },
    "actor.model.*": Named(lambda key: _of_policy(key, in_embodied(lacking("a setting of its policy networks")))),
    "inference.*": detail("log-probs are computed by the actor"),
    "rollout.group_name": "rollout.group_name",
    "rollout.gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "rollout.model.model_path": _rollout_model,
    "rollout.model.model_type": detail(ARCHITECTURE),
    "rollout.model.precision": detail("the rollout has the actor's precision"),
    "rollout.rollout_backend": choice("rollout.backend", {"sglang": "sglang", "vllm": "vllm"}),
    **{
        f"rollout.{name}": only("huggingface", None, why="the policy acts by torch", otherwise="see rollout.backend")
        for name in ("backend", "generation_backend")
    },
    "rollout.distributed_executor_backend": detail(ENGINE),
    "rollout.tensor_parallel_size": _tensor_parallel,
    "rollout.pipeline_parallel_size": only(1, None, why="one stage", otherwise="engines have no pipeline stages"),
    "rollout.max_running_requests": "rollout.max_running_requests",
    "rollout.pipeline_stage_num": in_embodied("env.pipeline_stages"),
    "rollout.enforce_eager": while_(
        lambda source: source("rollout.rollout_backend") == "vllm", "rollout.engine_args.enforce_eager", ENGINE
    ),
    "rollout.cuda_graph_max_bs": _engine_of("sglang", "cuda_graph_max_bs"),
    "rollout.sglang.attention_backend": _engine_of("sglang", "attention_backend"),
    "rollout.sglang.use_torch_compile": _engine_of("sglang", "enable_torch_compile"),
    "rollout.sglang.torch_compile_max_bs": _engine_of("sglang", "torch_compile_max_bs"),
    "rollout.sglang.decode_log_interval": _engine_of("sglang", "decode_log_interval"),
    "rollout.sglang.*": _engine_of("sglang", None),
    "rollout.vllm.enable_chunked_prefill": _engine_of("vllm", "enable_chunked_prefill"),
    "rollout.vllm.enable_prefix_caching": _engine_of("vllm", "enable_prefix_caching"),
    "rollout.vllm.max_num_batched_tokens": _engine_of("vllm", "max_num_batched_tokens"),
    "rollout.vllm.torch_profiler_dir": detail(PROFILER),
    "rollout.vllm.*": _engine_of("vllm", None),
    **details(
        "rollout",
        "return_logprobs validate_weight validate_save_dir print_outputs detokenize padding eos disable_log_stats "
        "enable_torch_compile enable_cuda_graph",
        ENGINE,
    ),
    "data.type": only("math", why="prompts and answers", otherwise="see data.task: prompts and answers"),
    "data.dataset_name": detail("a name in its logs"),
    "data.rollout_batch_size": "data.train_batch_size",
    "data.max_prompt_length": "data.max_prompt_length",
    "data.filter_prompt_by_length": detail("longer prompts are left out and counted"),
    "data.shuffle": "data.shuffle",
    "data.seed": _seed,
    "data.train_data_paths": _train_files,
    "data.val_data_paths": _val_files,
    "data.prompt_key": contained("data.task.prompt_column"),
    "data.answer_key": contained("data.task.answer_column"),
    **details("data", "val_rollout_batch_size num_workers validation_shuffle", "how it reads rows"),
    "reward.group_name": in_reasoning("reward.group_name"),
    "reward.use_reward_model": off("see reward.type: model"),
    "reward.reward_type": _reward_type,
    "reward.reward_scale": _scale,
    "reward.reward_*_val": contained("algorithm.reward_scaling"),
    "reward.tokenizer.*": detail("scores are made from texts"),
    "reward.*": _reward_setting,
    "router_server_args.*": lacking(_IMAGE_REWARD),
    "critic.use_critic_model": "critic.use_critic_model",
    "weight_syncer.type": while_(
        lambda source: not _share_processes(source),
        choice("rollout.sync", {"patch": "delta", "bucket": "full"}),
        "the rollout shares the actor's process, so no weights are sent",
    ),
    "weight_syncer.*": detail(ENGINE),
    "hydra.*": detail("there are no config groups"),
    "profile.*": detail(PROFILER),
}
# Where it differs from ours, or decides what another key means. From RLinf 0.3
DEFAULTS: dict[str, Any] = {
    "algorithm.n_minibatches": 1,
    "algorithm.gamma": 1.0,
    "algorithm.gae_lambda": 1.0,
    "algorithm.shuffle_rollout": True,
    "reward.reward_scale": 1.0,
    "reward.reward_min_val": -1.0,
    "reward.reward_max_val": 1.0,
    "actor.optim.adam_beta2": 0.999,
    "critic.optim.adam_beta2": 0.999,
    "algorithm.kl_penalty_type": "low_var_kl",
    "algorithm.clip_ratio_c": 3.0,
    "actor.optim.weight_decay": 0.01,
    "critic.optim.weight_decay": 0.01,
}
RLINF = System(
    "rlinf",
    "RLinf",
    ("runner.task_type", "cluster.component_placement*", "runner.logger.*", "algorithm.adv_type", "rollout.model.*"),
    TABLE,
    lambda _: DEFAULTS,
    leaves=("cluster.component_placement",),
)
