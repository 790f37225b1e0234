"""The keys of verl (`verl.trainer.main_ppo`) whose values are computed; it is given overrides or YAML."""

from __future__ import annotations

import math
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
    loggers,
    number,
    part_of,
    same,
    shared_gpus,
    texts,
    times,
    unknown,
    untranslated,
    while_,
    whole,
    write,
)
from rl_platform.placement.estimates.architectures import known_options

ARR, ACTOR, ROLLOUT = "actor_rollout_ref", "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_ESTIMATORS = {
    **{name: name for name in ("gae", "grpo", "rloo", "opo", "remax", "reinforce_plus_plus")},
    **{name: name for name in ("reinforce_plus_plus_baseline", "optimal_token_baseline")},
    "grpo_vectorized": "grpo",
    "rloo_vectorized": "rloo",
    "tir_optimal_token_baseline": "optimal_token_baseline",
}
_AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
_STAGE = f"{ACTOR}.megatron.override_transformer_config.num_layers_in_{{}}_pipeline_stage"
_REWARD_MODELS = ("reward_model.enable", "reward.reward_model.enable")


def _uses_critic(source: ForeignConfig) -> bool:
    enabled = source("critic.enable")
    return source("algorithm.adv_estimator") == "gae" if enabled is None else bool(enabled)


def _by_megatron(source: ForeignConfig, role: str) -> bool:
    """Returns whether Megatron trains a role: its strategy, or the trainer's config, says so."""
    strategy = source(f"{role}.strategy")
    return strategy == "megatron" if strategy is not None else _is_megatron_config(source)


def _is_megatron_config(source: ForeignConfig) -> bool:
    return source("model_engine") == "megatron" or "megatron" in str(source("config_name"))


def _gpus(source: ForeignConfig) -> int:
    return source.whole("trainer.nnodes") * source.whole("trainer.n_gpus_per_node")


def _config_name(_: Value, source: ForeignConfig) -> Outcome:
    if not _is_megatron_config(source):
        return same("the defaults of verl's trainer")
    return write({"actor.training_backend": "megatron", "critic.training_backend": "megatron"})


def _adv_estimator(value: Value, source: ForeignConfig) -> Outcome:
    if value not in _ESTIMATORS:
        return unknown(value, _ESTIMATORS)
    values = {"runner.task_type": "reasoning", "algorithm.adv_type": _ESTIMATORS[value], "algorithm.loss_type": "actor"}
    return write({**values, "critic.use_critic_model": _uses_critic(source)})


def _pool(_: Value, source: ForeignConfig) -> Outcome:
    nodes = source.whole("trainer.nnodes")
    owned = min(_engine_gpus(source), source.whole("trainer.n_gpus_per_node"))
    learners = ["actor", "critic"] if _uses_critic(source) else ["actor"]
    apart = "critic" in learners and _layout("critic", source) != _layout(ACTOR, source)
    if apart:  # components of one process have one layout here
        learners.remove("critic")
    # Without its adapters the actor is the reference.
    adapters = source.positive(f"{ARR}.model.lora_rank") or source.positive(f"{ARR}.model.lora.rank")
    if not adapters and (source("algorithm.use_kl_in_reward") or source(f"{ACTOR}.use_kl_loss")):
        learners.append("reference")
    values: dict[str, Value] = {
        "cluster.inventory.nodes": nodes,
        "cluster.inventory.gpus_per_node": source.whole("trainer.n_gpus_per_node"),
        "cluster.component_placement": {
            **shared_gpus(learners, _gpus(source), owned),
            **({"critic": "all"} if apart else {}),
        },
    }
    address = {"cluster.address": "auto"} if nodes > 1 else {}
    return write({**values, **address}, "one pool: all components share all GPUs")


def _engine_gpus(source: ForeignConfig) -> int:
    sizes = ("tensor_model", "pipeline_model")
    return math.prod(source.whole(f"{ROLLOUT}.{size}_parallel_size", 1) for size in sizes)


