"""The table of rules for the keys of a config in a rehearsal.

A rule reads the original config and the sizes of the rehearsal, and returns the new value. Keys without a rule stay as
they are written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rl_platform.config.layers import value_at
from rl_platform.config.schema.data import QuestionTask
from rl_platform.config.schema.models import VLM_POLICIES, Model, RandomLM, Trainable
from rl_platform.config.schema.reward import WeightedReward
from rl_platform.launch.rehearse.rehearsal_sizes import Sizes, small_heads, small_layers
from rl_platform.launch.rehearse.small_placement import small_parallel

STEPS, PROMPTS = 2, 32
SMALL_VLM = RandomLM(hidden_size=64, num_layers=2, num_heads=4, intermediate_size=64)
Kind = Literal["shrunk", "replaced"]
ROLES = ("actor", "critic", "reference")


@dataclass(frozen=True)
class Rule:
    """`value` returns what the key is in a rehearsal; `applies`: to configs in which the key has this effect.

    A key in a section that is null stays as it is.
    """

    key: str
    value: Callable[[Sizes], object]
    why: str = ""
    kind: Kind = "shrunk"
    applies: Callable[[Sizes], object] = lambda sizes: True


def _least(key: str, most: float, why: str = "", applies: Callable[[Sizes], object] = lambda _: True) -> Rule:
    """Returns a rule that cuts a number to at most `most`. null stays null."""

    def value(sizes: Sizes) -> object:
        current = value_at(sizes.config, key.split("."))
        return None if current is None else min(current, most)

    return Rule(key, value, why, applies=applies)


def _trained(role: str) -> tuple[Rule, ...]:
    """Returns the rules of a section with a model."""

    def section(sizes: Sizes) -> Trainable:
        own: Trainable = getattr(sizes.config, role)
        return own

    return (
        Rule(f"{role}.micro_batch_size", lambda sizes: sizes.micro_batch(role), "follows from data.mini_batch_size"),
        Rule(
            f"{role}.max_tokens_per_micro_batch",
            lambda sizes: sizes.sequence,
            "the longest sequence",
            applies=lambda sizes: section(sizes).max_tokens_per_micro_batch is not None,
        ),
        _least(f"{role}.optim.lr_warmup_steps", 1, "the run has 2 steps"),
        _least(f"{role}.lora.rank", 4, "a small model"),
        Rule(
            f"{role}.kernels",
            lambda sizes: "torch",
            "Transformer Engine computes on GPUs",
            "replaced",
            lambda sizes: section(sizes).kernels == "transformer_engine",
        ),
        *_layout(role),
    )


def _layout(role: str) -> tuple[Rule, ...]:
    def written(sizes: Sizes) -> bool:
        return getattr(sizes.config, role).parallel is not None

    return (
        Rule(
            f"{role}.parallel",
            lambda sizes: small_parallel(getattr(sizes.config, role).parallel).model_dump(),
            "every kind that is larger than 1 stays larger than 1",
            applies=written,
        ),
        Rule(
            f"{role}.training_backend",
            lambda sizes: "fsdp",
            "megatron-core is not installed here",
            "replaced",
            lambda sizes: getattr(sizes.config, role).training_backend == "megatron" and not sizes.materials.megatron,
        ),
    )


def _sent(name: str, value: str, usual: str) -> Rule:
    """Returns the rule of a way to send weights, which one process does not need."""

    def in_one_process(sizes: Sizes) -> bool:
        together = sizes.config.cluster.runtime != "ray" and sizes.small.fits_one_process
        return together and getattr(sizes.config.rollout, name) == value

    why = "one process has actor and rollout: no weights are sent"
    return Rule(f"rollout.{name}", lambda sizes: usual, why, "replaced", in_one_process)


def _model(role: str) -> tuple[Rule, ...]:
    def model(sizes: Sizes) -> Model | None:
        own: Model | None = getattr(sizes.config, role).model
        return own

    def is_random(sizes: Sizes) -> bool:
        own = model(sizes)
        return own is not None and own.random_init is not None

    def small_random(sizes: Sizes) -> dict[str, object]:
        own = model(sizes)
        assert own is not None
        assert own.random_init is not None
        return _small_random(own.random_init, sizes, role)

    def has_path(sizes: Sizes) -> bool:
        own = model(sizes)
        return own is not None and own.path is not None and (not sizes.embodied or own.type == "vla")

    def has_tokenizer(sizes: Sizes) -> bool:
        own = model(sizes)
        return own is not None and own.tokenizer not in (None, "bytes") and not sizes.materials.real_tokenizer

    return (
        Rule(
            f"{role}.model.path",
            lambda sizes: sizes.materials.model(role),
            "a random model of the same architecture",
            applies=has_path,
        ),
        Rule(
            f"{role}.model.tokenizer",
            lambda sizes: sizes.materials.model(f"{role}-tokenizer"),
            "the tokenizer is not on this machine: bytes and the same special tokens",
            "replaced",
            has_tokenizer,
        ),
        Rule(f"{role}.model.random_init", small_random, "a small model", applies=is_random),
    )


def _small_random(shape: RandomLM, sizes: Sizes, role: str) -> dict[str, object]:
    heads, kv = small_heads(shape.num_heads, shape.num_kv_heads or shape.num_heads)
    return {
        "hidden_size": min(shape.hidden_size, 32 * heads),
        "num_heads": heads,
        "num_kv_heads": None if shape.num_kv_heads is None else kv,
        "num_layers": small_layers(shape.num_layers, sizes.config.section(role)),
        "intermediate_size": min(shape.intermediate_size, 64),
    }


def _small_source(sizes: Sizes, number: int) -> dict[str, object]:
    source = sizes.config.data.sources[number]
    size = None if source.val_size is None else min(source.val_size, 4)
    few = _few_rows(sizes, number, source) if source.path is not None else {}
    return source.model_dump() | {"val_size": size} | few


def _few_rows(sizes: Sizes, number: int, task: QuestionTask) -> dict[str, object]:
    """Returns what changes in a source of stored questions."""
    validation = str(sizes.materials.questions(number, "validation"))
    return {
        "type": "jsonl",
        "path": str(sizes.materials.questions(number, "train")),
        "val_path": validation if task.val_path or task.val_split else None,
        "name": None,
        "split": None,
        "val_split": None,
    }


def _small_function(sizes: Sizes, function: WeightedReward) -> dict[str, object]:
    small = function.model_dump()
    small |= {name: min(small[name], most) for name, most in (("num_workers", 2), ("max_batch_size", 4))}
    if function.computes_model:
        small["model"] |= {"path": sizes.materials.model("reward")}
        small["model"] |= {} if sizes.materials.real_tokenizer else {"tokenizer": None}
    if function.address is not None and sizes.materials.reward_url is not None:
        small |= _scored_here(sizes)
    return small


def _scored_here(sizes: Sizes) -> dict[str, object]:
    return {"type": "http", "url": sizes.materials.reward_url, "judge": None, "code": None, "model": None}


def _embodied(sizes: Sizes) -> bool:
    return sizes.embodied


def _served(sizes: Sizes) -> bool:
    return sizes.embodied and bool(sizes.config.env.addresses)


def _reasoning(sizes: Sizes) -> bool:
    return not sizes.embodied


_ENGINE_KEYS: dict[str, object] = {
    "tensor_parallel_size": None,
    "gpu_memory_utilization": None,
    "engine_args": {},
    "engine_env": {},
    "vllm": {"python": None},
}

RULES: tuple[Rule, ...] = (
    Rule("runner.output_dir", lambda sizes: str(sizes.materials.folder / "run"), "a temporary folder", "replaced"),
    Rule("runner.resume", lambda sizes: "auto", "the rehearsal resumes its own checkpoint", "replaced"),
    Rule(
        "runner.trust_checkpoint",
        lambda sizes: True,
        "the checkpoint is the rehearsal's own",
        "replaced",
        lambda sizes: sizes.embodied and sizes.config.env.python is not None,
    ),
    _least("runner.max_steps", STEPS),
    Rule("runner.max_epochs", lambda sizes: None, "the run has 2 steps"),
    Rule("runner.save_interval", lambda sizes: 1, "a checkpoint to resume from"),
    _least("runner.val_check_interval", 1, "the run has 2 steps"),
    _least("runner.deadline_s", 120.0, "a small run"),
    _least("runner.warm_start.updates", 4, "a small run"),
    Rule(
        "runner.logger_backends",
        lambda sizes: [name for name in sizes.config.runner.logger_backends if name == "tensorboard"],
        "nothing is sent to a server",
        "replaced",
    ),
    _least("algorithm.group_size", 2),
    _least("algorithm.ppo_epochs", 2),
    _least("algorithm.critic_ppo_epochs", 2),
    _least("algorithm.policy_training_start_step", 1, "the run has 2 steps"),
    _least("algorithm.rollout_micro_batch_size", 4),
    _least("algorithm.logprob_forward_micro_batch_size", 8),
    Rule(
        "algorithm.dynamic_sampling",
        lambda sizes: {"on_exhausted": "fill_with_rejected", "max_rounds": 2, "prompts_per_round": None},
        "a random model solves no task, so all groups would be rejected",
        "replaced",
    ),
    Rule(
        "algorithm.overlong.filter",
        lambda sizes: False,
        "a random model seldom ends a response, so the filter could leave out all of them",
        "replaced",
    ),
    Rule(
        "algorithm.overlong.buffer_length",
        lambda sizes: max(1, sizes.response // 2),
        "follows from data.max_response_length",
        applies=lambda sizes: _reasoning(sizes) and sizes.config.algorithm.overlong.buffer_length is not None,
    ),
    Rule(
        "algorithm.overlong.max_length",
        lambda sizes: sizes.response,
        "follows from data.max_response_length",
        applies=lambda sizes: _reasoning(sizes) and sizes.config.algorithm.overlong.max_length is not None,
    ),
    _least("data.train_size", PROMPTS, applies=_reasoning),
    _least("data.val_size", 4, applies=_reasoning),
    Rule("data.train_batch_size", lambda sizes: sizes.prompts, applies=_reasoning),
    Rule("data.mini_batch_size", lambda sizes: sizes.mini_batch),
    Rule("critic.mini_batch_size", lambda sizes: sizes.critic_mini_batch, "follows from data.mini_batch_size"),
    Rule(
        "data.max_prompt_length",
        lambda sizes: sizes.prompt_length,
        "a token of the tokenizer in place is one byte",
        "replaced",
        _reasoning,
    ),
    Rule("data.max_response_length", lambda sizes: sizes.response, applies=_reasoning),
    Rule(
        "data.task",
        lambda sizes: _few_rows(sizes, 0, sizes.config.data.task),  # type: ignore[arg-type]
        "a few rows, as JSON Lines",
        applies=lambda sizes: sizes.config.data.task is not None and sizes.config.data.task.path is not None,
    ),
    Rule(
        "data.sources",
        lambda sizes: [_small_source(sizes, number) for number in range(len(sizes.config.data.sources))],
        "a few rows of each, as JSON Lines",
    ),
    *_trained("actor"),
    *_trained("critic"),
    *_layout("reference"),
    *(rule for role in ROLES for rule in _model(role)),
    Rule(
        "actor.model",
        lambda sizes: {"path": None, "tokenizer": "bytes", "unnorm_key": None, "random_init": SMALL_VLM.model_dump()},
        "a small network of the same kind with random weights",
        "replaced",
        lambda sizes: (
            sizes.embodied and sizes.config.actor.model.type in VLM_POLICIES and sizes.config.actor.model.path
        ),
    ),
    Rule(
        "actor.model.hidden_sizes", lambda sizes: [16] * len(sizes.config.actor.model.hidden_sizes), applies=_embodied
    ),
    _least("actor.model.recurrent_size", 16, applies=_embodied),
    Rule("actor.model.sequence_length", lambda sizes: sizes.sequence_length, applies=_embodied),
    _least("actor.model.backbone_layers", 2, applies=_embodied),
    Rule("rollout.backend", lambda sizes: sizes.materials.backend, "", "replaced", _reasoning),
    _sent("sync", "delta", "full"),
    _sent("weight_transfer", "group", "auto"),
    Rule(
        "rollout",
        lambda sizes: _ENGINE_KEYS,
        "the torch engine has no such option",
        "replaced",
        lambda sizes: _reasoning(sizes) and sizes.materials.backend == "torch",
    ),
    Rule(
        "rollout.tensor_parallel_size",
        lambda sizes: min(2, sizes.engine_ranks),
        "larger than 1 stays larger than 1",
        applies=lambda sizes: _reasoning(sizes) and sizes.materials.backend != "torch" and sizes.engine_ranks > 1,
    ),
    Rule(
        "rollout.stop",
        lambda sizes: [],
        "the tokenizer in place has other tokens",
        "replaced",
        lambda sizes: _reasoning(sizes) and not sizes.materials.real_tokenizer,
    ),
    _least("rollout.max_running_requests", 16, applies=_reasoning),
    *(
        Rule(
            f"rollout.{name}.max_new_tokens",
            lambda sizes, name=name: min(getattr(sizes.config.rollout, name).max_new_tokens, sizes.response),  # type: ignore[misc]
            "follows from data.max_response_length",
            applies=lambda sizes, name=name: getattr(sizes.config.rollout, name).max_new_tokens is not None,  # type: ignore[misc]
        )
        for name in ("sampling", "val_sampling")
    ),
    Rule(
        "rollout.multi_turn.max_observation_tokens",
        lambda sizes: min(sizes.config.rollout.multi_turn.max_observation_tokens, max(1, sizes.response // 2 - 1)),  # type: ignore[union-attr]
        "follows from data.max_response_length",
        applies=lambda sizes: sizes.config.rollout.multi_turn is not None,
    ),
    Rule(
        "rollout.partial_rollout.prompts_in_flight",
        lambda sizes: -(-3 * sizes.prompts // 2),
        "follows from data.train_batch_size",
        applies=lambda sizes: (
            (partial := sizes.config.rollout.partial_rollout) is not None and partial.prompts_in_flight is not None
        ),
    ),
    _least("reward.num_workers", 2, applies=_reasoning),
    _least("reward.max_batch_size", 4, applies=_reasoning),
    Rule(
        "reward.model.path",
        lambda sizes: sizes.materials.model("reward"),
        "a random classifier of the same architecture",
        applies=lambda sizes: sizes.config.reward.computes_model,
    ),
    Rule(
        "reward.model.tokenizer",
        lambda sizes: None,
        "the small classifier's own",
        "replaced",
        lambda sizes: sizes.config.reward.computes_model and not sizes.materials.real_tokenizer,
    ),
    Rule(
        "reward",
        _scored_here,
        "the server does not answer here: a local one scores",
        "replaced",
        lambda sizes: sizes.config.reward.address is not None and sizes.materials.reward_url is not None,
    ),
    Rule(
        "reward.functions",
        lambda sizes: [_small_function(sizes, function) for function in sizes.config.reward.functions],
        "few processes and small models",
    ),
    Rule("env.num_envs", lambda sizes: sizes.num_envs, applies=_embodied),
    Rule("env.num_workers", lambda sizes: sizes.workers, applies=_embodied),
    Rule("env.address", lambda sizes: sizes.config.env.addresses[0], "one server", applies=_served),
    Rule("env.rollout_steps", lambda sizes: sizes.rollout_steps, applies=_embodied),
    Rule("env.max_episode_steps", lambda sizes: sizes.episode_steps, "short episodes", applies=_embodied),
    Rule("env.evaluation.episodes", lambda sizes: sizes.episodes, applies=_embodied),
)
