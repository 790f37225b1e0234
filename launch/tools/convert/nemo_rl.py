"""The keys of NeMo-RL: YAML of its PPO and GRPO runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rl_platform.launch.tools.convert.conversion import System
from rl_platform.launch.tools.convert.outcome import (
    ForeignConfig,
    Outcome,
    Rule,
    Table,
    Value,
    choice,
    interval,
    number,
    part_of,
    same,
    sampled,
    unknown,
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


def _loop(source: ForeignConfig) -> str:
    """Returns the section of the training loop: ppo or grpo."""
    return _kinds(source.given)[0]


def _kinds(keys: Mapping[str, Value]) -> Sequence[str]:
    return ("ppo" if any(key.startswith("ppo.") for key in keys) else "grpo", "all")


def _estimator(value: Value, source: ForeignConfig) -> Outcome:
    names = {"gae": "gae", "raw_reward": "raw", "grpo": "grpo", "reinforce_plus_plus": "reinforce_plus_plus"}
    if value not in names:
        return unknown(value, names)
    subtracts = source(f"{_loop(source)}.adv_estimator.minus_baseline") is not False  # the mean of the group
    baseline = "_baseline" if value == "reinforce_plus_plus" and subtracts else ""
    ours = {"runner.task_type": "reasoning", "algorithm.adv_type": names[value] + baseline}
    return write({**ours, "algorithm.loss_type": "actor", "critic.use_critic_model": value == "gae"})


def _placement(_: Value, source: ForeignConfig) -> Outcome:
    """Colocated: all components share all GPUs. Else the last GPUs of each node, or the last nodes, generate."""
    nodes, per_node = source.whole("cluster.num_nodes"), source.whole("cluster.gpus_per_node")
    total, engine = nodes * per_node, source.whole("policy.generation.vllm_cfg.tensor_parallel_size", 1)
    learners = ["actor"]
    apart: list[str] = []
    if source(f"{_loop(source)}.adv_estimator.name") == "gae":  # components of one process have one layout here
        (learners if _layout("policy", source) == _layout("value", source) else apart).append("critic")
    adapters = [source(f"policy.{name}.enabled") for name in ("dtensor_cfg.lora_cfg", "megatron_cfg.peft")]
    if source.positive(_KL) and not any(adapters):  # without its adapters the actor is the reference
        learners.append("reference")
    first, why = 0, "colocated: all components share all GPUs"
    if source("policy.generation.colocated.enabled") is False:
        resources = "policy.generation.colocated.resources"
        if source(f"{resources}.gpus_per_node") is None:
            return untranslated("generation has GPUs of its own, and the file does not say how many")
        own = source.whole(f"{resources}.gpus_per_node", 0) * source.whole(f"{resources}.num_nodes", 1)
        first, why = total - own, "not colocated: the last GPUs generate"
        if first <= 0:
            return untranslated("no GPU is left for training")
    ranks = (total - first) // engine
    rollout = _range(first, total) + ("" if engine == 1 else f":{_range(0, ranks)}")
    if first == 0 and engine == 1:
        placed = {",".join([*learners, "rollout", "reward"]): "all", **dict.fromkeys(apart, "all")}
    else:
        trained = _range(0, first or total)
        placed = {",".join([*learners, "reward"]): trained, **dict.fromkeys(apart, trained), "rollout": rollout}
    values: dict[str, Value] = {"cluster.inventory.nodes": nodes, "cluster.inventory.gpus_per_node": per_node}
    address = {"cluster.address": "auto"} if nodes > 1 else {}
    return write({**values, "cluster.component_placement": placed, **address}, why)


def _layout(role: str, source: ForeignConfig) -> list[int]:
    """Returns how the model of a role is split: 1 where it is not."""
    if not source(f"{role}.megatron_cfg.enabled"):
        return [1, 1, source.whole(f"{role}.dtensor_cfg.context_parallel_size", 1), 1]
    sizes = ("tensor_model", "pipeline_model", "context", "expert_model")
    return [source.whole(f"{role}.megatron_cfg.{size}_parallel_size", 1) for size in sizes]


def _range(first: int, end: int) -> str:
    return str(first) if end - first == 1 else f"{first}-{end - 1}"


def _kl(value: Value, source: ForeignConfig) -> Outcome:
    if not value:
        return same("no KL term")
    if source("loss_fn.use_kl_in_reward"):
        return write(
            {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": value}, "a penalty in the reward"
        )
    return write({"algorithm.use_kl_loss": True, "algorithm.kl_loss_coef": value}, "a term of the loss")


def _by_place(in_reward: str, in_loss: str) -> Rule:
    def rule(value: Value, source: ForeignConfig) -> Outcome:
        if not source(_KL):
            return same("no KL term")
        return write({in_reward if source("loss_fn.use_kl_in_reward") else in_loss: value})

    return rule


def _importance(value: Value, source: ForeignConfig) -> Outcome:
    if not value:
        return same("off there")
    kind = source("loss_fn.truncated_importance_sampling_type")
    if kind not in _MODES:
        return unknown(kind, _MODES)
    key, low = "algorithm.rollout_is", source("loss_fn.truncated_importance_sampling_ratio_min")
    values = {f"{key}.mode": _MODES[kind], f"{key}.high": source("loss_fn.truncated_importance_sampling_ratio")}
    return write({**values, **({f"{key}.low": low} if low is not None and kind != "tis" else {})})


_TOTAL = "prompt and response share max_total_sequence_length there; half of it each"


def _prompt_tokens(value: Value, source: ForeignConfig) -> Outcome:
    if value is None:
        return same("not set")
    total = source("policy.max_total_sequence_length")
    if total is not None and number(value) >= number(total):
        return untranslated(_TOTAL, {"data.max_prompt_length": number(total) // 2})
    return write({"data.max_prompt_length": value})


def _response(value: Value, source: ForeignConfig) -> Outcome:
    total, tokens = source.number("policy.max_total_sequence_length"), number(value)
    room = total - number(source("data.max_input_seq_length") or 0)
    if room <= 0:
        return untranslated(_TOTAL, {"data.max_response_length": total - total // 2})
    why = "" if tokens <= room else "what max_total_sequence_length leaves beside data.max_input_seq_length"
    return write({"data.max_response_length": min(tokens, room)}, why)


def _dataset(part: str) -> Rule:
    """A dataset by its name. part: train or validation; older files name one for both, `data.dataset_name`."""

    def rule(value: Value, source: ForeignConfig) -> Outcome:
        if value == "OpenMathInstruct-2" and part == "train":
            split = source("data.train.split") or "train_1M"
            columns = {"prompt_column": "problem", "answer_column": "expected_answer"}
            values = {"type": "dataset", "path": "nvidia/OpenMathInstruct-2", "split": split, **columns}
            return write({f"data.task.{key}": each for key, each in values.items()})
        if not isinstance(value, str) or value not in _DATASETS:
            paths = (source(f"data.{part}.data_path"), source("data.train_data_path"))
            if value == "ResponseDataset" and any(path is not None for path in paths):
                return same("the path of the data names the file")
            return untranslated(f"{value} is a dataset of NeMo-RL: see data.task, or rl-platform data")
        verb, train, val = _DATASETS[value]
        if part == "validation":
            return write({"data.task.val_path": val}, f"rl-platform data {verb} writes it")
        return write({"data.task.type": "jsonl", "data.task.path": train}, f"rl-platform data {verb} writes it")

    return rule


def _default_dataset(value: Value, source: ForeignConfig) -> Outcome:
    """The dataset of a part that names none."""
    if source("data.train.dataset_name") is not None:
        return same("data.train names a dataset")
    return _dataset("train")(value, source)


def _data_path(part: str) -> Rule:
    def rule(value: Value, source: ForeignConfig) -> Outcome:
        if value is None:
            return same("not set")
        if part == "validation":
            return write({"data.task.val_path": value})
        columns = {
            "data.task.prompt_column": _column("input_key", source) or "input",
            "data.task.answer_column": _column("output_key", source) or "output",
        }
        return write({"data.task.type": "jsonl", "data.task.path": value, **columns})

    return rule


def _column(name: str, source: ForeignConfig) -> Value:
    """Returns the column of training data: its own, the default of all parts, or that of a file with flat keys."""
    keys = (f"data.train.{name}", f"data.default.{name}", f"data.{name}")
    return next((source(key) for key in keys if source(key) is not None), None)


def _epochs(value: Value, _: ForeignConfig) -> Outcome:
    return write({"runner.max_epochs": value}) if number(value) > 0 else same("only the number of steps counts")


def _loggers(_: Value, source: ForeignConfig) -> Outcome:
    names = [name for name in ("tensorboard", "wandb") if source(f"logger.{name}_enabled")]
    return write({"runner.logger_backends": names}, "the terminal and metrics.jsonl always log")


def _save(value: Value, source: ForeignConfig) -> Outcome:
    if source("checkpointing.enabled") is False:
        return write({"runner.save_interval": 0}, "off there; here the last step is always saved")
    return interval("runner.save_interval")(value, source)


def _sampling(section: str) -> Rule:
    def rule(value: Value, source: ForeignConfig) -> Outcome:
        if not value:
            return same("off there")
        if section == "ppo":
            return untranslated("NeMo-RL's PPO accepts it and never filters; see algorithm.dynamic_sampling")
        limit = source("grpo.dynamic_sampling_max_gen_batches")
        return write({"algorithm.dynamic_sampling.max_rounds": limit}, "a section that is there is switched on")

    return rule


def _sampled(name: str) -> Rule:
    """A setting of sampling, which validations share unless they have their own."""
    return sampled(name, lambda source: source(f"policy.generation.val_{name}") is None)


def _staleness(value: Value, source: ForeignConfig) -> Outcome:
    age = source(f"{_loop(source)}.async_{_loop(source)}.max_trajectory_age_steps") or 1
    if not value:
        return same("off there")
    return write({"runner.max_staleness": age}, "rollouts are collected during training")


def _loop_rules(section: str) -> Table:
    """The keys of `ppo` or `grpo`."""
    return {
        f"{section}.max_num_epochs": _epochs,
        f"{section}.use_dynamic_sampling": _sampling(section),
        f"{section}.async_{section}.enabled": _staleness,
        f"{section}.adv_estimator.name": _estimator,
        f"{section}.adv_estimator.minus_baseline": while_(
            lambda source: source(f"{section}.adv_estimator.name") == "reinforce_plus_plus",
            lambda *_: part_of("algorithm.adv_type"),
            "of reinforce_plus_plus",
        ),
        f"{section}.advantage_clip_low": lambda value, source: (
            same("not set")
            if value is None
            else write({"algorithm.advantage_clip": [value, source(f"{section}.advantage_clip_high")]})
        ),
    }


def _batches(role: str, ours: str) -> Table:
    """Micro-batches, which a number of sequences or a budget of tokens limits."""

    def budgeted(source: ForeignConfig) -> str | None:
        """Returns the section that limits micro-batches by tokens."""
        names = ("sequence_packing", "dynamic_batching")
        return next((name for name in names if source(f"{role}.{name}.enabled")), None)

    def micro(value: Value, source: ForeignConfig) -> Outcome:
        if section := budgeted(source):
            return same(f"{section}: the token budget limits micro-batches")
        return write({f"{ours}.micro_batch_size": value})

    def budget(section: str) -> Rule:
        key = f"{ours}.max_tokens_per_micro_batch"
        return while_(lambda source: budgeted(source) == section, key, f"{section} is off")

    def same_tokens(value: Value, source: ForeignConfig) -> Outcome:
        section = budgeted(source)
        if section is None or value == source(f"{role}.{section}.train_mb_tokens"):
            return same("log-probs have the token budget of training")
        return untranslated("log-probs have the token budget of training here")

    rows = "algorithm.logprob_forward_micro_batch_size"
    table: Table = {
        "train_micro_batch_size": micro,
        "logprob_batch_size": while_(
            lambda source: budgeted(source) is None, rows, "log-probs have the token budget of training"
        ),
        "dynamic_batching.train_mb_tokens": budget("dynamic_batching"),
        "sequence_packing.train_mb_tokens": budget("sequence_packing"),
        "dynamic_batching.logprob_mb_tokens": same_tokens,
        "sequence_packing.logprob_mb_tokens": same_tokens,
    }
    return {f"{role}.{name}": rule for name, rule in table.items()}


def _schedule(role: str, ours: str) -> Table:
    """The schedulers of Megatron and of automodel; both count a tick per epoch."""
    mega = f"{role}.megatron_cfg.scheduler"

    def ticks(source: ForeignConfig) -> int | float:
        return number(source(f"{_loop(source)}.ppo_epochs") or 1)

    def style(value: Value, source: ForeignConfig) -> Outcome:
        if value == "constant":
            return write({f"{ours}.optim.lr_schedule": value})
        steps = source.number(f"{_loop(source)}.max_num_steps") * ticks(source)
        if value in ("linear", "cosine") and source(f"{mega}.lr_decay_iters") == steps:
            return write({f"{ours}.optim.lr_schedule": value})
        return untranslated("it decays over runner.max_steps here; constant until that is right")

    def warmup(value: Value, source: ForeignConfig) -> Outcome:
        if not value:
            return same("no warm-up")
        epochs = ticks(source)
        why = f"a tick per epoch there ({epochs} in a step), PPO steps here" if epochs > 1 else ""
        return write({f"{ours}.optim.lr_warmup_steps": math.ceil(number(value) / epochs)}, why)

    def warmup_init(value: Value, source: ForeignConfig) -> Outcome:
        if not value or not source(f"{mega}.lr_warmup_iters"):
            return same("a warm-up starts at 0")
        return untranslated("a warm-up starts at 0")

    def automodel(value: Value, source: ForeignConfig) -> Outcome:
        if not value:
            return write({f"{ours}.optim.lr_schedule": "constant"})
        if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
            raise TypeError
        names = [str(each.get("name", "")).rpartition(".")[2] for each in value if "milestones" not in each]
        if names == ["ConstantLR"]:
            return write({f"{ours}.optim.lr_schedule": "constant"})
        if names == ["LinearLR", "ConstantLR"]:
            options = value[0]["kwargs"]
            done, start = warmup(options["total_iters"], source), options.get("start_factor", 1 / 3)  # torch's default
            notes = [done.why, f"it begins at {start:.3g} of the rate there, at 0 here" if start else ""]
            return replace(done, why="; ".join(filter(None, notes)))
        return untranslated(f"{', '.join(names)}: see {ours}.optim.lr_schedule")

    return {
        f"{mega}.lr_decay_style": _of_megatron(role, style),
        f"{mega}.lr_warmup_iters": _of_megatron(role, warmup),
        f"{mega}.lr_warmup_init": _of_megatron(role, warmup_init),
        f"{role}.scheduler": while_(
            lambda source: not source(f"{role}.megatron_cfg.enabled"), automodel, "megatron_cfg.enabled is true"
        ),
    }


def _learner(role: str, ours: str) -> Table:
    """Returns further rules that `policy` and `value` share."""
    mega = f"{role}.megatron_cfg"

    def tokenizer(value: Value, source: ForeignConfig) -> Outcome:
        own = value == source(f"{role}.model_name")
        return same("the model's own") if own else write({f"{ours}.model.tokenizer": value})

    def decay(value: Value, source: ForeignConfig) -> Outcome:
        first, last = (source(f"{mega}.scheduler.{name}_weight_decay") for name in ("start", "end"))
        if first != last:
            return untranslated("weight decay is constant")
        if last is None or last == value:
            return write({f"{ours}.optim.weight_decay": value})
        return write({f"{ours}.optim.weight_decay": last}, "what its scheduler sets in every step")

    def frozen_router(value: Value, _: ForeignConfig) -> Outcome:
        if not value:
            return same("no mixture of experts, or off")
        return part_of(f"{ours}.router_aux_loss_coef", "for mixtures of experts: routers train here")

    def betas(value: Value, source: ForeignConfig) -> Outcome:
        return write({f"{ours}.optim.betas": [value, source(f"{mega}.optimizer.adam_beta2")]})

    def not_constant(source: ForeignConfig) -> bool:
        return source(f"{mega}.scheduler.lr_decay_style") != "constant"

    backend = f"{ours}.training_backend"
    return {
        f"{role}.tokenizer.name": tokenizer,
        f"{role}.dtensor_cfg.enabled": lambda value, _: write({backend: "fsdp"}) if value else part_of(backend),
        f"{mega}.enabled": lambda value, _: write({backend: "megatron"}) if value else part_of(backend),
        f"{mega}.freeze_moe_router": _of_megatron(role, frozen_router),
        f"{mega}.optimizer.min_lr": _of_megatron(
            role, while_(not_constant, f"{ours}.optim.min_lr", "the learning rate is constant")
        ),
        f"{mega}.optimizer.weight_decay": _of_megatron(role, decay),
        f"{mega}.optimizer.adam_beta1": _of_megatron(role, betas),
        **_batches(role, ours),
        **_schedule(role, ours),
    }


def _of_megatron(role: str, rule: Rule) -> Rule:
    return while_(lambda source: bool(source(f"{role}.megatron_cfg.enabled")), rule, "megatron_cfg.enabled is false")


def _if_true(key: str, ours: Value, otherwise: str) -> Rule:
    return lambda value, _: write({key: ours}) if value else same(otherwise)


def _answers(value: Value, source: ForeignConfig) -> Outcome:
    names = {"hf_math_verify": "math_verify", "dapo_math_verify": "math_verify"}
    why = "" if value == "hf_math_verify" else "there the answer follows 'Answer:'"
    return choice("reward.type", names, why)(value, source)


RULES: Table = {
    **_loop_rules("ppo"),
    **_loop_rules("grpo"),
    **_learner("policy", "actor"),
    **_learner("value", "critic"),
    _KL: _kl,
    "loss_fn.disable_ppo_ratio": _if_true("algorithm.policy_loss", "reinforce", "the ratio is used"),
    "loss_fn.sequence_level_importance_ratios": _if_true("algorithm.policy_loss", "gspo", "a ratio per token"),
    "loss_fn.force_on_policy_ratio": _if_true("algorithm.old_log_probs", "current", "log-probs before the update"),
    "loss_fn.reference_policy_kl_type": _by_place("algorithm.kl_penalty", "algorithm.kl_loss_type"),
    "loss_fn.kl_output_clamp_value": _by_place("algorithm.kl_output_clip", "algorithm.kl_loss_output_clip"),
    "loss_fn.use_importance_sampling_correction": _importance,
    "policy.generation.max_new_tokens": _response,
    **{f"policy.generation.{name}": _sampled(name) for name in ("temperature", "top_p", "top_k")},
    "data.max_input_seq_length": _prompt_tokens,
    "data.train.dataset_name": _dataset("train"),
    "data.validation.dataset_name": _dataset("validation"),
    "data.default.dataset_name": _default_dataset,
    "data.dataset_name": _dataset("train"),
    "data.train.data_path": _data_path("train"),
    "data.train_data_path": _data_path("train"),
    "data.validation.data_path": _data_path("validation"),
    "data.val_data_path": _data_path("validation"),
    "data.val_dataset_name": _dataset("validation"),
    "env.math.math_verify_impl": _answers,
    "checkpointing.save_period": _save,
    "logger.tensorboard_enabled": _loggers,
    "cluster.gpus_per_node": _placement,
}
MARKS = ("policy.model_name", "loss_fn.*", "cluster.gpus_per_node", "logger.*")
NEMO_RL = System("nemo-rl", "NeMo-RL", MARKS, RULES, kinds=_kinds)