def _engine(_: Value, source: ForeignConfig) -> Outcome:
    if _engine_gpus(source) > source.whole("trainer.n_gpus_per_node"):
        return untranslated("an engine is on one node here: it has all GPUs of a node")
    return part_of("cluster.component_placement", "GPUs of each rollout rank")


def _stages(ours: str, role: str) -> Rule:
    """Pipeline stages. Here they have equally many layers, so their number is lowered if they do not there."""

    def rule(value: Value, source: ForeignConfig) -> Outcome:
        key, stages = f"{ours}.parallel.pipeline", whole(value)
        path = source("critic.model.path") if role == "critic" else None
        known = known_options(str(path or source(f"{ARR}.model.path")))
        layers = whole(known["num_hidden_layers"]) if known else 0
        if layers % stages or any(source(_STAGE.format(end)) for end in ("first", "last")):
            of_model = f"the {layers} layers of the model" if layers else "the model's layers"
            equal = math.gcd(layers, stages) if layers else 1
            return untranslated(f"each pipeline stage has equally many of {of_model} here", {key: equal})
        return write({key: stages})

    return rule


def _layout(role: str, source: ForeignConfig) -> list[int]:
    """Returns how Megatron splits the model of a role: 1 where it is not used."""
    sizes = ("tensor_model", "pipeline_model", "context", "expert_model")
    return [source.whole(f"{role}.megatron.{size}_parallel_size", 1) for size in sizes]


def _clip_ratio(value: Value, source: ForeignConfig) -> Outcome:
    sides = {side: source(f"{ACTOR}.clip_ratio_{side}") for side in ("low", "high")}
    if unset := [side for side, own in sides.items() if own is None]:
        return write({f"algorithm.clip_ratio_{side}": value for side in unset})
    if value in sides.values():
        return same("clip_ratio_low and clip_ratio_high decide")
    low, high = sides.values()
    return untranslated(f"verl does not read it beside clip_ratio_low ({low}) and clip_ratio_high ({high})")


def _aggregation(value: Value, _: ForeignConfig) -> Outcome:
    if value not in _AGGREGATIONS:
        return unknown(value, _AGGREGATIONS)
    nominal = {"algorithm.loss_agg_denominator": "nominal"} if str(value).startswith("seq-mean") else {}
    return write({"algorithm.loss_agg_func": value, **nominal})


def _kl_loss_type(value: Value, _: ForeignConfig) -> Outcome:
    bound = {"algorithm.kl_loss_output_clip": 10.0} if str(value).rstrip("+") in ("k3", "low_var_kl") else {}
    return write({"algorithm.kl_loss_type": value, **bound})


def _filter_groups(value: Value, source: ForeignConfig) -> Outcome:
    if not value:
        return same("off there")
    limit = source.whole("algorithm.filter_groups.max_num_gen_batches", 1000)
    return write({"algorithm.dynamic_sampling.max_rounds": limit}, "a section that is there is switched on")


def _rollout_is(value: Value, source: ForeignConfig) -> Outcome:
    if value is None:
        return same("off there")
    key, bound = "algorithm.rollout_is", source("algorithm.rollout_correction.rollout_is_threshold")
    low, _, high = str(bound).rpartition("_")
    values = {f"{key}.level": value, f"{key}.mode": "truncate", f"{key}.high": float(high)}
    return write({**values, **({f"{key}.low": float(low)} if low else {})})


def _paths(value: Value) -> list[str]:
    return [f"${{env:HOME}}{path[1:]}" if path.startswith("~/") else path for path in texts(value)]


def _files(value: Value, source: ForeignConfig) -> Outcome:
    """Parquet files of verl: the columns `prompt` (messages) and `reward_model.ground_truth`."""
    train, val = _paths(value), _paths(source("data.val_files"))
    columns = {"prompt_column": source("data.prompt_key"), "answer_column": "reward_model.ground_truth"}
    pairs = val if len(val) == len(train) else []
    sources: list[dict[str, Value]] = [
        {"type": "file", "path": path, **columns, **({"val_path": pairs[index]} if pairs else {})}
        for index, path in enumerate(train)
    ]
    why = "only data.val_size rows of a validation file are used" if val else ""
    if len(sources) == 1:
        return write({f"data.task.{key}": each for key, each in sources[0].items()}, why)
    labels = [PurePath(path).parent.name or f"part{index}" for index, path in enumerate(train)]
    if len(set(labels)) < len(labels):
        labels = [f"{label}{index}" for index, label in enumerate(labels)]
    weighted = "sources of equal weight here; there every row has the same weight"
    named = [{"label": label, **each} for label, each in zip(labels, sources, strict=True)]
    return write({"data.sources": named}, f"{weighted}; {why}" if why else weighted)


