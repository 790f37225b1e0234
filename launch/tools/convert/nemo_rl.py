"""The keys of NeMo-RL: YAML of its PPO and GRPO runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rl_platform.launch.tools.convert.conversion import System
from rl_platform.launch.tools.convert.outcome import (
    ARCHITECTURE,
    DTYPES,
    ENGINE,
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
    off,
    only,
    part_of,
    same,
    to,
    top_k,
    untranslated,
    while_,
    write,
)

# names of its datasets -> the files that `rl-platform data` writes
_DATASETS = {
    "gsm8k": ("gsm8k", "data/gsm8k_train.jsonl", "data/gsm8k_test.jsonl"),
    "DAPOMath17K": ("dapo-math", "data/dapo_train.jsonl", "data/dapo_train.jsonl"),
    "DAPOMathAIME2024": ("aime24", "data/aime24.jsonl", "data/aime24.jsonl"),
    "AIME2024": ("aime24", "data/aime24.jsonl", "data/aime24.jsonl"),
}
_KL = "loss_fn.reference_policy_kl_penalty"
_MODES = {"tis": "truncate", "icepop": "icepop", "seq-mask-tis": "sequence_mask", None: "truncate"}


def loop(source: ForeignConfig) -> str:
    """The section of the training loop: ppo or grpo."""
    return "ppo" if any(key.startswith("ppo.") for key in source.given) else "grpo"


def group(source: ForeignConfig) -> int:
    return int(source(f"{loop(source)}.num_generations_per_prompt"))


def by_megatron(source: ForeignConfig, role: str) -> bool:
    return bool(source(f"{role}.megatron_cfg.enabled"))


def _estimator(value: Any, source: ForeignConfig) -> Outcome:
    names = {"gae": "gae", "raw_reward": "raw", "grpo": "grpo", "reinforce_plus_plus": "reinforce_plus_plus"}
    if value not in names:
        return untranslated(f"{value} has no counterpart; known: {', '.join(names)}")
    values = {"runner.task_type": "reasoning", "algorithm.adv_type": names[value], "algorithm.loss_type": "actor"}
    return write({**values, "critic.use_critic_model": value == "gae"})


def _placement(_: Any, source: ForeignConfig) -> Outcome:
    """Colocated: all components share all GPUs. Else the last GPUs of each node, or the last nodes, generate."""
    nodes, per_node = int(source("cluster.num_nodes")), int(source("cluster.gpus_per_node"))
    total, engine = nodes * per_node, int(source("policy.generation.vllm_cfg.tensor_parallel_size") or 1)
    learners = ["actor"]
    if source(f"{loop(source)}.adv_estimator.name") == "gae":
        learners.append("critic")
    if (source(_KL) or 0) > 0:
        learners.append("reference")
    first, why = 0, "colocated: all components share all GPUs"
    if source("policy.generation.colocated.enabled") is False:
        resources = "policy.generation.colocated.resources"
        own_nodes, own = source(f"{resources}.num_nodes"), source(f"{resources}.gpus_per_node")
        if own is None:
            return untranslated("generation has GPUs of its own, and the file does not say how many")
        first, why = total - int(own) * int(own_nodes or 1), "not colocated: the last GPUs generate"
        if first <= 0:
            return untranslated("no GPU is left for training")
    ranks = (total - first) // engine
    rollout = _range(first, total) + ("" if engine == 1 else f":{_range(0, ranks)}")
    if first == 0 and engine == 1:
        placed = {",".join([*learners, "rollout", "reward"]): "all"}
    else:
        placed = {",".join([*learners, "reward"]): _range(0, first or total), "rollout": rollout}
    values = {"cluster.inventory.nodes": nodes, "cluster.inventory.gpus_per_node": per_node}
    address = {"cluster.address": "auto"} if nodes > 1 else {}
    return write({**values, "cluster.component_placement": placed, **address}, why)


def _range(first: int, end: int) -> str:
    return str(first) if end - first == 1 else f"{first}-{end - 1}"


def _kl(value: Any, source: ForeignConfig) -> Outcome:
    if not value:
        return same("no KL term")
    if source("loss_fn.use_kl_in_reward"):
        return write(
            {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": value}, "a penalty in the reward"
        )
    return write({"algorithm.use_kl_loss": True, "algorithm.kl_loss_coef": value}, "a term of the loss")


def _by_place(in_reward: str, in_loss: str) -> Rule:
    def rule(value: Any, source: ForeignConfig) -> Outcome:
        if not source(_KL):
            return same("no KL term")
        return write({in_reward if source("loss_fn.use_kl_in_reward") else in_loss: value})

    return rule


def _importance(value: Any, source: ForeignConfig) -> Outcome:
    if not value:
        return same("off there")
    kind = source("loss_fn.truncated_importance_sampling_type")
    if kind not in _MODES:
        return untranslated(f"{kind} has no counterpart; known: {', '.join(map(str, _MODES))}")
    key, low = "algorithm.rollout_is", source("loss_fn.truncated_importance_sampling_ratio_min")
    values = {f"{key}.mode": _MODES[kind], f"{key}.high": source("loss_fn.truncated_importance_sampling_ratio")}
    return write({**values, **({f"{key}.low": low} if low is not None and kind != "tis" else {})})


_TOTAL = "prompt and response share max_total_sequence_length there; half of it each"


def _prompt_tokens(value: Any, source: ForeignConfig) -> Outcome:
    total = source("policy.max_total_sequence_length")
    if total is not None and value is not None and value >= total:
        return untranslated(_TOTAL, {"data.max_prompt_length": total // 2})
    return write({"data.max_prompt_length": value}) if value is not None else same("not set")


def _response(value: Any, source: ForeignConfig) -> Outcome:
    total = source("policy.max_total_sequence_length")
    room = total - (source("data.max_input_seq_length") or 0)
    if room <= 0:
        return untranslated(_TOTAL, {"data.max_response_length": total - total // 2})
    why = "" if value <= room else "what max_total_sequence_length leaves beside data.max_input_seq_length"
    return write({"data.max_response_length": min(value, room)}, why)


def _dataset(part: str) -> Rule:
    def rule(value: Any, source: ForeignConfig) -> Outcome:
        if value not in _DATASETS:
            path = source(f"data.{part}.data_path")
            if value == "ResponseDataset" and path is not None:
                return same("data_path names the file")
            return untranslated(f"{value} is a dataset of NeMo-RL: see data.task, or rl-platform data")
        verb, train, val = _DATASETS[value]
        if part == "validation":
            return write({"data.task.val_path": val}, f"rl-platform data {verb} writes it")
        return write({"data.task.type": "jsonl", "data.task.path": train}, f"rl-platform data {verb} writes it")

    return rule


def _data_path(part: str) -> Rule:
    def rule(value: Any, source: ForeignConfig) -> Outcome:
        if value is None:
            return same("not set")
        columns = {
            "data.task.prompt_column": source(f"data.{part}.input_key") or "input",
            "data.task.answer_column": source(f"data.{part}.output_key") or "output",
        }
        if part == "validation":
            return write({"data.task.val_path": value})
        return write({"data.task.type": "jsonl", "data.task.path": value, **columns})

    return rule


def _epochs(value: Any, _: ForeignConfig) -> Outcome:
    return write({"runner.max_epochs": value}) if value > 0 else same("only the number of steps counts")


def _loggers(_: Any, source: ForeignConfig) -> Outcome:
    names = [name for name in ("tensorboard", "wandb") if source(f"logger.{name}_enabled")]
    return write({"runner.logger_backends": names}, "the terminal and metrics.jsonl always log")


def _of_logger(name: str, rule: Rule) -> Rule:
    return while_(lambda source: bool(source(f"logger.{name}_enabled")), rule, f"{name}_enabled is false")


def _save(value: Any, source: ForeignConfig) -> Outcome:
    if source("checkpointing.enabled") is False:
        return write({"runner.save_interval": 0}, "off there; here the last step is always saved")
    return interval("runner.save_interval")(value, source)


def _shaping(name: str) -> Rule:
    return while_(
        lambda source: bool(source(f"{loop(source)}.reward_shaping.enabled")),
        f"algorithm.overlong.{name}",
        "reward_shaping.enabled is false",
    )


def _scaling(name: str) -> Rule:
    return while_(
        lambda source: bool(source(f"{loop(source)}.reward_scaling.enabled")),
        f"algorithm.reward_scaling.{name}",
        "reward_scaling.enabled is false",
    )


def _sampling(section: str) -> Rule:
    def rule(value: Any, source: ForeignConfig) -> Outcome:
        if not value:
            return same("off there")
        if section == "ppo":
            return untranslated("NeMo-RL's PPO accepts it and never filters; see algorithm.dynamic_sampling")
        limit = source("grpo.dynamic_sampling_max_gen_batches")
        return write({"algorithm.dynamic_sampling.max_rounds": limit}, "a section that is there is switched on")

    return rule


def _staleness(value: Any, source: ForeignConfig) -> Outcome:
    age = source(f"{loop(source)}.async_{loop(source)}.max_trajectory_age_steps") or 1
    if not value:
        return same("off there")
    return write({"runner.max_staleness": age}, "rollouts are collected during training")


def _budgeted(source: ForeignConfig, role: str) -> str | None:
    """The section that limits micro-batches by tokens."""
    names = ("sequence_packing", "dynamic_batching")
    return next((name for name in names if source(f"{role}.{name}.enabled")), None)


def _loop(section: str) -> Table:
    """The keys of `ppo` or `grpo`."""
    table: Table = {
        "max_rollout_turns": only(1, None, why="single-turn", otherwise="see rollout.multi_turn"),
        "max_num_epochs": _epochs,
        "ppo_epochs": "algorithm.ppo_epochs",
        "policy_training_start_step": "algorithm.policy_training_start_step",
        "val_period": interval("runner.val_check_interval"),
        "val_at_start": detail("every run validates at its start and its end"),
        "val_at_end": detail("every run validates at its start and its end"),
        "val_batch_size": detail("all questions of a validation are generated at once"),
        "use_dynamic_sampling": _sampling(section),
        "dynamic_sampling_max_gen_batches": contained("algorithm.dynamic_sampling"),
        "batch_multiplier": only(1, 1.0, None, why="one batch", otherwise="see dynamic_sampling.prompts_per_round"),
        "skip_reference_policy_logprobs_calculation": detail("they are computed only where a KL term reads them"),
        f"async_{section}.enabled": _staleness,
        f"async_{section}.max_trajectory_age_steps": contained("runner.max_staleness"),
        f"async_{section}.*": while_(
            lambda source: bool(source(f"{section}.async_{section}.enabled")),
            lacking("see runner.max_staleness"),
            f"async_{section} is off",
        ),
        "reward_shaping.enabled": contained("algorithm.overlong"),
        "reward_shaping.overlong_buffer_length": _shaping("buffer_length"),
        "reward_shaping.overlong_buffer_penalty": _shaping("penalty"),
        "reward_shaping.max_response_length": _shaping("max_length"),
        "reward_shaping.stop_properly_penalty_coef": _shaping("stop_properly_coef"),
        "reward_scaling.enabled": contained("algorithm.reward_scaling"),
        **{
            f"reward_scaling.{name}": _scaling(name)
            for name in ("source_min", "source_max", "target_min", "target_max")
        },
        "adv_estimator.name": _estimator,
        "advantage_clip_low": lambda value, source: (
            same("not set")
            if value is None
            else write({"algorithm.advantage_clip": [value, source(f"{section}.advantage_clip_high")]})
        ),
        "advantage_clip_high": contained("algorithm.advantage_clip"),
        "normalize_rewards": "algorithm.grpo_std_normalization",
        "seq_logprob_error_threshold": off("see algorithm.rollout_is.reject"),
    }
    return {f"{section}.{name}": rule for name, rule in table.items()}


def _learner(role: str, ours: str) -> Table:
    """The keys that `policy` and `value` share."""
    mega = f"{role}.megatron_cfg"

    def megatron(rule: str | Rule) -> Rule:
        return while_(lambda source: by_megatron(source, role), rule, "megatron_cfg.enabled is false")

    def automodel(rule: str | Rule) -> Rule:
        return while_(lambda source: not by_megatron(source, role), rule, "megatron_cfg.enabled is true")

    def micro(value: Any, source: ForeignConfig) -> Outcome:
        if section := _budgeted(source, role):
            return same(f"{section}: the token budget limits micro-batches")
        return write({f"{ours}.micro_batch_size": value})

    def budget(section: str) -> Rule:
        return while_(
            lambda source: _budgeted(source, role) == section, f"{ours}.max_tokens_per_micro_batch", f"{section} is off"
        )

    def same_tokens(value: Any, source: ForeignConfig) -> Outcome:
        section = _budgeted(source, role)
        if section is None or value == source(f"{role}.{section}.train_mb_tokens"):
            return same("log-probs have the token budget of training")
        return untranslated("log-probs have the token budget of training here")

    def tokenizer(value: Any, source: ForeignConfig) -> Outcome:
        own = value == source(f"{role}.model_name")
        return same("the model's own") if own else write({f"{ours}.model.tokenizer": value})

    def schedule(value: Any, source: ForeignConfig) -> Outcome:
        if value == "constant":
            return write({f"{ours}.optim.lr_schedule": value})
        steps, epochs = source(f"{loop(source)}.max_num_steps"), source(f"{loop(source)}.ppo_epochs") or 1
        if value in ("linear", "cosine") and source(f"{mega}.scheduler.lr_decay_iters") == steps * epochs:
            return write({f"{ours}.optim.lr_schedule": value})
        return untranslated("it decays over runner.max_steps here; constant until that is right")

    def warmup(value: Any, source: ForeignConfig) -> Outcome:
        if not value:
            return same("no warm-up")
        epochs = source(f"{loop(source)}.ppo_epochs") or 1
        why = f"a tick per epoch there ({epochs} in a step), PPO steps here" if epochs > 1 else ""
        return write({f"{ours}.optim.lr_warmup_steps": math.ceil(value / epochs)}, why)

    def warmup_init(value: Any, source: ForeignConfig) -> Outcome:
        if not value or not source(f"{mega}.scheduler.lr_warmup_iters"):
            return same("a warm-up starts at 0")
        return untranslated("a warm-up starts at 0")

    def schedulers(value: Any, source: ForeignConfig) -> Outcome:
        names = [str(each.get("name", "")).rpartition(".")[2] for each in value or [] if "milestones" not in each]
        if not value or names == ["ConstantLR"]:
            return write({f"{ours}.optim.lr_schedule": "constant"})
        if names == ["LinearLR", "ConstantLR"]:
            return warmup(value[0]["kwargs"]["total_iters"], source)
        return untranslated(f"{', '.join(names)}: see {ours}.optim.lr_schedule")

    def decay(value: Any, source: ForeignConfig) -> Outcome:
        first, last = (source(f"{mega}.scheduler.{name}_weight_decay") for name in ("start", "end"))
        if first != last:
            return untranslated("weight decay is constant")
        if last is None or last == value:
            return write({f"{ours}.optim.weight_decay": value})
        return write({f"{ours}.optim.weight_decay": last}, "what its scheduler sets in every step")

    section: Table = {
        "model_name": f"{ours}.model.path",
        "tokenizer.name": tokenizer,
        "tokenizer.chat_template_kwargs": off("the template has no arguments here"),
        "tokenizer.chat_template": only("default", None, why="the tokenizer's own", otherwise="the tokenizer's own"),
        "hf_config_overrides": off("the model's config.json is used as it is"),
        "train_global_batch_size": "data.mini_batch_size" if ours == "actor" else "critic.mini_batch_size",
        "train_micro_batch_size": micro,
        "generation_batch_size": detail("see rollout.max_running_requests"),
        "logprob_batch_size": while_(
            lambda source: _budgeted(source, role) is None,
            "algorithm.logprob_forward_micro_batch_size",
            "log-probs have the token budget of training",
        ),
        "logprob_chunk_size": detail("logits exist for 1,024 positions at a time"),
        "max_total_sequence_length": contained("data.max_response_length"),
        "precision": choice(f"{ours}.model.dtype", DTYPES),
        "offload_optimizer_for_logprob": detail(ENGINE),
        "make_sequence_length_divisible_by": detail("sequences are packed without padding"),
        "max_grad_norm": automodel(f"{ours}.optim.clip_grad"),
        "reward_model_cfg.*": detail("the critic has a value head"),
        "dtensor_cfg.enabled": lambda value, source: (
            write({f"{ours}.training_backend": "fsdp"}) if value else part_of(f"{ours}.training_backend")
        ),
        "dtensor_cfg.cpu_offload": automodel(f"{ours}.cpu_offload"),
        "dtensor_cfg.activation_checkpointing": automodel(f"{ours}.gradient_checkpointing"),
        "dtensor_cfg.tensor_parallel_size": automodel(
            only(1, None, why="one rank holds a layer", otherwise="fsdp shards over all ranks; see training_backend")
        ),
        "dtensor_cfg.sequence_parallel": automodel(detail("it splits activations; results do not depend on it")),
        "dtensor_cfg.context_parallel_size": automodel(f"{ours}.parallel.context"),
        "dtensor_cfg.custom_parallel_plan": automodel(off("see parallel")),
        "dtensor_cfg.lora_cfg.enabled": contained(f"{ours}.lora"),
        "dtensor_cfg.lora_cfg.dim": _lora(role, f"{ours}.lora.rank"),
        "dtensor_cfg.lora_cfg.alpha": _lora(role, f"{ours}.lora.alpha"),
        "dtensor_cfg.lora_cfg.*": _lora(role, lacking("see lora: rank, alpha, target_modules")),
        "dtensor_cfg._v2": detail("its implementation"),
        "megatron_cfg.enabled": lambda value, source: (
            write({f"{ours}.training_backend": "megatron"}) if value else part_of(f"{ours}.training_backend")
        ),
        "megatron_cfg.activation_checkpointing": megatron(f"{ours}.gradient_checkpointing"),
        "megatron_cfg.tensor_model_parallel_size": megatron(f"{ours}.parallel.tensor"),
        "megatron_cfg.pipeline_model_parallel_size": megatron(f"{ours}.parallel.pipeline"),
        "megatron_cfg.context_parallel_size": megatron(f"{ours}.parallel.context"),
        "megatron_cfg.expert_model_parallel_size": megatron(f"{ours}.parallel.expert"),
        "megatron_cfg.sequence_parallel": megatron(f"{ours}.parallel.sequence"),
        "megatron_cfg.num_layers_in_*": megatron(off("pipeline stages have equal numbers of layers")),
        "megatron_cfg.freeze_moe_router": megatron(
            lambda value, _: (
                same("no mixture of experts, or off")
                if not value
                else part_of(f"{ours}.router_aux_loss_coef", "for mixtures of experts: routers train here")
            )
        ),
        "megatron_cfg.fine_grained_activation_offloading": megatron(off("see gradient_checkpointing")),
        "megatron_cfg.offload_modules": megatron(off("see gradient_checkpointing")),
        "megatron_cfg.fp8_cfg.enabled": megatron(off("float32 and bfloat16 only")),
        "megatron_cfg.fp8_cfg.*": megatron(detail("fp8_cfg.enabled is false")),
        "megatron_cfg.pipeline_dtype": megatron(contained(f"{ours}.model.dtype")),
        "megatron_cfg.env_vars": megatron(off("see cluster.node_groups[].env_vars")),
        "megatron_cfg.optimizer.optimizer": megatron(
            only("adam", why="AdamW", otherwise="AdamW is the only optimizer")
        ),
        "megatron_cfg.optimizer.lr": megatron(f"{ours}.optim.lr"),
        "megatron_cfg.optimizer.min_lr": megatron(
            while_(
                lambda source: source(f"{mega}.scheduler.lr_decay_style") != "constant",
                f"{ours}.optim.min_lr",
                "the learning rate is constant",
            )
        ),
        "megatron_cfg.optimizer.weight_decay": megatron(decay),
        "megatron_cfg.optimizer.adam_beta1": megatron(
            lambda value, source: write({f"{ours}.optim.betas": [value, source(f"{mega}.optimizer.adam_beta2")]})
        ),
        "megatron_cfg.optimizer.adam_beta2": megatron(contained(f"{ours}.optim.betas")),
        "megatron_cfg.optimizer.adam_eps": megatron(f"{ours}.optim.eps"),
        "megatron_cfg.optimizer.clip_grad": megatron(f"{ours}.optim.clip_grad"),
        "megatron_cfg.optimizer.bf16": megatron(contained(f"{ours}.model.dtype")),
        "megatron_cfg.optimizer.fp16": megatron(off("float16 is not supported")),
        "megatron_cfg.scheduler.lr_decay_style": megatron(schedule),
        "megatron_cfg.scheduler.lr_decay_iters": megatron(detail("the schedule ends with the run")),
        "megatron_cfg.scheduler.lr_warmup_iters": megatron(warmup),
        "megatron_cfg.scheduler.lr_warmup_init": megatron(warmup_init),
        "megatron_cfg.scheduler.*_weight_decay": megatron(contained(f"{ours}.optim.weight_decay")),
        "megatron_cfg.scheduler.weight_decay_incr_style": megatron(
            only("constant", why="constant", otherwise="weight decay is constant")
        ),
        "megatron_cfg.distributed_data_parallel_config.*": megatron(detail(ENGINE)),
        "megatron_cfg.checkpoint.*": megatron(detail("checkpoints are this platform's")),
        "megatron_cfg.converter_type": megatron(detail(ARCHITECTURE)),
        **{f"megatron_cfg.{name}": megatron(detail(ENGINE)) for name in _MEGATRON_DETAILS.split()},
        "dynamic_batching.enabled": contained(f"{ours}.max_tokens_per_micro_batch"),
        "dynamic_batching.train_mb_tokens": budget("dynamic_batching"),
        "sequence_packing.enabled": contained(f"{ours}.max_tokens_per_micro_batch"),
        "sequence_packing.train_mb_tokens": budget("sequence_packing"),
        "dynamic_batching.logprob_mb_tokens": same_tokens,
        "sequence_packing.logprob_mb_tokens": same_tokens,
        "dynamic_batching.*": detail("sequences are packed without padding"),
        "sequence_packing.*": detail("sequences are packed without padding"),
        "optimizer": off("the optimizer of megatron_cfg is used"),
        "optimizer.name": automodel(only("torch.optim.AdamW", why="AdamW", otherwise="AdamW is the only optimizer")),
        "optimizer.kwargs.lr": automodel(f"{ours}.optim.lr"),
        "optimizer.kwargs.weight_decay": automodel(f"{ours}.optim.weight_decay"),
        "optimizer.kwargs.betas": automodel(f"{ours}.optim.betas"),
        "optimizer.kwargs.eps": automodel(f"{ours}.optim.eps"),
        "optimizer.kwargs.foreach": automodel(detail(ENGINE)),
        "optimizer.kwargs.fused": automodel(detail(ENGINE)),
        "scheduler": automodel(schedulers),
    }
    return {f"{role}.{name}": rule for name, rule in section.items()}


_MEGATRON_DETAILS = (
    "empty_unused_memory_level expert_tensor_parallel_size moe_router_dtype moe_router_load_balancing_type "
    "moe_router_bias_update_rate moe_permute_fusion moe_enable_deepep moe_token_dispatcher_type "
    "moe_shared_expert_overlap use_gloo_process_groups apply_rope_fusion bias_activation_fusion "
    "gradient_accumulation_fusion use_fused_weighted_squared_relu defer_fp32_logits moe_per_layer_logging train_iters "
    "optimizer.params_dtype optimizer.sgd_momentum optimizer.use_distributed_optimizer "
    "optimizer.use_precision_aware_optimizer optimizer.optimizer_cpu_offload optimizer.optimizer_offload_fraction "
    "optimizer.overlap_cpu_optimizer_d2h_h2d"
)


def _lora(role: str, rule: str | Rule) -> Rule:
    return while_(
        lambda source: bool(source(f"{role}.dtensor_cfg.lora_cfg.enabled")), rule, "lora_cfg.enabled is false"
    )


def _vllm(name: str) -> Rule:
    return to(f"rollout.engine_args.{name}")


TABLE: Table = {
    **_loop("ppo"),
    **_loop("grpo"),
    "loss_fn.disable_ppo_ratio": lambda value, _: (
        write({"algorithm.policy_loss": "reinforce"}) if value else same("the ratio is used")
    ),
    _KL: _kl,
    "loss_fn.reference_policy_kl_type": _by_place("algorithm.kl_penalty", "algorithm.kl_loss_type"),
    "loss_fn.use_kl_in_reward": contained("algorithm.use_kl_in_reward"),
    "loss_fn.kl_input_clamp_value": only(
        20, 20.0, why="exponents are limited to 20", otherwise="exponents are limited to 20"
    ),
    "loss_fn.kl_output_clamp_value": _by_place("algorithm.kl_output_clip", "algorithm.kl_loss_output_clip"),
    "loss_fn.use_on_policy_kl_approximation": off("see algorithm.kl_loss_grad"),
    "loss_fn.use_importance_sampling_correction": _importance,
    "loss_fn.truncated_importance_sampling_*": contained("algorithm.rollout_is"),
    "loss_fn.sequence_level_importance_ratios": lambda value, _: (
        write({"algorithm.policy_loss": "gspo"}) if value else same("a ratio per token")
    ),
    "loss_fn.use_cispo": off("see algorithm.policy_loss cispo: its bounds are around 1"),
    "loss_fn.token_level_loss": choice("algorithm.loss_agg_func", {True: "token-mean", False: "seq-mean-token-mean"}),
    "loss_fn.force_on_policy_ratio": lambda value, _: (
        write({"algorithm.old_log_probs": "current"}) if value else same("log-probs before the update")
    ),
    "checkpointing.enabled": contained("runner.save_interval"),
    "checkpointing.save_period": _save,
    "checkpointing.keep_top_k": to("runner.keep_checkpoints", why="the newest stay, not the best"),
    "checkpointing.metric_name": lacking("the newest checkpoints stay, not the best"),
    "checkpointing.higher_is_better": lacking("the newest checkpoints stay, not the best"),
    "checkpointing.checkpoint_must_save_by": off("a run that receives SIGTERM saves its step"),
    **details(
        "checkpointing",
        "model_save_format save_consolidated save_optimizer model_cache_dir model_repo_id is_peft peft_config",
        "checkpoints are this platform's",
    ),
    **_learner("policy", "actor"),
    **_learner("value", "critic"),
    "policy.generation.backend": choice("rollout.backend", {"vllm": "vllm", "sglang": "sglang"}),
    "policy.generation.max_new_tokens": _response,
    "policy.generation.top_k": top_k("rollout.sampling.top_k"),
    "policy.generation.val_top_k": top_k("rollout.val_sampling.top_k"),
    "policy.generation.stop_token_ids": off("see rollout.stop: texts"),
    "policy.generation.num_prompts_per_step": contained("data.train_batch_size"),
    "policy.generation.mcore_generation_config.*": detail("of another generation engine"),
    "policy.generation.vllm_cfg.tensor_parallel_size": contained("cluster.component_placement"),
    "policy.generation.vllm_cfg.pipeline_parallel_size": only(1, None, why="one stage", otherwise="no pipeline stages"),
    "policy.generation.vllm_cfg.expert_parallel_size": only(
        1, None, why="one rank", otherwise="see rollout.engine_args"
    ),
    "policy.generation.vllm_cfg.max_model_len": _vllm("max_model_len"),
    "policy.generation.vllm_cfg.enforce_eager": _vllm("enforce_eager"),
    "policy.generation.vllm_cfg.kv_cache_dtype": only(
        "auto", None, why="the model's", otherwise="see rollout.engine_args"
    ),
    "policy.generation.vllm_cfg.precision": contained("actor.model.dtype"),
    **details(
        "policy.generation.vllm_cfg",
        "async_engine logprobs_mode use_deep_gemm num_last_layers_in_bf16 num_first_layers_in_bf16 "
        "enable_vllm_metrics_logger vllm_metrics_logger_interval skip_tokenizer_init load_format",
        ENGINE,
    ),
    "policy.generation.vllm_kwargs": off("give it as rollout.engine_args"),
    "policy.generation.vllm_kwargs.*": lacking("give it as rollout.engine_args"),
    "policy.generation.colocated.*": contained("cluster.component_placement"),
    "data.max_input_seq_length": _prompt_tokens,
    "data.shuffle": "data.shuffle",
    "data.num_workers": detail("how it reads rows"),
    "data.use_multiple_dataloader": detail("how it reads rows"),
    "data.train.dataset_name": _dataset("train"),
    "data.validation.dataset_name": _dataset("validation"),
    "data.train.data_path": _data_path("train"),
    "data.validation.data_path": _data_path("validation"),
    "data.train.split": detail("a file per part"),
    "data.validation.split": detail("a file per part"),
    "data.*.input_key": contained("data.task.prompt_column"),
    "data.*.output_key": contained("data.task.answer_column"),
    "data.default.prompt_file": off("its text is data.prompt_template, with {question} in place of {}"),
    "data.default.system_prompt_file": off("its text is data.system_prompt"),
    "reward_penalties.*": off("see reward.functions"),
    "data.default.processor": detail("how it reads rows"),
    "data.default.env_name": contained("reward.type"),
    "env.math.math_verify_impl": lambda value, source: choice(
        "reward.type",
        {"hf_math_verify": "math_verify", "dapo_math_verify": "math_verify"},
        "" if value == "hf_math_verify" else "there the answer follows 'Answer:'",
    )(value, source),
    "env.math.num_workers": "reward.num_workers",
    "env.math.*": lacking("see reward"),
    "logger.log_dir": detail("logs are in runner.output_dir, beside the checkpoints"),
    "logger.wandb_enabled": contained("runner.logger_backends"),
    "logger.tensorboard_enabled": _loggers,
    "logger.mlflow_enabled": off("loggers are tensorboard, wandb and trackio"),
    "logger.swanlab_enabled": off("loggers are tensorboard, wandb and trackio"),
    "logger.monitor_gpus": detail("metrics show the memory of GPUs"),
    "logger.gpu_monitoring.*": detail("metrics show the memory of GPUs"),
    "logger.wandb.name": "runner.experiment_name",
    "logger.wandb.project": _of_logger("wandb", lacking("loggers have no project here")),
    "logger.wandb.*": _of_logger("wandb", lacking("loggers have no options here")),
    "logger.swanlab.*": _of_logger("swanlab", lacking("there is no such logger")),
    "logger.mlflow.*": _of_logger("mlflow", lacking("there is no such logger")),
    "logger.tensorboard": detail("no options"),
    "logger.tensorboard.*": detail("no options"),
    "cluster.gpus_per_node": _placement,
    "cluster.num_nodes": contained("cluster.inventory.nodes"),
    **details("cluster", "master_port_range_low master_port_range_high segment_size", "ports are chosen by the run"),
}
# Where it differs from ours, or decides what another key means. From NeMo-RL 0.7
_COMMON: dict[str, Any] = {
    "cluster.num_nodes": 1,
    "loss_fn.kl_output_clamp_value": 10.0,
    "loss_fn.token_level_loss": True,
}
_OF_PPO: dict[str, Any] = {
    "ppo.adv_estimator.name": "gae",
    "ppo.num_prompts_per_step": 32,
    "ppo.num_generations_per_prompt": 16,
    "ppo.max_num_steps": 100_000,
    "ppo.ppo_epochs": 4,
    "ppo.val_period": 20,
    "ppo.max_val_samples": 256,
    "ppo.seed": 42,
}


def _defaults(keys: Mapping[str, Any]) -> Mapping[str, Any]:
    ppo = any(key.startswith("ppo.") for key in keys)
    return {**(_OF_PPO if ppo else {"grpo.adv_estimator.name": "grpo"}), **_COMMON}


NEMO_RL = System(
    "nemo-rl", "NeMo-RL", ("policy.model_name", "loss_fn.*", "cluster.gpus_per_node", "logger.*"), TABLE, _defaults
)
