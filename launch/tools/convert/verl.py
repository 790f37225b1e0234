"""The keys of verl (`verl.trainer.main_ppo`), as command-line overrides or as YAML."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from rl_platform.launch.tools.convert.conversion import System
from rl_platform.launch.tools.convert.outcome import (
    DTYPES,
    ENGINE,
    MANY_STEPS,
    NO_STEPS,
    PROFILER,
    ForeignConfig,
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
    same,
    times,
    top_k,
    untranslated,
    while_,
    write,
)

ARR, ACTOR, ROLLOUT = "actor_rollout_ref", "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
ESTIMATORS = {
    **{name: name for name in ("gae", "grpo", "rloo", "opo", "remax", "reinforce_plus_plus")},
    **{name: name for name in ("reinforce_plus_plus_baseline", "optimal_token_baseline")},
    "grpo_vectorized": "grpo",
    "rloo_vectorized": "rloo",
    "tir_optimal_token_baseline": "optimal_token_baseline",
}
LOSSES = {
    **{name: name for name in ("sapo", "cispo", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl")},
    "vanilla": "ppo_clip",
    "gspo": "gspo_token",
    "geo_mean": "gmpo",
}
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
SCORING = "verl selects the scoring function by the column data_source; math_verify compares with the answer"


def group(source: ForeignConfig) -> int:
    return int(source(f"{ROLLOUT}.n") or 1)


def uses_critic(source: ForeignConfig) -> bool:
    enabled = source("critic.enable")
    return bool(source("algorithm.adv_estimator") == "gae" if enabled is None else enabled)


def engine(source: ForeignConfig, role: str) -> str:
    """fsdp or megatron: what trains a role, by its strategy or the choice of the trainer's config."""
    strategy = source(f"{role}.strategy")
    if strategy is None:
        strategy = "megatron" if _megatron(source) else "fsdp"
    return str(strategy)


def _megatron(source: ForeignConfig) -> bool:
    return source("model_engine") == "megatron" or "megatron" in str(source("config_name"))


def _config_name(value: Any, source: ForeignConfig) -> Outcome:
    if not _megatron(source):
        return same("the defaults of verl's trainer")
    return write({"actor.training_backend": "megatron", "critic.training_backend": "megatron"})


def gpus(source: ForeignConfig) -> int:
    return int(source("trainer.nnodes")) * int(source("trainer.n_gpus_per_node"))


def _adv_estimator(value: Any, source: ForeignConfig) -> Outcome:
    if value not in ESTIMATORS:
        return untranslated(f"{value} has no counterpart; known: {', '.join(ESTIMATORS)}")
    values = {"runner.task_type": "reasoning", "algorithm.adv_type": ESTIMATORS[value], "algorithm.loss_type": "actor"}
    return write({**values, "critic.use_critic_model": uses_critic(source)})


def _pool(_: Any, source: ForeignConfig) -> Outcome:
    """All components share all GPUs; an engine owns as many GPUs as its tensor and pipeline sizes say."""
    nodes, per_node, total = int(source("trainer.nnodes")), int(source("trainer.n_gpus_per_node")), gpus(source)
    sizes = [int(source(f"{ROLLOUT}.{name}_model_parallel_size") or 1) for name in ("tensor", "pipeline")]
    owned = sizes[0] * sizes[1]
    with_kl = source("algorithm.use_kl_in_reward") or source(f"{ACTOR}.use_kl_loss")
    shared = ["actor", *(["critic"] if uses_critic(source) else []), *(["reference"] if with_kl else [])]
    if owned == 1:
        placement = {",".join([*shared, "rollout", "reward"]): "all"}
    else:
        last = total // owned - 1
        placement = {",".join([*shared, "reward"]): "all", "rollout": f"0-{total - 1}:{f'0-{last}' if last else 0}"}
    values = {
        "cluster.inventory.nodes": nodes,
        "cluster.inventory.gpus_per_node": per_node,
        "cluster.component_placement": placement,
        **({"cluster.address": "auto"} if nodes > 1 else {}),
    }
    return write(values, "one pool: all components share all GPUs")


def _clip_ratio(value: Any, source: ForeignConfig) -> Outcome:
    sides = [source(f"{ACTOR}.clip_ratio_{side}") for side in ("low", "high")]
    names = ("algorithm.clip_ratio_low", "algorithm.clip_ratio_high")
    open_sides = {name: value for name, side in zip(names, sides, strict=True) if side is None}
    if open_sides:
        return write(open_sides)
    if value in sides:
        return same("clip_ratio_low and clip_ratio_high decide")
    low, high = sides
    return untranslated(f"verl does not read it beside clip_ratio_low ({low}) and clip_ratio_high ({high})")