def _val_files(value: Value, source: ForeignConfig) -> Outcome:
    train, val = len(_paths(source("data.train_files"))), len(_paths(value))
    if train != val:
        return untranslated(f"{val} validation files beside {train} training files: pairs here")
    return part_of("data.task" if train == 1 else "data.sources")


def _as(other: str, ours: str) -> Rule:
    """Returns the rule of a key that has one key here with `other`, whose value it has in verl unless it is set."""

    def rule(value: Value, source: ForeignConfig) -> Outcome:
        if value is None or value == source(other):
            return part_of(ours)
        return untranslated(f"{ours} is one key for both here, and {other} is {source(other)}")

    return rule


def _reference_strategy(value: Value, source: ForeignConfig) -> Outcome:
    backends = {"fsdp": "fsdp", "fsdp2": "fsdp", "megatron": "megatron"}
    own = "megatron" if _by_megatron(source, ACTOR) else "fsdp"
    if value is None or (isinstance(value, str) and backends.get(value) == own):
        return part_of("actor.training_backend", "the reference uses the actor's engine")
    return choice("reference.training_backend", backends)(value, source)


def _generated_tokens(value: Value, source: ForeignConfig) -> Outcome:
    longest = source.whole("data.max_response_length")
    if value is None or value == longest:
        return part_of("data.max_response_length")
    if whole(value) > longest:
        return untranslated(f"responses end at data.max_response_length here, {longest}")
    return write({f"rollout.{sampling}.max_new_tokens": value for sampling in ("sampling", "val_sampling")})


def _truncation(value: Value, source: ForeignConfig) -> Outcome:
    if value == "error" or source("data.filter_overlong_prompts"):
        return same("longer prompts are left out and counted")
    return untranslated(f"{value} shortens long prompts there; here they are left out and counted")


def _dynamic(source: ForeignConfig, role: str) -> bool:
    """Returns whether micro-batches of a role have a token budget. The critic follows the actor unless it says
    otherwise."""
    own = source(f"{role}.use_dynamic_bsz")
    return bool(own if own is not None or role == ACTOR else source(f"{ACTOR}.use_dynamic_bsz"))


def _log_prob_tokens(value: Value, source: ForeignConfig) -> Outcome:
    if not _dynamic(source, ACTOR) or value == source(f"{ACTOR}.ppo_max_token_len_per_gpu"):
        return same("log-probs have the token budget of training")
    return untranslated("log-probs have the token budget of training here")


def _epochs(value: Value, source: ForeignConfig) -> Outcome:
    steps = source("trainer.total_training_steps")
    rest = ({"runner.max_steps": steps}, "") if steps is not None else ({"runner.max_steps": MANY_STEPS}, NO_STEPS)
    return write({"runner.max_epochs": value, **rest[0]}, rest[1])


def _project(value: Value, source: ForeignConfig) -> Outcome:
    name = source("trainer.experiment_name")
    if source("trainer.default_local_dir") is not None:
        return untranslated("loggers have no project here")
    return write({"runner.output_dir": f"runs/{value}/{name}" if name else f"runs/{value}"}, "a folder of the project")


def _critic_warmup(value: Value, _: ForeignConfig) -> Outcome:
    why = "steps count from 1 there: K means K - 1" if value else ""
    return write({"algorithm.policy_training_start_step": max(number(value) - 1, 0)}, why)


def _resume(value: Value, source: ForeignConfig) -> Outcome:
    if value == "resume_path":
        return write({"runner.resume": source("trainer.resume_from_path")})
    return choice("runner.resume", {"auto": "auto", "disable": "never"})(value, source)


