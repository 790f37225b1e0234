"""The arguments of TRL's PPOTrainer and GRPOTrainer, as a mapping or as a command line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rl_platform.launch.tools.convert.conversion import System
from rl_platform.launch.tools.convert.outcome import (
    ENGINE,
    MANY_STEPS,
    NO_STEPS,
    ForeignConfig,
    Outcome,
    Rule,
    Table,
    choice,
    contained,
    detail,
    lacking,
    loggers,
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

# arguments that only one of the trainers has
_PPO = (
    *(
        "num_ppo_epochs",
        "sft_model_path",
        "reward_model_path",
        "response_length",
        "kl_coef",
        "kl_estimator",
        "cliprange",
    ),
    *(
        "cliprange_value",
        "vf_coef",
        "lam",
        "total_episodes",
        "missing_eos_penalty",
        "num_mini_batches",
        "whiten_rewards",
    ),
    *("local_rollout_forward_batch_size", "num_sample_generations", "stop_token", "stop_token_id"),
)
_GRPO = (
    *("num_generations", "max_completion_length", "reward_funcs", "num_iterations", "epsilon", "epsilon_high", "delta"),
    *("scale_rewards", "steps_per_generation", "generation_batch_size", "mask_truncated_completions"),
    *("importance_sampling_level", "reward_weights"),
)
_LOSSES = {
    "grpo": "seq-mean-token-mean",
    "dapo": "token-mean",
    "bnpo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}
_HUB = "models stay in the output folder"
_MODES = {
    "token_truncate": ("token", "truncate"),
    "token_mask": ("token", "icepop"),
    "sequence_truncate": ("sequence", "truncate"),
    "sequence_mask": ("sequence", "icepop"),
}
_KIND = "(trainer)"  # key of the defaults that says which trainer it is


def is_ppo(source: ForeignConfig) -> bool:
    return bool(source(_KIND) == "PPO")


def processes(source: ForeignConfig) -> int:
    return int(source("launcher.num_processes") or source("world_size") or 1)


def step_rows(source: ForeignConfig) -> int:
    """Sequences behind one optimizer step."""
    rows = source("per_device_train_batch_size") * source("gradient_accumulation_steps")
    return int(rows) * processes(source)


def generated_rows(source: ForeignConfig) -> int:
    """Sequences of one generation phase."""
    per_step = source("steps_per_generation")
    if source("generation_batch_size") is not None:
        return int(source("generation_batch_size"))
    if per_step is not None and not is_ppo(source):
        return int(source("per_device_train_batch_size") * per_step) * processes(source)
    return step_rows(source)


def updates(source: ForeignConfig) -> int:
    """Steps as the trainer counts them, in one of ours: GRPO counts optimizer steps, PPO rollouts."""
    if is_ppo(source):
        return 1
    return max(generated_rows(source) // step_rows(source), 1) * int(source("num_iterations"))


def total_steps(source: ForeignConfig) -> int | None:
    if is_ppo(source):
        episodes = source("total_episodes")
        return math.ceil(episodes / step_rows(source)) if episodes else None
    steps = source("max_steps") or -1
    return math.ceil(steps / updates(source)) if steps > 0 else None


def both(source: ForeignConfig, key: str, value: Any) -> Outcome:
    """The key of the actor and, with PPO, of the critic."""
    critic = {f"critic.{key}": value} if is_ppo(source) else {}
    return write({f"actor.{key}": value, **critic})


def of_learners(key: str) -> Rule:
    return lambda value, source: same("not set") if value is None else both(source, key, value)


def _trainer(value: Any, source: ForeignConfig) -> Outcome:
    ppo, count = value == "PPO", processes(source)
    kl = (source("kl_coef" if ppo else "beta") or 0) > 0
    learners = ["actor", *(["critic"] if ppo else []), *(["reference"] if kl else [])]
    engine = int(source("vllm_tensor_parallel_size") or 1) if source("use_vllm") else 1
    if engine == 1:
        placed = {",".join([*learners, "rollout", "reward"]): "all"}
    else:
        ranks = count // engine
        placed = {
            ",".join([*learners, "reward"]): "all",
            "rollout": f"0-{count - 1}:{f'0-{ranks - 1}' if ranks > 1 else 0}",
        }
    values = {
        "runner.task_type": "reasoning",
        "algorithm.adv_type": "gae" if ppo else "grpo",
        "algorithm.loss_type": "actor",
        "critic.use_critic_model": ppo,
        "cluster.component_placement": placed,
        **({"cluster.inventory.nodes": 1, "cluster.inventory.gpus_per_node": count} if count > 1 else {}),
    }
    return write(values, "one process per GPU: all components share them")


def _accumulation(_: Any, source: ForeignConfig) -> Outcome:
    generated, group = generated_rows(source), 1 if is_ppo(source) else int(source("num_generations"))
    if generated % group:
        return untranslated(f"{generated} sequences of a generation are no whole groups of {group}")
    values = {"data.train_batch_size": generated // group, "data.mini_batch_size": step_rows(source)}
    return write(values, f"per_device_train_batch_size times this times {processes(source)} processes")


def _mini_batches(value: Any, _: ForeignConfig) -> Outcome:
    if value == 1:
        return part_of("data.mini_batch_size")
    return untranslated("TRL accumulates gradients over the whole batch all the same: one optimizer step per epoch")


def _episodes(_: Any, source: ForeignConfig) -> Outcome:
    return write({"runner.max_steps": total_steps(source)}, f"steps of {step_rows(source)} sequences")


def _max_steps(value: Any, source: ForeignConfig) -> Outcome:
    if is_ppo(source):
        return untranslated("TRL's PPO reads total_episodes") if (value or -1) > 0 else same("not set")
    if (value or -1) <= 0:
        return same("not set")
    return write({"runner.max_steps": total_steps(source)}, "optimizer steps there, PPO steps here")


def _epochs(value: Any, source: ForeignConfig) -> Outcome:
    if total_steps(source) is not None:
        return same("the number of steps ends the run")
    return write({"runner.max_epochs": math.ceil(value), "runner.max_steps": MANY_STEPS}, NO_STEPS)


def _schedule(value: Any, source: ForeignConfig) -> Outcome:
    if str(value) in ("constant", "constant_with_warmup"):
        return both(source, "optim.lr_schedule", "constant")
    if value not in ("linear", "cosine"):
        return untranslated(f"{value} has no counterpart; known: constant, linear, cosine")
    if total_steps(source) is None:
        return untranslated("it decays over runner.max_steps here: set both, it is constant until then")
    return both(source, "optim.lr_schedule", value)


def _warmup(value: Any, source: ForeignConfig) -> Outcome:
    return both(source, "optim.lr_warmup_steps", math.ceil(value / updates(source))) if value else same("no warm-up")


def _warmup_ratio(value: Any, source: ForeignConfig) -> Outcome:
    if not value:
        return same("no warm-up")
    if (steps := total_steps(source)) is None:
        return untranslated("a share of all steps, and the arguments do not say how many there are")
    return both(source, "optim.lr_warmup_steps", math.ceil(value * steps))


def _betas(_: Any, source: ForeignConfig) -> Outcome:
    return both(source, "optim.betas", [source("adam_beta1"), source("adam_beta2")])


def _dtype(value: Any, source: ForeignConfig) -> Outcome:
    return both(source, "model.dtype", "bfloat16" if value else "float32")


def _interval(key: str, strategy: str) -> Rule:
    def rule(value: Any, source: ForeignConfig) -> Outcome:
        if source(strategy) in ("no", "epoch"):
            return same(f"{strategy} decides")
        if not isinstance(value, int):
            return untranslated("a share of all steps; a number of steps here")
        return write({key: math.ceil(value / updates(source))})

    return rule


def _strategy(key: str) -> Rule:
    def rule(value: Any, _: ForeignConfig) -> Outcome:
        if value == "no":
            return write({key: 0}, "at the end only")
        return part_of(key) if value == "steps" else untranslated("once per epoch there; steps here")

    return rule


def _policy_model(value: Any, source: ForeignConfig) -> Outcome:
    if not is_ppo(source):
        return write({"actor.model.path": value})
    own = value == source("sft_model_path")
    return same("the model's own tokenizer") if own else write({"actor.model.tokenizer": value}, "the tokenizer")


def _reward_model(value: Any, source: ForeignConfig) -> Outcome:
    values = {"reward.type": "model", "reward.model.path": value}
    if is_ppo(source):
        why = "TRL starts the value model from it too; here critic.model.path is the actor's"
        return write({**values, "reward.model.use_chat_template": False}, why)
    return write(values)


def _reward_functions(value: Any, _: ForeignConfig) -> Outcome:
    names = value if isinstance(value, list) else [value]
    if names == ["accuracy_reward"]:
        return write({"reward.type": "math_verify"})
    return untranslated("functions of another signature: reward.type module:function, or reward.functions")


def _dataset(value: Any, source: ForeignConfig) -> Outcome:
    answers = None if is_ppo(source) or source("reward_model_name_or_path") else "solution"
    values = {"type": "dataset", "path": value, "prompt_column": "prompt", "answer_column": answers}
    return write({f"data.task.{key}": each for key, each in values.items()})


def _epsilon(value: Any, source: ForeignConfig) -> Outcome:
    high = source("epsilon_high")
    return write({"algorithm.clip_ratio_low": value, **({"algorithm.clip_ratio_high": value} if high is None else {})})


def _beta(value: Any, _: ForeignConfig) -> Outcome:
    if not value:
        return same("no KL term")
    values = {"algorithm.use_kl_loss": True, "algorithm.kl_loss_coef": value, "algorithm.kl_loss_type": "k3"}
    return write(values, "k3 in the loss")


def _kl_estimator(value: Any, _: ForeignConfig) -> Outcome:
    return write({"algorithm.kl_penalty": value, **({"algorithm.kl_output_clip": None} if value == "k3" else {})})


def _loss_type(value: Any, _: ForeignConfig) -> Outcome:
    if value not in _LOSSES:
        return untranslated(f"{value} has no counterpart; known: {', '.join(_LOSSES)}; see algorithm.policy_loss")
    values = {"algorithm.loss_agg_func": _LOSSES[value]}
    if value.endswith("grpo"):
        values["algorithm.loss_agg_denominator"] = "nominal"
    return write(values, "tokens of the whole mini-batch, not of a micro-batch" if value == "bnpo" else "")


def _of_vllm(rule: str | Rule) -> Rule:
    return while_(lambda source: bool(source("use_vllm")), rule, "use_vllm is false")


def _correction(value: Any, source: ForeignConfig) -> Outcome:
    if not value:
        return same("off there")
    level, mode = _MODES[source("vllm_importance_sampling_mode")]
    key, low = "algorithm.rollout_is", source("vllm_importance_sampling_clip_min")
    values = {f"{key}.level": level, f"{key}.mode": mode, f"{key}.high": source("vllm_importance_sampling_clip_max")}
    return write({**values, **({f"{key}.low": low} if low is not None else {})})


def _lora(name: str) -> Rule:
    return while_(lambda source: bool(source("use_peft")), of_learners(f"lora.{name}"), "use_peft is false")


def _named(value: Any, _: ForeignConfig) -> Outcome:
    return write({"runner.output_dir": value})


TABLE: Table = {
    _KIND: _trainer,
    "launcher.num_processes": contained("cluster.component_placement", "a process per GPU"),
    "launcher.config_file": lacking(
        "the launcher's settings are in another file: give --num_processes on the command line"
    ),
    "launcher.*": detail("a setting of its launcher"),
    "world_size": contained("cluster.component_placement"),
    "per_device_train_batch_size": of_learners("micro_batch_size"),
    "gradient_accumulation_steps": _accumulation,
    "steps_per_generation": contained("data.train_batch_size"),
    "generation_batch_size": contained("data.train_batch_size"),
    "num_mini_batches": _mini_batches,
    "total_episodes": _episodes,
    "max_steps": _max_steps,
    "num_train_epochs": _epochs,
    "learning_rate": of_learners("optim.lr"),
    "lr_scheduler_type": _schedule,
    "warmup_steps": _warmup,
    "warmup_ratio": _warmup_ratio,
    "adam_beta1": _betas,
    "adam_beta2": lambda value, source: (
        part_of("actor.optim.betas") if "adam_beta1" in source.given else _betas(value, source)
    ),
    "adam_epsilon": of_learners("optim.eps"),
    "weight_decay": of_learners("optim.weight_decay"),
    "max_grad_norm": of_learners("optim.clip_grad"),
    "optim": only("adamw_torch", "adamw_torch_fused", why="AdamW", otherwise="AdamW is the only optimizer"),
    "bf16": _dtype,
    "fp16": off("float16 is not supported: bfloat16 or float32"),
    "gradient_checkpointing": of_learners("gradient_checkpointing"),
    "gradient_checkpointing_kwargs*": detail(ENGINE),
    "seed": "runner.seed",
    "data_seed": only(None, why="runner.seed", otherwise="runner.seed is the seed of all"),
    "output_dir": _named,
    "logging_steps": detail("every step is logged"),
    "logging_strategy": detail("every step is logged"),
    "logging_dir": detail("logs are in runner.output_dir"),
    "logging_first_step": detail("every step is logged"),
    "save_steps": _interval("runner.save_interval", "save_strategy"),
    "save_strategy": _strategy("runner.save_interval"),
    "eval_steps": _interval("runner.val_check_interval", "eval_strategy"),
    "eval_strategy": _strategy("runner.val_check_interval"),
    "do_eval": contained("runner.val_check_interval"),
    "report_to": loggers("runner.logger_backends"),
    "log_completions": contained("runner.log_samples"),
    "num_completions_to_print": "runner.log_samples",
    "num_sample_generations": contained("runner.log_samples"),
    "push_to_hub": off(_HUB),
    "hub_*": off(_HUB),
    "dataset_name": _dataset,
    "dataset_config": "data.task.name",
    "dataset_train_split": "data.task.split",
    "dataset_test_split": "data.task.val_split",
    "dataset_num_proc": detail("how it reads rows"),
    "dataloader_*": detail("how it reads rows"),
    "remove_unused_columns": detail("how it reads rows"),
    "max_prompt_length": to("data.max_prompt_length", why="longer prompts are left out here, shortened there"),
    "stop_token": only("eos", None, why="EOS ends a response", otherwise="see rollout.stop"),
    "stop_token_id": off("EOS ends a response; see rollout.stop"),
    "missing_eos_penalty": off("see algorithm.overlong: a penalty or a factor of truncated responses"),
    "model_name_or_path": _policy_model,
    "reward_model_path": _reward_model,
    "reward_model_name_or_path": _reward_model,
    "reward_funcs": _reward_functions,
    "reward_weights": off("see reward.functions"),
    "model_revision": only("main", None, why="the newest", otherwise="give a folder as actor.model.path"),
    "trust_remote_code": detail("code of a model is never run; its family is built in"),
    "attn_implementation": detail(ENGINE),
    **dict.fromkeys(("dtype", "torch_dtype"), detail("trained parameters are float32; bf16 decides the forward pass")),
    "model_init_kwargs*": lacking("see actor.model"),
    "disable_dropout": detail("dropout is always off"),
    "temperature": "rollout.sampling.temperature",
    "top_p": "rollout.sampling.top_p",
    "top_k": top_k("rollout.sampling.top_k"),
    "min_p": off("see top_p and top_k"),
    "repetition_penalty": only(1, None, why="none", otherwise="there is no penalty"),
    "generation_kwargs*": off("see rollout.sampling"),
    "local_rollout_forward_batch_size": "algorithm.logprob_forward_micro_batch_size",
    "kl_coef": lambda value, _: write({"algorithm.use_kl_in_reward": value > 0, "algorithm.kl_ctrl.kl_coef": value}),
    "kl_estimator": _kl_estimator,
    "cliprange": to("algorithm.clip_ratio_low", "algorithm.clip_ratio_high"),
    "cliprange_value": "algorithm.value_clip",
    "gamma": "algorithm.gamma",
    "lam": "algorithm.gae_lambda",
    "whiten_rewards": off("it whitens rewards of tokens, with the KL penalty; see algorithm.reward_whitening"),
    "beta": _beta,
    "epsilon": _epsilon,
    "loss_type": _loss_type,
    "importance_sampling_level": lambda value, _: (
        same("a ratio per token") if value == "token" else write({"algorithm.policy_loss": "gspo"})
    ),
    "scale_rewards": choice(
        "algorithm.grpo_std_normalization", {"group": True, "none": False, True: True, False: False}
    ),
    "sync_ref_model": off("the reference is frozen"),
    "ref_model_*": while_(
        lambda source: bool(source("sync_ref_model")), lacking("the reference is frozen"), "off there"
    ),
    "top_entropy_quantile": only(1, 1.0, None, why="all tokens", otherwise="all tokens are trained on"),
    "entropy_coef": "algorithm.entropy_bonus",
    "use_liger_*": detail(ENGINE),
    "use_vllm": lambda value, _: write({"rollout.backend": "vllm" if value else "torch"}),
    "vllm_mode": _of_vllm(only("colocate", why="all components share all GPUs", otherwise="see component_placement")),
    "vllm_gpu_memory_utilization": _of_vllm("rollout.gpu_memory_utilization"),
    "vllm_tensor_parallel_size": _of_vllm(contained("cluster.component_placement")),
    "vllm_max_model_length": _of_vllm("rollout.engine_args.max_model_len"),
    "vllm_enable_sleep_mode": _of_vllm("rollout.offload"),
    "vllm_importance_sampling_correction": _of_vllm(_correction),
    "vllm_importance_sampling_*": _of_vllm(contained("algorithm.rollout_is")),
    "vllm_*": _of_vllm(lacking("see rollout.engine_args")),
    "use_peft": contained("actor.lora"),
    "lora_r": _lora("rank"),
    "lora_alpha": _lora("alpha"),
    "lora_target_modules": _lora("target_modules"),
    "lora_dropout": while_(
        lambda source: bool(source("use_peft")), off("adapters have no dropout"), "use_peft is false"
    ),
    "lora_task_type": detail("adapters of a language model"),
    "use_cpu": detail("the machine decides"),
    "ds3_gather_for_generation": detail(ENGINE),
    "deepspeed": lacking("see actor.training_backend"),
    "torch_compile": detail(ENGINE),
    "ddp_*": detail(ENGINE),
}
# Where it differs from ours, or decides what another key means. From TRL 1.16
_COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_iterations": 1,
    "num_train_epochs": 3.0,
    "lr_scheduler_type": "linear",
    "bf16": True,
    "gradient_checkpointing": True,
    "seed": 42,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
}
_OF_PPO = {
    **_COMMON,
    "learning_rate": 3e-6,
    "sft_model_path": "EleutherAI/pythia-160m",
    "reward_model_path": "EleutherAI/pythia-160m",
    "response_length": 53,
    "temperature": 0.7,
    "num_ppo_epochs": 4,
    "local_rollout_forward_batch_size": 64,
    "kl_coef": 0.05,
    "kl_estimator": "k1",
    "vf_coef": 0.1,
    "cliprange_value": 0.2,
    "lam": 0.95,
}
_OF_GRPO = {
    **_COMMON,
    "learning_rate": 1e-6,
    "num_generations": 8,
    "max_completion_length": 512,
    "epsilon": 0.2,
    "loss_type": "dapo",
    "scale_rewards": "group",
    "use_vllm": False,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_gpu_memory_utilization": 0.3,
}


def _defaults(keys: Mapping[str, Any]) -> Mapping[str, Any]:
    ppo = any(key in keys for key in _PPO) and not any(key in keys for key in _GRPO)
    return {_KIND: "PPO", **_OF_PPO} if ppo else {_KIND: "GRPO", **_OF_GRPO}


TRL = System("trl", "TRL", (*_PPO, *_GRPO), TABLE, _defaults)