def _clip_ratio_c(value: Any, source: ForeignConfig) -> Outcome:
    mode = source(f"{ACTOR}.policy_loss.loss_mode")
    return write({"algorithm.clip_ratio_c": value}) if mode == "vanilla" else same(f"not read by loss_mode {mode}")


def _of_loss(key: str, *modes: str) -> Rule:
    mode = f"{ACTOR}.policy_loss.loss_mode"
    return while_(lambda source: source(mode) in modes, key, f"read only by loss_mode {', '.join(modes)}")


def _aggregation(value: Any, _: ForeignConfig) -> Outcome:
    if value not in AGGREGATIONS:
        return untranslated(f"{value} has no counterpart; known: {', '.join(AGGREGATIONS)}")
    values = {"algorithm.loss_agg_func": value}
    if value.startswith("seq-mean"):
        values["algorithm.loss_agg_denominator"] = "nominal"
    return write(values)


def _kl_loss_type(value: Any, _: ForeignConfig) -> Outcome:
    values: dict[str, Any] = {"algorithm.kl_loss_type": value}
    bounded = str(value).rstrip("+") in ("k3", "low_var_kl")
    return write({**values, **({"algorithm.kl_loss_output_clip": 10.0} if bounded else {})})


def _filter_groups(value: Any, source: ForeignConfig) -> Outcome:
    if not value:
        return same("off there")
    limit = int(source("algorithm.filter_groups.max_num_gen_batches") or 0)
    return write({"algorithm.dynamic_sampling.max_rounds": limit or 1000}, "a section that is there is switched on")


def _rollout_is(value: Any, source: ForeignConfig) -> Outcome:
    if value is None:
        return same("off there")
    key, bound = "algorithm.rollout_is", source("algorithm.rollout_correction.rollout_is_threshold")
    low, _, high = str(bound).rpartition("_")
    values = {f"{key}.level": value, f"{key}.mode": "truncate", f"{key}.high": float(high)}
    return write({**values, **({f"{key}.low": float(low)} if low else {})})


def _files(value: Any, source: ForeignConfig) -> Outcome:
    """Parquet files of verl: the columns `prompt` (messages) and `reward_model.ground_truth`."""
    train, val = _listed(value), _listed(source("data.val_files"))
    columns = {"prompt_column": source("data.prompt_key"), "answer_column": "reward_model.ground_truth"}
    sources = [{"type": "file", "path": path, **columns} for path in train]
    if len(val) == len(train):
        for each, path in zip(sources, val, strict=True):
            each["val_path"] = path
    why = "only data.val_size rows of a validation file are used" if val else ""
    if len(sources) == 1:
        return write({f"data.task.{key}": each for key, each in sources[0].items()}, why)
    labels = [PurePath(path).parent.name or f"part{index}" for index, path in enumerate(train)]
    if len(set(labels)) < len(labels):
        labels = [f"{label}{index}" for index, label in enumerate(labels)]
    weighted = "sources of equal weight here; there every row has the same weight"
    named = [{"label": label, **each} for label, each in zip(labels, sources, strict=True)]
    return write({"data.sources": named}, f"{weighted}; {why}" if why else weighted)


def _listed(value: Any) -> list[str]:
    paths = [] if value is None else value if isinstance(value, list) else [value]
    return [f"${{env:HOME}}{path[1:]}" if str(path).startswith("~/") else str(path) for path in paths]


def _val_files(value: Any, source: ForeignConfig) -> Outcome:
    train, val = _listed(source("data.train_files")), _listed(value)
    if len(train) != len(val):
        return untranslated(f"{len(val)} validation files beside {len(train)} training files: pairs here")
    return part_of("data.task" if len(train) == 1 else "data.sources")


def _truncation(value: Any, source: ForeignConfig) -> Outcome:
    if value == "error" or source("data.filter_overlong_prompts"):
        return same("longer prompts are left out and counted")
    return untranslated(f"{value} shortens long prompts there; here they are left out and counted")


def _micro(role: str, key: str) -> Rule:
    return while_(
        lambda source: not dynamic(source, role), key, "use_dynamic_bsz is true: the token budget limits micro-batches"
    )


def dynamic(source: ForeignConfig, role: str) -> bool:
    """True if micro-batches of a role have a token budget. The critic follows the actor unless it says otherwise."""
    own = source(f"{role}.use_dynamic_bsz")
    return bool(own if own is not None or role == ACTOR else source(f"{ACTOR}.use_dynamic_bsz"))