def _reward_manager(value: Value, source: ForeignConfig) -> Outcome:
    if any(source(key) for key in _REWARD_MODELS):
        return same("the reward model scores")
    if value not in (None, "naive", "batch", "prime", "dapo"):
        return untranslated(f"{value} has no counterpart; reward.type: module:function")
    return write({"reward.type": "math_verify"}, REASONS["scoring"])


def _reward_model(value: Value, source: ForeignConfig) -> Outcome:
    if not any(source(key) for key in _REWARD_MODELS):
        return same("the reward model is off")
    return write({"reward.type": "model", "reward.model.path": value})


def _batches(role: str, ours: str) -> Table:
    """Mini-batches and micro-batches of actor or critic."""

    def all_gpus(value: Value, source: ForeignConfig) -> Outcome:
        if value is None or _dynamic(source, role):
            return same("not set" if value is None else "use_dynamic_bsz is true")
        rows = max(number(value) // _gpus(source), 1)
        return write({f"{ours}.micro_batch_size": rows}, "of all GPUs together there, of one here")

    def budget(value: Value, source: ForeignConfig) -> Outcome:
        if not _dynamic(source, role):
            return same("use_dynamic_bsz is false")
        split = source.whole(f"{role}.ulysses_sequence_parallel_size", 1)
        why = f"times {split}, the ranks that share a micro-batch" if split > 1 else ""
        return write({f"{ours}.max_tokens_per_micro_batch": number(value) * split}, why)

    return {
        f"{role}.ppo_mini_batch_size": times(
            "data.mini_batch_size" if ours == "actor" else "critic.mini_batch_size",
            lambda source: source.whole(f"{ROLLOUT}.n", 1),
            f"prompts there, sequences here: times {ROLLOUT}.n",
        ),
        f"{role}.ppo_micro_batch_size_per_gpu": while_(
            lambda source: not _dynamic(source, role),
            f"{ours}.micro_batch_size",
            "use_dynamic_bsz is true: the token budget limits micro-batches",
        ),
        f"{role}.ppo_micro_batch_size": all_gpus,
        f"{role}.ppo_max_token_len_per_gpu": budget,
    }


def _optimizer(role: str, ours: str) -> Table:
    """The learning rate and the limit of gradients of actor or critic."""

    def steps_set(source: ForeignConfig) -> bool:
        return number(source(f"{role}.optim.lr_warmup_steps") or -1) > 0

    def warmup_share(value: Value, source: ForeignConfig) -> Outcome:
        if not value:
            return same("no warm-up")
        steps = source("trainer.total_training_steps")
        if steps is None:
            return untranslated("a share of all steps, and the file does not say how many there are")
        warmup = int(number(value) * number(steps))
        return write({f"{ours}.optim.lr_warmup_steps": warmup}, f"{value} of {steps} steps")

    def schedule(value: Value, source: ForeignConfig) -> Outcome:
        if value is None:
            return same("not set")
        if value not in ("constant", "linear", "cosine"):
            return unknown(value, ("constant", "linear", "cosine"))
        if value != "constant" and source("trainer.total_training_steps") is None:
            return untranslated(f"it decays over runner.max_steps here. {NO_STEPS}; constant until both are set")
        return write({f"{ours}.optim.lr_schedule": value})

    clip, warmup = f"{ours}.optim.clip_grad", f"{role}.optim.lr_warmup_steps"
    return {
        f"{role}.optim.clip_grad": while_(lambda source: _by_megatron(source, role), clip, "FSDP reads grad_clip"),
        f"{role}.grad_clip": while_(
            lambda source: not _by_megatron(source, role), clip, "Megatron reads optim.clip_grad"
        ),
        warmup: while_(steps_set, f"{ours}.optim.lr_warmup_steps", "not set"),
        f"{warmup}_ratio": while_(lambda source: not steps_set(source), warmup_share, "lr_warmup_steps decides"),
        **dict.fromkeys((f"{role}.optim.{name}" for name in _SCHEDULES), schedule),
        f"{role}.optim.min_lr_ratio": while_(
            lambda source: source(f"{role}.optim.lr_scheduler_type") == "cosine",
            times(f"{ours}.optim.min_lr", lambda source: source(f"{role}.optim.lr"), "a share of the learning rate"),
            "the learning rate is constant",
        ),
    }


_SCHEDULES = ("lr_scheduler_type", "lr_decay_style", "warmup_style")


def _memory(role: str, ours: str, fsdp: str) -> Table:
    """Returns the rules of offloading and of the parallel layout."""

    def offload(section: str) -> Table:
        parts = [f"{role}.{section}.{name}_offload" for name in ("param", "grad", "optimizer")]
        return dict.fromkeys(
            parts,
            lambda _, source: write(
                {f"{ours}.offload": any(source(part) for part in parts)}, "all parts of a model at once here"
            ),
        )

    return {**offload(fsdp), **offload("megatron"), f"{role}.megatron.sequence_parallel": _sequence(role, ours)}


def _sequence(role: str, ours: str) -> Rule:
    return while_(
        lambda source: number(source(f"{role}.megatron.tensor_model_parallel_size") or 1) > 1,
        f"{ours}.parallel.sequence",
        "tensor_model_parallel_size is 1",
    )


RULES: Table = {
    **{
        f"{role}.megatron.pipeline_model_parallel_size": _stages(ours, role)
        for ours, role in (("actor", ACTOR), ("critic", "critic"), ("reference", f"{ARR}.ref"))
    },
    f"{ARR}.ref.megatron.sequence_parallel": _sequence(f"{ARR}.ref", "reference"),
    **dict.fromkeys((f"{ROLLOUT}.{size}_model_parallel_size" for size in ("tensor", "pipeline")), _engine),
    "critic.loss_agg_mode": _as(f"{ACTOR}.loss_agg_mode", "algorithm.loss_agg_func"),
    "critic.shuffle": _as(f"{ACTOR}.shuffle", "algorithm.shuffle_mini_batches"),
    "trainer.max_critic_ckpt_to_keep": _as("trainer.max_actor_ckpt_to_keep", "runner.keep_checkpoints"),
    f"{ARR}.ref.strategy": _reference_strategy,
    f"{ROLLOUT}.prompt_length": _as("data.max_prompt_length", "data.max_prompt_length"),
    f"{ROLLOUT}.response_length": _generated_tokens,
    "algorithm.adv_estimator": _adv_estimator,
    "algorithm.filter_groups.enable": _filter_groups,
    "algorithm.rollout_correction.rollout_is": _rollout_is,
    "data.train_files": _files,
    "data.val_files": _val_files,
    "data.val_max_samples": while_(
        lambda source: number(source("data.val_max_samples") or -1) > 0, "data.val_size", "all rows there"
    ),
    "data.truncation": _truncation,
    **{
        key: rule
        for role, ours, fsdp in ((ACTOR, "actor", "fsdp_config"), ("critic", "critic", "fsdp"))
        for key, rule in (_batches(role, ours) | _optimizer(role, ours) | _memory(role, ours, fsdp)).items()
    },
    f"{ACTOR}.clip_ratio": _clip_ratio,
    f"{ACTOR}.loss_agg_mode": _aggregation,
    f"{ACTOR}.kl_loss_type": _kl_loss_type,
    **dict.fromkeys((f"{ARR}.{role}.log_prob_max_token_len_per_gpu" for role in ("ref", "rollout")), _log_prob_tokens),
    "reward_model.model.path": _reward_model,
    "reward.reward_model.model_path": _reward_model,
    "reward_model.reward_manager": _reward_manager,
    "reward.reward_manager.name": _reward_manager,
    "trainer.n_gpus_per_node": _pool,
    "trainer.critic_warmup": _critic_warmup,
    "trainer.logger": loggers,
    "trainer.project_name": _project,
    "trainer.total_epochs": _epochs,
    "trainer.resume_mode": _resume,
    "config_name": _config_name,
}
VERL = System("verl", "verl", ("actor_rollout_ref.*", "trainer.n_gpus_per_node", "algorithm.adv_estimator"), RULES)
