"""The arguments of TRL's PPOTrainer and GRPOTrainer, as a mapping or as a command line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

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
    loggers,
    number,
    part_of,
    same,
    sampled,
    shared_gpus,
    unknown,
    untranslated,
    while_,
    whole,
    write,
)

# arguments that only one of the trainers has
_OF_PPO = (
    "num_ppo_epochs sft_model_path reward_model_path response_length kl_coef kl_estimator cliprange "
    "cliprange_value vf_coef lam total_episodes missing_eos_penalty num_mini_batches whiten_rewards "
    "local_rollout_forward_batch_size num_sample_generations stop_token stop_token_id"
)
_OF_GRPO = (
    "num_generations max_completion_length reward_funcs num_iterations epsilon epsilon_high delta "
    "scale_rewards steps_per_generation generation_batch_size mask_truncated_completions "
    "importance_sampling_level reward_weights"
)
_PPO, _GRPO = _OF_PPO.split(), _OF_GRPO.split()
_LOSSES = {
    "grpo": "seq-mean-token-mean",
    "dapo": "token-mean",
    "bnpo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}
_MODES = {
    "token_truncate": ("token", "truncate"),
    "token_mask": ("token", "icepop"),
    "sequence_truncate": ("sequence", "truncate"),
    "sequence_mask": ("sequence", "icepop"),
}
_KIND = "(trainer)"  # key of the defaults that says which trainer it is


def _is_ppo(source: ForeignConfig) -> bool:
    return source(_KIND) == "PPO"


def _processes(source: ForeignConfig) -> int:
    return whole(source("launcher.num_processes") or source("world_size") or 1)


def _step_rows(source: ForeignConfig) -> int:
    """Sequences behind one optimizer step."""
    rows = source.number("per_device_train_batch_size") * source.number("gradient_accumulation_steps")
    return int(rows) * _processes(source)


def _generated_rows(source: ForeignConfig) -> int:
    """Sequences of one generation phase."""
    if source("generation_batch_size") is not None:
        return whole(source("generation_batch_size"))
    if source("steps_per_generation") is not None and not _is_ppo(source):
        rows = source.number("per_device_train_batch_size") * source.number("steps_per_generation")
        return int(rows) * _processes(source)
    return _step_rows(source)


def _updates(source: ForeignConfig) -> int:
    """Steps as the trainer counts them, in one of ours: GRPO counts optimizer steps, PPO rollouts."""
    if _is_ppo(source):
        return 1
    return max(_generated_rows(source) // _step_rows(source), 1) * whole(source("num_iterations"))


def _total_steps(source: ForeignConfig) -> int | None:
    if _is_ppo(source):
        episodes = source("total_episodes")
        return math.ceil(number(episodes) / _step_rows(source)) if episodes else None
    steps = source.positive("max_steps")
    return math.ceil(steps / _updates(source)) if steps else None


def _both(source: ForeignConfig, key: str, value: Value) -> Outcome:
    """The key of the actor and, with PPO, of the critic."""
    critic = {f"critic.{key}": value} if _is_ppo(source) else {}
    return write({f"actor.{key}": value, **critic})


def _of_learners(key: str) -> Rule:
    return lambda value, source: same("not set") if value is None else _both(source, key, value)


def _trainer(value: Value, source: ForeignConfig) -> Outcome:
    ppo, count = value == "PPO", _processes(source)
    kl = source.positive("kl_coef" if ppo else "beta")
    apart = kl and not source("use_peft")  # with adapters the actor without them is the reference
    learners = ["actor", *(["critic"] if ppo else []), *(["reference"] if apart else [])]
    engine = source.whole("vllm_tensor_parallel_size", 1) if source("use_vllm") else 1
    values: dict[str, Value] = {
        "runner.task_type": "reasoning",
        "algorithm.adv_type": "gae" if ppo else "grpo",
        "algorithm.loss_type": "actor",
        "critic.use_critic_model": ppo,
        "cluster.component_placement": shared_gpus(learners, count, engine),
        **({"cluster.inventory.nodes": 1, "cluster.inventory.gpus_per_node": count} if count > 1 else {}),
    }
    return write(values, "one process per GPU: all components share them")


def _accumulation(_: Value, source: ForeignConfig) -> Outcome:
    generated, group = _generated_rows(source), 1 if _is_ppo(source) else whole(source("num_generations"))
    if generated % group:
        return untranslated(f"{generated} sequences of a generation are no whole groups of {group}")
    values = {"data.train_batch_size": generated // group, "data.mini_batch_size": _step_rows(source)}
    return write(values, f"per_device_train_batch_size times this times {_processes(source)} processes")


def _mini_batches(value: Value, _: ForeignConfig) -> Outcome:
    if value == 1:
        return part_of("data.mini_batch_size")
    return untranslated("TRL accumulates gradients over the whole batch all the same: one optimizer step per epoch")


def _episodes(_: Value, source: ForeignConfig) -> Outcome:
    return write({"runner.max_steps": _total_steps(source)}, f"steps of {_step_rows(source)} sequences")


def _max_steps(value: Value, source: ForeignConfig) -> Outcome:
    if _is_ppo(source):
        return untranslated("TRL's PPO reads total_episodes") if number(value or -1) > 0 else same("not set")
    if number(value or -1) <= 0:
        return same("not set")
    return write({"runner.max_steps": _total_steps(source)}, "optimizer steps there, PPO steps here")


def _epochs(value: Value, source: ForeignConfig) -> Outcome:
    if _total_steps(source) is not None:
        return same("the number of steps ends the run")
    return write({"runner.max_epochs": math.ceil(number(value)), "runner.max_steps": MANY_STEPS}, NO_STEPS)


def _schedule(value: Value, source: ForeignConfig) -> Outcome:
    if str(value) in ("constant", "constant_with_warmup"):
        return _both(source, "optim.lr_schedule", "constant")
    if value not in ("linear", "cosine"):
        return unknown(value, ("constant", "linear", "cosine"))
    if _total_steps(source) is None:
        return untranslated("it decays over runner.max_steps here: set both, it is constant until then")
    return _both(source, "optim.lr_schedule", value)


def _warmup(value: Value, source: ForeignConfig) -> Outcome:
    if not value:
        return same("no warm-up")
    return _both(source, "optim.lr_warmup_steps", math.ceil(number(value) / _updates(source)))


def _warmup_ratio(value: Value, source: ForeignConfig) -> Outcome:
    if not value:
        return same("no warm-up")
    if (steps := _total_steps(source)) is None:
        return untranslated("a share of all steps, and the arguments do not say how many there are")
    return _both(source, "optim.lr_warmup_steps", math.ceil(number(value) * steps))


def _betas(_: Value, source: ForeignConfig) -> Outcome:
    return _both(source, "optim.betas", [source("adam_beta1"), source("adam_beta2")])


def _beta2(value: Value, source: ForeignConfig) -> Outcome:
    return part_of("actor.optim.betas") if "adam_beta1" in source.given else _betas(value, source)


def _dtype(value: Value, source: ForeignConfig) -> Outcome:
    return _both(source, "model.dtype", "bfloat16" if value else "float32")


def _interval(key: str, strategy: str) -> Rule:
    def rule(value: Value, source: ForeignConfig) -> Outcome:
        if source(strategy) in ("no", "epoch"):
            return same(f"{strategy} decides")
        if not isinstance(value, int):
            return untranslated("a share of all steps; a number of steps here")
        return write({key: math.ceil(value / _updates(source))})

    return rule


def _strategy(key: str) -> Rule:
    def rule(value: Value, _: ForeignConfig) -> Outcome:
        if value == "no":
            return write({key: 0}, "at the end only")
        return part_of(key) if value == "steps" else untranslated("once per epoch there; steps here")

    return rule


def _policy_model(value: Value, source: ForeignConfig) -> Outcome:
    if not _is_ppo(source):
        return write({"actor.model.path": value})
    own = value == source("sft_model_path")
    return same("the model's own tokenizer") if own else write({"actor.model.tokenizer": value}, "the tokenizer")


def _reward_model(value: Value, source: ForeignConfig) -> Outcome:
    values: dict[str, Value] = {"reward.type": "model", "reward.model.path": value}
    if _is_ppo(source):
        why = "TRL starts the value model from it too; here critic.model.path is the actor's"
        return write({**values, "reward.model.use_chat_template": False}, why)
    return write(values)


def _reward_functions(value: Value, _: ForeignConfig) -> Outcome:
    if value in ("accuracy_reward", "[accuracy_reward]", ["accuracy_reward"]):
        return write({"reward.type": "math_verify"})
    return untranslated(REASONS["own_reward"])


def _dataset(value: Value, source: ForeignConfig) -> Outcome:
    answers = None if _is_ppo(source) or source("reward_model_name_or_path") else "solution"
    files = source("data_files")
    values = {"type": "dataset", "path": value} if files is None else {"type": "file", "path": files}
    values |= {"prompt_column": "prompt", "answer_column": answers}
    return write({f"data.task.{key}": each for key, each in values.items()})


def _epsilon(value: Value, source: ForeignConfig) -> Outcome:
    high = source("epsilon_high")
    return write({"algorithm.clip_ratio_low": value, **({"algorithm.clip_ratio_high": value} if high is None else {})})


def _kl_coef(value: Value, _: ForeignConfig) -> Outcome:
    return write({"algorithm.use_kl_in_reward": number(value) > 0, "algorithm.kl_ctrl.kl_coef": value})


def _beta(value: Value, _: ForeignConfig) -> Outcome:
    if not value:
        return same("no KL term")
    values = {"algorithm.use_kl_loss": True, "algorithm.kl_loss_coef": value, "algorithm.kl_loss_type": "k3"}
    return write(values, "k3 in the loss")


def _kl_estimator(value: Value, _: ForeignConfig) -> Outcome:
    return write({"algorithm.kl_penalty": value, **({"algorithm.kl_output_clip": None} if value == "k3" else {})})


def _loss_type(value: Value, _: ForeignConfig) -> Outcome:
    if not isinstance(value, str) or value not in _LOSSES:
        return untranslated(f"{value} has no counterpart; known: {', '.join(_LOSSES)}; see algorithm.policy_loss")
    values = {"algorithm.loss_agg_func": _LOSSES[value]}
    if value.endswith("grpo"):
        values["algorithm.loss_agg_denominator"] = "nominal"
    return write(values, "tokens of the whole mini-batch, not of a micro-batch" if value == "bnpo" else "")


def _ratio_level(value: Value, _: ForeignConfig) -> Outcome:
    return same("a ratio per token") if value == "token" else write({"algorithm.policy_loss": "gspo"})


def _correction(value: Value, source: ForeignConfig) -> Outcome:
    if not value:
        return same("off there")
    level, mode = _MODES[str(source("vllm_importance_sampling_mode"))]
    key, low = "algorithm.rollout_is", source("vllm_importance_sampling_clip_min")
    values = {f"{key}.level": level, f"{key}.mode": mode, f"{key}.high": source("vllm_importance_sampling_clip_max")}
    return write({**values, **({f"{key}.low": low} if low is not None else {})})


def _lora(name: str) -> Rule:
    return while_(lambda source: bool(source("use_peft")), _of_learners(f"lora.{name}"), "use_peft is false")


RULES: Table = {
    _KIND: _trainer,
    "per_device_train_batch_size": _of_learners("micro_batch_size"),
    "gradient_accumulation_steps": _accumulation,
    "num_mini_batches": _mini_batches,
    "total_episodes": _episodes,
    "max_steps": _max_steps,
    "num_train_epochs": _epochs,
    "learning_rate": _of_learners("optim.lr"),
    "lr_scheduler_type": _schedule,
    "warmup_steps": _warmup,
    "warmup_ratio": _warmup_ratio,
    "adam_beta1": _betas,
    "adam_beta2": _beta2,
    "adam_epsilon": _of_learners("optim.eps"),
    "weight_decay": _of_learners("optim.weight_decay"),
    "max_grad_norm": _of_learners("optim.clip_grad"),
    "bf16": _dtype,
    "gradient_checkpointing": _of_learners("gradient_checkpointing"),
    "output_dir": lambda value, _: write({"runner.output_dir": value}),
    "save_steps": _interval("runner.save_interval", "save_strategy"),
    "save_strategy": _strategy("runner.save_interval"),
    "eval_steps": _interval("runner.val_check_interval", "eval_strategy"),
    "eval_strategy": _strategy("runner.val_check_interval"),
    "report_to": loggers,
    "dataset_name": _dataset,
    "data_files": lambda *_: part_of("data.task.path"),
    "model_name_or_path": _policy_model,
    "reward_model_path": _reward_model,
    "reward_model_name_or_path": _reward_model,
    "reward_funcs": _reward_functions,
    "kl_coef": _kl_coef,
    "kl_estimator": _kl_estimator,
    "beta": _beta,
    "epsilon": _epsilon,
    "loss_type": _loss_type,
    "importance_sampling_level": _ratio_level,
    "use_vllm": lambda value, _: write({"rollout.backend": "vllm" if value else "torch"}),
    "vllm_importance_sampling_correction": while_(
        lambda source: bool(source("use_vllm")), _correction, "use_vllm is false"
    ),
    # PPO's samples of an evaluation are almost greedy
    **{name: sampled(name, lambda source: not _is_ppo(source)) for name in ("temperature", "top_p", "top_k")},
    "lora_r": _lora("rank"),
    "lora_alpha": _lora("alpha"),
    "lora_target_modules": _lora("target_modules"),
}


def _kinds(keys: Mapping[str, Value]) -> Sequence[str]:
    ppo = any(key in keys for key in _PPO) and not any(key in keys for key in _GRPO)
    return ("trainer_ppo", "all", "ppo") if ppo else ("trainer_grpo", "all", "grpo")


TRL = System("trl", "TRL", (*_PPO, *_GRPO), RULES, kinds=_kinds)