def _global_micro(role: str, key: str) -> Rule:
    def rule(value: Any, source: ForeignConfig) -> Outcome:
        if value is None or dynamic(source, role):
            return same("not set" if value is None else "use_dynamic_bsz is true")
        return write({key: max(value // gpus(source), 1)}, "of all GPUs together there, of one here")

    return rule


def _budget(role: str, key: str) -> Rule:
    def rule(value: Any, source: ForeignConfig) -> Outcome:
        if not dynamic(source, role):
            return same("use_dynamic_bsz is false")
        split = int(source(f"{role}.ulysses_sequence_parallel_size") or 1)
        return write({key: value * split}, f"times {split}, the ranks that share a micro-batch" if split > 1 else "")

    return rule


def _log_prob_rows(value: Any, source: ForeignConfig) -> Outcome:
    if value is None:
        return same("not set")
    if dynamic(source, ACTOR):
        return same("use_dynamic_bsz is true: log-probs have the token budget of training")
    return write({"algorithm.logprob_forward_micro_batch_size": value})


def _log_prob_tokens(value: Any, source: ForeignConfig) -> Outcome:
    if not dynamic(source, ACTOR) or value == source(f"{ACTOR}.ppo_max_token_len_per_gpu"):
        return same("log-probs have the token budget of training")
    return untranslated("log-probs have the token budget of training here")


def _warmup(role: str, ours: str) -> Rule:
    def rule(value: Any, source: ForeignConfig) -> Outcome:
        if not value:
            return same("no warm-up")
        steps = source("trainer.total_training_steps")
        if steps is None:
            return untranslated("a share of all steps, and the file does not say how many there are")
        return write({f"{ours}.optim.lr_warmup_steps": int(value * steps)}, f"{value} of {steps} steps")

    return while_(lambda source: (source(f"{role}.optim.lr_warmup_steps") or -1) <= 0, rule, "lr_warmup_steps decides")


def _schedule(ours: str) -> Rule:
    def rule(value: Any, source: ForeignConfig) -> Outcome:
        if value is None:
            return same("not set")
        if value not in ("constant", "linear", "cosine"):
            return untranslated(f"{value} has no counterpart; known: constant, linear, cosine")
        if value != "constant" and source("trainer.total_training_steps") is None:
            return untranslated(f"it decays over runner.max_steps here. {NO_STEPS}; constant until both are set")
        return write({f"{ours}.optim.lr_schedule": value})

    return rule


def _min_lr(role: str, ours: str) -> Rule:
    return while_(
        lambda source: source(f"{role}.optim.lr_scheduler_type") == "cosine",
        times(f"{ours}.optim.min_lr", lambda source: source(f"{role}.optim.lr"), "a share of the learning rate"),
        "the learning rate is constant",
    )


def _offload(role: str, ours: str, section: str) -> Rule:
    parts = [f"{role}.{section}.{name}_offload" for name in ("param", "grad", "optimizer")]

    def rule(_: Any, source: ForeignConfig) -> Outcome:
        return write({f"{ours}.offload": any(source(part) for part in parts)}, "all parts of a model at once here")

    return rule


def _engine_argument(name: str) -> Rule:
    return while_(
        lambda source: source(f"{ROLLOUT}.name") == "vllm", f"rollout.engine_args.{name}", "the engine is not vLLM"
    )


def _epochs(value: Any, source: ForeignConfig) -> Outcome:
    steps = source("trainer.total_training_steps")
    if steps is not None:
        return write({"runner.max_epochs": value, "runner.max_steps": steps})
    return write({"runner.max_epochs": value, "runner.max_steps": MANY_STEPS}, NO_STEPS)


def _project(value: Any, source: ForeignConfig) -> Outcome:
    name = source("trainer.experiment_name")
    if source("trainer.default_local_dir") is not None:
        return untranslated("loggers have no project here")
    return write({"runner.output_dir": f"runs/{value}/{name}" if name else f"runs/{value}"}, "a folder of the project")


def _critic_warmup(value: Any, _: ForeignConfig) -> Outcome:
    why = "steps count from 1 there: K means K - 1" if value else ""
    return write({"algorithm.policy_training_start_step": max(value - 1, 0)}, why)


def _resume(value: Any, source: ForeignConfig) -> Outcome:
    if value == "resume_path":
        return write({"runner.resume": source("trainer.resume_from_path")})
    return choice("runner.resume", {"auto": "auto", "disable": "never"})(value, source)


def _reward_manager(value: Any, source: ForeignConfig) -> Outcome:
    if source("reward_model.enable") or source("reward.reward_model.enable"):
        return same("the reward model scores")
    if value not in (None, "naive", "batch", "prime", "dapo"):
        return untranslated(f"{value} has no counterpart; reward.type: module:function")
    return write({"reward.type": "math_verify"}, SCORING)


def _reward_model(value: Any, source: ForeignConfig) -> Outcome:
    if not (source("reward_model.enable") or source("reward.reward_model.enable")):
        return same("the reward model is off")
    return write({"reward.type": "model", "reward.model.path": value})


def _overlong(key: str) -> Rule:
    return while_(
        lambda source: any(
            source(f"{section}.overlong_buffer_cfg.enable")
            for section in ("reward_model", "reward_model.reward_kwargs", "reward.reward_kwargs")
        ),
        f"algorithm.overlong.{key}",
        "overlong_buffer_cfg.enable is false",
    )


def _lora(name: str, ours: str, model: str) -> Rule:
    return while_(
        lambda source: bool(source(f"{model}.lora_rank") or source(f"{model}.lora.rank")),
        f"{ours}.lora.{name}",
        "lora_rank is 0",
    )


def _grad_clip(role: str, ours: str) -> Rule:
    return while_(
        lambda source: engine(source, role) != "megatron", f"{ours}.optim.clip_grad", "Megatron reads optim.clip_grad"
    )


def _megatron_clip(role: str, ours: str) -> Rule:
    return while_(lambda source: engine(source, role) == "megatron", f"{ours}.optim.clip_grad", "FSDP reads grad_clip")


def _learner(role: str, ours: str, model: str, fsdp: str) -> Table:
    """The keys that actor and critic share. fsdp: the name of the section of its FSDP engine."""
    table: Table = {
        f"{role}.strategy": choice(
            f"{ours}.training_backend", {"fsdp": "fsdp", "fsdp2": "fsdp", "megatron": "megatron"}
        ),
        f"{role}.optim.lr": f"{ours}.optim.lr",
        f"{role}.optim.weight_decay": f"{ours}.optim.weight_decay",
        f"{role}.optim.betas": f"{ours}.optim.betas",
        f"{role}.optim.clip_grad": _megatron_clip(role, ours),
        f"{role}.grad_clip": _grad_clip(role, ours),
        f"{role}.optim.lr_warmup_steps": while_(
            lambda source: (source(f"{role}.optim.lr_warmup_steps") or -1) > 0,
            f"{ours}.optim.lr_warmup_steps",
            "not set",
        ),
        f"{role}.optim.lr_warmup_steps_ratio": _warmup(role, ours),
        f"{role}.optim.lr_scheduler_type": _schedule(ours),
        f"{role}.optim.lr_decay_style": _schedule(ours),
        f"{role}.optim.warmup_style": _schedule(ours),
        f"{role}.optim.min_lr_ratio": _min_lr(role, ours),
        f"{role}.optim.min_lr": f"{ours}.optim.min_lr",
        f"{role}.optim.optimizer": only("AdamW", "adam", why="AdamW", otherwise="AdamW is the only optimizer"),
        f"{role}.optim.total_training_steps": detail("the schedule ends with the run"),
        f"{role}.optim.num_cycles": only(0.5, None, why="half a cosine", otherwise="half a cosine is the only form"),
        f"{role}.ppo_epochs": "algorithm.ppo_epochs" if ours == "actor" else "algorithm.critic_ppo_epochs",
        f"{role}.ppo_mini_batch_size": times(
            "data.mini_batch_size" if ours == "actor" else "critic.mini_batch_size",
            group,
            f"prompts there, sequences here: times {ROLLOUT}.n",
        ),
        f"{role}.ppo_micro_batch_size_per_gpu": _micro(role, f"{ours}.micro_batch_size"),
        f"{role}.ppo_micro_batch_size": _global_micro(role, f"{ours}.micro_batch_size"),
        f"{role}.use_dynamic_bsz": contained(f"{ours}.max_tokens_per_micro_batch"),
        f"{role}.ppo_max_token_len_per_gpu": _budget(role, f"{ours}.max_tokens_per_micro_batch"),
        f"{role}.ulysses_sequence_parallel_size": f"{ours}.parallel.context",
        f"{role}.{fsdp}.ulysses_sequence_parallel_size": f"{ours}.parallel.context",
        f"{role}.{fsdp}.offload_policy": f"{ours}.cpu_offload",
        f"{role}.{fsdp}.model_dtype": detail("trained parameters are float32"),
        f"{role}.{fsdp}.dtype": choice(f"{ours}.model.dtype", DTYPES),
        f"{role}.megatron.dtype": choice(f"{ours}.model.dtype", DTYPES),
        f"{role}.data_loader_seed": detail("runner.seed is the seed of every shuffle"),
        f"{role}.checkpoint.*": detail("every checkpoint holds model, optimizer and state"),
        f"{role}.megatron.tensor_model_parallel_size": f"{ours}.parallel.tensor",
        f"{role}.megatron.pipeline_model_parallel_size": f"{ours}.parallel.pipeline",
        f"{role}.megatron.virtual_pipeline_model_parallel_size": f"{ours}.parallel.virtual_pipeline",
        f"{role}.megatron.context_parallel_size": f"{ours}.parallel.context",
        f"{role}.megatron.expert_model_parallel_size": f"{ours}.parallel.expert",
        f"{role}.megatron.sequence_parallel": while_(
            lambda source: (source(f"{role}.megatron.tensor_model_parallel_size") or 1) > 1,
            f"{ours}.parallel.sequence",
            "tensor_model_parallel_size is 1",
        ),
        f"{role}.megatron.override_transformer_config.recompute_granularity": choice(
            f"{ours}.gradient_checkpointing", {"full": True, "selective": True}, "every layer is recomputed"
        ),
        f"{role}.megatron.override_transformer_config.recompute_*": detail("every layer is recomputed"),
        **details(
            f"{role}.megatron.override_transformer_config",
            "moe_permute_fusion moe_grouped_gemm moe_router_dtype moe_token_dispatcher_type moe_enable_deepep "
            "gradient_accumulation_fusion apply_rope_fusion bias_activation_fusion masked_softmax_fusion "
            "bias_dropout_fusion persist_layer_norm deallocate_pipeline_outputs attention_backend",
            ENGINE,
        ),
        f"{role}.megatron.override_transformer_config.*": lacking("no setting of single kernels here"),
        **{
            f"{role}.{section}.{part}_offload": _offload(role, ours, section)
            for section in (fsdp, "megatron")
            for part in ("param", "grad", "optimizer")
        },
        f"{role}.megatron.*": detail(ENGINE),
        **{f"{role}.{section}.*": detail(ENGINE) for section in (fsdp, "fsdp_config")},
        **details(
            f"{role}.optim.override_optimizer_config",
            "overlap_cpu_optimizer_d2h_h2d optimizer_cpu_offload optimizer_offload_fraction "
            "use_precision_aware_optimizer",
            ENGINE,
        ),
        f"{role}.optim.override_optimizer_config*": off("options of single optimizers"),
        **details(
            f"{role}.optim",
            "optimizer_impl zero_indexed_step lr_warmup_init lr_decay_steps weight_decay_incr_style "
            "use_checkpoint_opt_param_scheduler use_precision_aware_optimizer main_grads_dtype",
            ENGINE,
        ),
        f"{role}.profiler.*": detail(PROFILER),
        f"{model}.path": f"{ours}.model.path",
        f"{model}.tokenizer_path": f"{ours}.model.tokenizer",
        f"{model}.enable_gradient_checkpointing": f"{ours}.gradient_checkpointing",
        f"{model}.use_remove_padding": detail("sequences are always packed without padding"),
        f"{model}.trust_remote_code": detail("code of a model is never run; its family is built in"),
        f"{model}.lora_rank": _lora("rank", ours, model),
        f"{model}.lora_alpha": _lora("alpha", ours, model),
        f"{model}.target_modules": only("all-linear", None, why="all linear layers", otherwise=f"see {ours}.lora"),
        f"{model}.custom_chat_template": off("the tokenizer's own template is used"),
        f"{model}.external_lib": off("no library is imported beside the model's family"),
        f"{model}.override_config.*": off("the model's config.json is used as it is"),
        f"{model}.enable_activation_offload": off("activations are recomputed, see gradient_checkpointing"),
        **details(model, "use_shm use_liger use_fused_kernels fused_kernel_options.* tiled_mlp.*", ENGINE),
    }
    return table


TABLE: Table = {
    "algorithm.adv_estimator": _adv_estimator,
    "algorithm.gamma": "algorithm.gamma",
    "algorithm.use_kl_in_reward": "algorithm.use_kl_in_reward",
    "algorithm.kl_penalty": "algorithm.kl_penalty",
    **{
        f"algorithm.kl_ctrl.{name}": f"algorithm.kl_ctrl.{name}" for name in ("type", "kl_coef", "horizon", "target_kl")
    },
    "algorithm.use_pf_ppo": "algorithm.use_pf_ppo",
    "algorithm.filter_groups.enable": _filter_groups,
    "algorithm.filter_groups.metric": detail("the metric of the task, before shaping"),
    "algorithm.filter_groups.*": contained("algorithm.dynamic_sampling.max_rounds"),
    "algorithm.rollout_correction.rollout_is": _rollout_is,
    "algorithm.rollout_correction.rollout_is_threshold": contained("algorithm.rollout_is.high"),
    "algorithm.rollout_correction.rollout_is_batch_normalize": while_(
        lambda source: source("algorithm.rollout_correction.rollout_is") is not None,
        "algorithm.rollout_is.batch_normalize",
        "rollout_is is off",
    ),
    "algorithm.rollout_correction.bypass_mode": choice(
        "algorithm.old_log_probs", {True: "rollout", False: "recompute"}
    ),
    "algorithm.rollout_correction.rollout_rs": off("see algorithm.rollout_is.reject: its thresholds bound a KL"),
    "algorithm.rollout_correction.rollout_rs_threshold": off("see algorithm.rollout_is.reject"),
    "data.train_files": _files,
    "data.val_files": _val_files,
    "data.prompt_key": contained("data.task"),
    "data.train_batch_size": "data.train_batch_size",
    "data.max_prompt_length": "data.max_prompt_length",
    "data.max_response_length": "data.max_response_length",
    "data.shuffle": "data.shuffle",
    "data.seed": "runner.seed",
    "data.val_max_samples": while_(
        lambda source: (source("data.val_max_samples") or -1) > 0, "data.val_size", "all rows there"
    ),
    "data.train_max_samples": only(-1, None, why="all rows", otherwise="all rows of the file are used"),
    "data.gen_batch_size": while_(
        lambda source: bool(source("algorithm.filter_groups.enable")),
        "algorithm.dynamic_sampling.prompts_per_round",
        "groups are not filtered",
    ),
    "data.filter_overlong_prompts": detail("longer prompts are left out and counted"),
    "data.truncation": _truncation,
    "data.apply_chat_template_kwargs*": off("the template has no arguments here"),
    "data.custom_cls.*": off("data.task reads files and datasets"),
    "data.reward_fn_key": contained("reward.type", SCORING),
    "data.trust_remote_code": detail("code of a model is never run; its family is built in"),
    **details(
        "data",
        "dataloader_num_workers filter_overlong_prompts_workers return_raw_input_ids return_raw_chat "
        "return_full_prompt validation_shuffle val_batch_size use_shm",
        "how it reads or batches rows; the same prompts reach the model",
    ),
    **details("data", "image_key video_key audio_key image_patch_size return_multi_modal_inputs", "text only"),
    **_learner(ACTOR, "actor", f"{ARR}.model", "fsdp_config"),
    f"{ACTOR}.clip_ratio": _clip_ratio,
    f"{ACTOR}.clip_ratio_c": _clip_ratio_c,
    f"{ACTOR}.policy_loss.loss_mode": choice("algorithm.policy_loss", LOSSES),
    f"{ACTOR}.policy_loss.clip_cov_ratio": _of_loss("algorithm.covariance.fraction", "clip_cov"),
    f"{ACTOR}.policy_loss.clip_cov_lb": _of_loss("algorithm.covariance.low", "clip_cov"),
    f"{ACTOR}.policy_loss.clip_cov_ub": _of_loss("algorithm.covariance.high", "clip_cov"),
    f"{ACTOR}.policy_loss.kl_cov_ratio": _of_loss("algorithm.covariance.fraction", "kl_cov"),
    f"{ACTOR}.policy_loss.ppo_kl_coef": _of_loss("algorithm.covariance.kl_coef", "kl_cov"),
    f"{ACTOR}.tau_pos": _of_loss("algorithm.sapo_tau_pos", "sapo"),
    f"{ACTOR}.tau_neg": _of_loss("algorithm.sapo_tau_neg", "sapo"),
    f"{ACTOR}.loss_agg_mode": _aggregation,
    f"{ACTOR}.entropy_coeff": "algorithm.entropy_bonus",
    f"{ACTOR}.kl_loss_type": _kl_loss_type,
    f"{ACTOR}.calculate_entropy": detail("the entropy is always measured"),
    f"{ACTOR}.use_torch_compile": detail(ENGINE),
    f"{ACTOR}.entropy_*": detail(ENGINE),
    f"{ACTOR}.router_replay.mode": choice("actor.router_replay", {"disabled": False, "R2": True, "R3": True}),
    f"{ARR}.ref.log_prob_micro_batch_size*": _log_prob_rows,
    f"{ARR}.ref.log_prob_use_dynamic_bsz": detail("log-probs have the micro-batches of training"),
    f"{ARR}.ref.log_prob_max_token_len_per_gpu": _log_prob_tokens,
    f"{ARR}.ref.fsdp_config.param_offload": "reference.offload",
    f"{ARR}.ref.megatron.param_offload": "reference.offload",
    f"{ARR}.ref.strategy": contained("actor.training_backend", "the reference uses the actor's engine"),
    f"{ARR}.ref.megatron.tensor_model_parallel_size": "reference.parallel.tensor",
    f"{ARR}.ref.megatron.pipeline_model_parallel_size": "reference.parallel.pipeline",
    f"{ARR}.ref.megatron.context_parallel_size": "reference.parallel.context",
    f"{ARR}.ref.megatron.expert_model_parallel_size": "reference.parallel.expert",
    f"{ARR}.ref.fsdp_config.*": detail(ENGINE),
    f"{ARR}.ref.megatron.*": detail(ENGINE),
    **details(f"{ARR}.ref", "use_torch_compile rollout_n profiler.* entropy_*", ENGINE),
    f"{ACTOR}.rollout_n": contained("algorithm.group_size"),
    "critic.rollout_n": contained("algorithm.group_size"),
    f"{ACTOR}.use_remove_padding": detail("sequences are always packed without padding"),
    f"{ACTOR}.calculate_sum_pi_squared": detail("it is computed where algorithm.adv_type reads it"),
    f"{ROLLOUT}.data_parallel_size": only(1, None, why="one replica per rank", otherwise="see component_placement"),
    f"{ROLLOUT}.expert_parallel_size": only(1, None, why="one rank", otherwise="see rollout.engine_args"),
    f"{ROLLOUT}.name": choice("rollout.backend", {"vllm": "vllm", "sglang": "sglang", "hf": "torch"}),
    f"{ROLLOUT}.top_k": top_k("rollout.sampling.top_k"),
    f"{ROLLOUT}.gpu_memory_utilization": "rollout.gpu_memory_utilization",
    f"{ROLLOUT}.tensor_model_parallel_size": contained("cluster.component_placement", "GPUs of each rollout rank"),
    f"{ROLLOUT}.pipeline_model_parallel_size": contained("cluster.component_placement", "GPUs of each rollout rank"),
    f"{ROLLOUT}.do_sample": only(True, why="responses are sampled", otherwise="rollout.sampling.temperature: 0"),
    f"{ROLLOUT}.ignore_eos": off("a response ends with EOS"),
    f"{ROLLOUT}.prompt_length": contained("data.max_prompt_length"),
    f"{ROLLOUT}.response_length": contained("data.max_response_length"),
    f"{ROLLOUT}.log_prob_micro_batch_size*": _log_prob_rows,
    f"{ROLLOUT}.log_prob_use_dynamic_bsz": detail("log-probs have the micro-batches of training"),
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu": _log_prob_tokens,
    f"{ROLLOUT}.val_kwargs.do_sample": contained("rollout.val_sampling.temperature"),
    f"{ROLLOUT}.val_kwargs.temperature": lambda value, source: (
        write({"rollout.val_sampling.temperature": value})
        if source(f"{ROLLOUT}.val_kwargs.do_sample")
        else same("val_kwargs.do_sample is false: greedy")
    ),
    f"{ROLLOUT}.val_kwargs.top_k": top_k("rollout.val_sampling.top_k"),
    f"{ROLLOUT}.val_kwargs.n": only(1, why="one response per prompt", otherwise="validation has one response each"),
    f"{ROLLOUT}.multi_turn.enable": off("see rollout.multi_turn: its tools are functions of another signature"),
    f"{ROLLOUT}.multi_turn.*": while_(
        lambda source: bool(source(f"{ROLLOUT}.multi_turn.enable")),
        lacking("see rollout.multi_turn: its tools are functions of another signature"),
        "multi_turn.enable is false",
    ),
    **{
        f"{ROLLOUT}.{name}": _engine_argument(name)
        for name in (
            *("max_num_batched_tokens", "enable_chunked_prefill", "enable_prefix_caching"),
            *("enforce_eager", "max_model_len"),
        )
    },
    f"{ROLLOUT}.engine_kwargs.*": lacking("give it as rollout.engine_args"),
    f"{ROLLOUT}.over_sample_rate": off("see rollout.partial_rollout"),
    **details(
        ROLLOUT,
        "mode seed dtype free_cache_engine load_format layered_summon disable_log_stats skip_tokenizer_init "
        "calculate_log_probs cudagraph_capture_sizes scheduling_policy logprobs_mode multi_stage_wake_up agent.* "
        "checkpoint_engine.* update_weights_bucket_megabytes trace.* prometheus.* profiler.*",
        ENGINE,
    ),
    f"{ARR}.hybrid_engine": only(True, why="actor and rollout share GPUs", otherwise="see component_placement"),
    f"{ARR}.nccl_timeout": detail("runner.deadline_s limits every wait"),
    **_learner("critic", "critic", "critic.model", "fsdp"),
    "critic.enable": contained("critic.use_critic_model"),
    "critic.shuffle": contained("algorithm.shuffle_mini_batches"),
    "critic.loss_agg_mode": contained("algorithm.loss_agg_func"),
    "critic.forward_*": detail("values have the micro-batches of training"),
    "critic.use_torch_compile": detail(ENGINE),
    "reward_model.enable": contained("reward.type"),
    "reward.reward_model.enable": contained("reward.type"),
    "reward_model.model.path": _reward_model,
    "reward.reward_model.model_path": _reward_model,
    "reward_model.reward_manager": _reward_manager,
    "reward.reward_manager.name": _reward_manager,
    "*custom_reward_function.path": off("its function has another signature: reward.type module:function"),
    "*custom_reward_function.name": off("its function has another signature: reward.type module:function"),
    "*overlong_buffer_cfg.enable": contained("algorithm.overlong"),
    "*overlong_buffer_cfg.len": _overlong("buffer_length"),
    "*overlong_buffer_cfg.penalty_factor": _overlong("penalty"),
    "*overlong_buffer_cfg.log": detail("the lengths are always measured"),
    "*reward_kwargs.max_resp_len": _overlong("max_length"),
    "reward_model.max_resp_len": _overlong("max_length"),
    "reward_model.*": while_(
        lambda source: bool(source("reward_model.enable")), lacking("see reward.model"), "the reward model is off"
    ),
    "reward.reward_model.*": while_(
        lambda source: bool(source("reward.reward_model.enable")),
        lacking("see reward.model"),
        "the reward model is off",
    ),
    "reward.num_workers": detail("reward.num_workers counts the processes of one rank"),
    "trainer.n_gpus_per_node": _pool,
    "trainer.nnodes": contained("cluster.inventory.nodes"),
    "trainer.critic_warmup": _critic_warmup,
    "trainer.balance_batch": lambda value, source: write(
        {"actor.balance": value, **({"critic.balance": value} if uses_critic(source) else {})}
    ),
    "trainer.logger": loggers("runner.logger_backends"),
    "trainer.project_name": _project,
    "trainer.save_freq": interval("runner.save_interval"),
    "trainer.test_freq": interval("runner.val_check_interval"),
    "trainer.total_epochs": _epochs,
    "trainer.total_training_steps": contained("runner.max_steps"),
    "trainer.resume_mode": _resume,
    "trainer.resume_from_path": contained("runner.resume"),
    "trainer.max_critic_ckpt_to_keep": contained("runner.keep_checkpoints"),
    "trainer.val_before_train": detail("every run validates before its first step"),
    "trainer.val_only": off("platform-launch --eval CHECKPOINT"),
    "trainer.default_hdfs_dir": off("checkpoints are folders"),
    "trainer.*_data_dir": detail("samples.jsonl holds responses"),
    "trainer.v1.trainer_mode": only("sync", why="steps are synchronous", otherwise="see runner.max_staleness"),
    "trainer.v1.*": detail("settings of its asynchronous trainers"),
    **details(
        "trainer",
        "device use_v1 use_legacy_worker_impl del_local_ckpt_after_load esi_redundant_time "
        "ray_wait_register_center_timeout",
        ENGINE,
    ),
    "model_engine": choice(
        ("actor.training_backend", "critic.training_backend"), {"dp": "fsdp", "megatron": "megatron"}
    ),
    "config_name": _config_name,
    "ray_kwargs.*": detail("Ray is started by the run; cluster.address joins one"),
    "global_profiler.*": detail(PROFILER),
    "transfer_queue.*": detail(ENGINE),
    "hydra.*": detail("there are no config groups"),
    "defaults": detail("its defaults are in the table of this converter"),
    "*._target_": detail("a class of its config"),
}

# Where it differs from ours, or decides what another key means. From verl's trainer config of 0.9
DEFAULTS: dict[str, Any] = {
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.use_kl_in_reward": False,
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.prompt_key": "prompt",
    "data.truncation": "error",
    f"{ACTOR}.clip_ratio_low": 0.2,
    f"{ACTOR}.clip_ratio_high": 0.2,
    f"{ACTOR}.clip_ratio_c": 3.0,
    f"{ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{ACTOR}.policy_loss.ppo_kl_coef": 0.1,
    f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ACTOR}.kl_loss_type": "low_var_kl",
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.ppo_max_token_len_per_gpu": 16384,
    f"{ACTOR}.shuffle": False,
    f"{ACTOR}.optim.lr": 1e-6,
    f"{ACTOR}.optim.weight_decay": 0.01,
    f"{ACTOR}.fsdp_config.dtype": "bfloat16",
    f"{ACTOR}.megatron.sequence_parallel": True,
    f"{ARR}.model.enable_gradient_checkpointing": True,
    f"{ROLLOUT}.n": 1,
    f"{ROLLOUT}.tensor_model_parallel_size": 2,
    f"{ROLLOUT}.gpu_memory_utilization": 0.5,
    f"{ROLLOUT}.val_kwargs.do_sample": False,
    "algorithm.rollout_correction.rollout_is_threshold": 2.0,
    "critic.optim.lr": 1e-5,
    "critic.optim.weight_decay": 0.01,
    "critic.ppo_max_token_len_per_gpu": 32768,
    "critic.cliprange_value": 0.5,
    "critic.model.enable_gradient_checkpointing": True,
    "critic.fsdp.dtype": "bfloat16",
    "critic.megatron.sequence_parallel": True,
    "reward.reward_manager.name": "naive",
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.total_epochs": 30,
}
VERL = System(
    "verl",
    "verl",
    ("actor_rollout_ref.*", "trainer.n_gpus_per_node", "algorithm.adv_estimator"),
    TABLE,
    lambda _: DEFAULTS,
)
