"""Rules of `actor`, `critic` and `reference`: models, optimizers, and layouts of the training backends."""

from __future__ import annotations

from collections.abc import Callable

from rl_platform.config.estimators import ESTIMATORS, estimator_of
from rl_platform.config.rules.rule import CHUNKS, TASK, Condition, Rule, always, embodied, only, reasoning
from rl_platform.config.schema import Config
from rl_platform.config.schema.models import Actor, Critic, Model, RandomLM

_TYPE, _LENGTH, _SEPARATE = "actor.model.type", "actor.model.sequence_length", "critic.use_critic_model"
_GAUSSIAN = ("initial_log_std", "log_std", "action_distribution")
_MLP = ("hidden_sizes", "activation", *_GAUSSIAN)
_RECURRENT = ("recurrent_size", "sequence_length")
_LANGUAGE = ("path", "random_init", "tokenizer")
_VLA = ("instruction", "action_bins", "backbone_layers", "train_backbone")
_POLICY = ("cnn", "type", *_RECURRENT, *_MLP, *_VLA, "num_action_chunks")  # that only embodied policies read
_CRITIC = (
    "group_name",
    "training_backend",
    "micro_batch_size",
    "max_tokens_per_micro_batch",
    "balance",
    "optim",
    "gradient_checkpointing",
    "parallel",
    "cpu_offload",
    "lora",
    "offload",
    "model",
)


def policy_is(*types: str) -> Condition:
    """Returns the condition that the config is embodied and its policy has one of these types."""
    return lambda config: embodied(config) and config.actor.model.type in types


# Language models


def _language_model(config: Config, role: str) -> Model | None:
    """The language model that the section of `role` names, None if it names none or is not used."""
    if embodied(config):
        return config.actor.model if role == "actor" and config.actor.model.type == "vla" else None
    used = {"actor": True, "critic": config.critic.use_critic_model, "reference": config.has_reference}[role]
    model: Model | None = getattr(config, role).model if used else None
    return model


def _random(config: Config, role: str) -> RandomLM | None:
    model = _language_model(config, role)
    return None if model is None else model.random_init


def _shape(config: Config, role: str) -> RandomLM:
    """The shape of the random model of `role`. The default shape, whose heads fit, if it has none."""
    return _random(config, role) or RandomLM()


def longest_sequence(config: Config) -> int:
    """Tokens of the longest prompt and response together."""
    return config.data.max_prompt_length + config.data.max_response_length


def _rules_of_language_model(role: str) -> tuple[Rule, ...]:
    path, inside = f"{role}.model", f"{role}.model.random_init"
    return (
        Rule(
            path,
            lambda config: (
                (model := _language_model(config, role)) is not None
                and (model.path is None) == (model.random_init is None)
            ),
            lambda config: (
                "a language model comes from path or from random_init: "
                + ("neither is set" if _random(config, role) is None else "both are set")
            ),
            (f"{path}.path", inside, TASK),
            f"as {path}.path: FOLDER",
        ),
        Rule(
            f"{path}.tokenizer",
            lambda config: (
                (model := _language_model(config, role)) is not None
                and model.path is None
                and model.random_init is not None
                and model.tokenizer is None
            ),
            "a random model has no tokenizer of its own",
            (inside, TASK),
            f"{path}.tokenizer: bytes",
        ),
        Rule(
            f"{inside}.num_heads",
            lambda config: (shape := _shape(config, role)).hidden_size % shape.num_heads,
            lambda config: f"the heads do not divide hidden_size {_shape(config, role).hidden_size}",
            (f"{inside}.hidden_size", TASK),
        ),
        Rule(
            f"{inside}.num_kv_heads",
            lambda config: (
                (shape := _shape(config, role)).num_kv_heads is not None and shape.num_heads % shape.num_kv_heads
            ),
            lambda config: (
                f"each key-value head serves equally many of the {_shape(config, role).num_heads} heads (num_heads)"
            ),
            (f"{inside}.num_heads", TASK),
        ),
        Rule(
            f"{inside}.max_positions",
            lambda config: (
                reasoning(config)
                and (random := _random(config, role)) is not None
                and random.max_positions < longest_sequence(config)
            ),
            lambda config: f"prompt and response together may have {longest_sequence(config)} tokens",
            ("data.max_prompt_length", "data.max_response_length", TASK),
        ),
    )


# Micro-batches and optimizers


def _rules_of_training(role: str) -> tuple[Rule, ...]:
    rows, tokens, mini = f"{role}.micro_batch_size", f"{role}.max_tokens_per_micro_batch", "data.mini_batch_size"

    def is_trained(config: Config) -> bool:
        return role == "actor" or config.critic.use_critic_model

    return only(
        is_trained,
        Rule(
            tokens,
            lambda config: (
                (section := config.section(role)).micro_batch_size is not None
                and section.max_tokens_per_micro_batch is not None
            ),
            f"{rows} is set too, and a micro-batch is sized by rows or by tokens, not both",
            (rows,),
        ),
        Rule(
            rows,
            lambda config: (
                (size := config.section(role).micro_batch_size) is not None and config.data.mini_batch_size % size
            ),
            lambda config: (
                f"micro-batches of {config.section(role).micro_batch_size} do not fill a mini-batch of "
                f"{config.data.mini_batch_size} ({mini})"
            ),
            (mini,),
        ),
        Rule(
            tokens,
            lambda config: (
                (limit := config.section(role).max_tokens_per_micro_batch) is not None
                and limit < longest_sequence(config)
            ),
            lambda config: (
                "the longest sequence would not fit: prompt and response together may have "
                f"{longest_sequence(config)} tokens"
            ),
            ("data.max_prompt_length", "data.max_response_length", TASK),
        ),
        Rule(
            f"{role}.optim.min_lr",
            lambda config: (optim := config.section(role).optim).min_lr > optim.lr,
            lambda config: (
                f"the end of the decay lies above its start: {role}.optim.lr is {config.section(role).optim.lr}"
            ),
            (f"{role}.optim.lr", f"{role}.optim.lr_schedule"),
        ),
    )


def _unread_end_of_decay(role: str) -> Rule:
    return Rule(
        f"{role}.optim.min_lr",
        lambda config: config.section(role).optim.lr_schedule == "constant",
        f"the learning rate does not decay, {role}.optim.lr_schedule is constant",
        (f"{role}.optim.lr_schedule",),
    )


# Layouts of the training backends


def _layout(config: Config, role: str) -> Actor | Critic | None:
    """The section of `role` if the config writes its layout. A reference without one has the actor's layout."""
    written = {
        "actor": True,
        "critic": config.critic.use_critic_model,
        "reference": config.has_reference and config.reference.parallel is not None,
    }
    return config.section(role) if written[role] else None


def _trained_by(role: str, backend: str) -> Condition:
    return lambda config: (section := _layout(config, role)) is not None and section.training_backend == backend


def _context_rule(role: str) -> Rule:
    is_megatron, backend = _trained_by(role, "megatron"), f"{role}.training_backend"
    return Rule(
        f"{role}.parallel.context",
        lambda config: is_megatron(config) and config.section(role).parallel.context > 1,
        "Megatron shares tokens by Transformer Engine's attention, which this version does not use",
        (backend,),
        f"{backend}: fsdp",
    )


def _rules_of_backend(role: str) -> tuple[Rule, ...]:
    """Rules of the keys that only trained models have."""
    is_megatron, backend, rows = _trained_by(role, "megatron"), f"{role}.training_backend", f"{role}.micro_batch_size"
    return (
        Rule(
            f"{role}.lora",
            lambda config: is_megatron(config) and config.section(role).lora is not None,
            "adapters are put into the modules of transformers, which Megatron is not",
            (backend,),
            f"{backend}: fsdp",
        ),
        Rule(
            f"{role}.cpu_offload",
            lambda config: is_megatron(config) and config.section(role).cpu_offload,
            "it is a policy of FSDP2",
            (backend,),
            f"{backend}: fsdp",
        ),
        Rule(
            f"{role}.parallel.virtual_pipeline",
            lambda config: (
                (section := _layout(config, role)) is not None
                and section.parallel.pipeline > 1
                and section.parallel.virtual_pipeline > 1
                and section.micro_batch_size is None
                and section.max_tokens_per_micro_batch is None
            ),
            "without a limit a mini-batch is one micro-batch, and stages that take turns need several",
            (rows,),
            f"set {rows}, or the tokens",
        ),
    )


def _unread_layout(role: str) -> tuple[Rule, ...]:
    backend, tensor, pipeline = f"{role}.training_backend", f"{role}.parallel.tensor", f"{role}.parallel.pipeline"
    kernels = Rule(
        f"{role}.kernels",
        _trained_by(role, "fsdp"),
        f"only {backend} megatron has other layers than transformers'",
        (backend,),
    )
    return (
        *(
            Rule(
                f"{role}.parallel.{name}",
                _trained_by(role, "fsdp"),
                f"only {backend} megatron splits a model; fsdp shards it over all ranks",
                (backend,),
            )
            for name in ("tensor", "pipeline", "virtual_pipeline", "expert", "sequence")
        ),
        *((kernels,) if role != "reference" else ()),
        *only(
            _trained_by(role, "megatron"),
            Rule(
                f"{role}.parallel.sequence",
                lambda config: config.section(role).parallel.tensor == 1,
                f"tensor ranks share the tokens, and {tensor} is 1",
                (tensor,),
            ),
            Rule(
                f"{role}.parallel.virtual_pipeline",
                lambda config: config.section(role).parallel.pipeline == 1,
                f"stages work on their parts in turns, and {pipeline} is 1",
                (pipeline,),
            ),
        ),
    )


# Embodied policies


def _is_no_multiple(size: Callable[[Config], int | None]) -> Condition:
    """Where the sequences themselves fit into a rollout."""
    return lambda config: (
        (rows := size(config)) is not None
        and rows % config.sequence_length
        and config.env.rollout_steps % config.sequence_length == 0
    )


def _multiple_rule(key: str, size: Callable[[Config], int | None]) -> Rule:
    return Rule(
        key,
        _is_no_multiple(size),
        lambda config: (
            f"a recurrent policy is trained on sequences of {config.sequence_length} transitions ({_LENGTH}; null: "
            "env.rollout_steps), and this is no multiple of them"
        ),
        (_LENGTH, "env.rollout_steps", _TYPE, TASK),
        lambda config: f"a multiple of {config.sequence_length}",
    )


_RECURRENT_RULES = only(
    policy_is("gru"),
    Rule(
        CHUNKS,
        lambda config: config.actor.model.num_action_chunks > 1,
        "a recurrent policy sees every step, and a chunk of actions would be chosen without those inside it",
        (_TYPE, TASK),
        f"{CHUNKS}: 1, or {_TYPE}: mlp",
    ),
    Rule(
        _LENGTH,
        lambda config: config.env.rollout_steps % config.sequence_length,
        lambda config: (
            f"sequences of {config.sequence_length} steps do not divide the {config.env.rollout_steps} of "
            "env.rollout_steps"
        ),
        ("env.rollout_steps", _TYPE, TASK),
    ),
    _multiple_rule("data.mini_batch_size", lambda config: config.data.mini_batch_size),
    _multiple_rule("actor.micro_batch_size", lambda config: config.actor.micro_batch_size),
)

_VLA_RULES = only(
    policy_is("vla"),
    Rule(
        "actor.model.instruction",
        lambda config: config.actor.model.instruction is None and not config.env.tasks,
        f"{_TYPE} vla reads an instruction",
        (_TYPE, TASK),
        "as: keep the pole upright",
    ),
    Rule(
        CHUNKS,
        lambda config: config.actor.model.num_action_chunks > 1,
        f"{_TYPE} vla chooses one action at a time",
        (_TYPE, TASK),
        f"{CHUNKS}: 1",
    ),
)


def _layers_differ(config: Config) -> bool:
    cnn = config.actor.model.cnn
    return not len(cnn.channels) == len(cnn.kernels) == len(cnn.strides)


def _layers_of(config: Config) -> str:
    cnn = config.actor.model.cnn
    return (
        f"every layer has channels, a kernel and a stride: there are {len(cnn.channels)} channels, "
        f"{len(cnn.kernels)} kernels and {len(cnn.strides)} strides"
    )


_POLICY_RULES = (
    Rule(
        "actor.training_backend",
        lambda config: embodied(config) and config.actor.training_backend == "megatron",
        "Megatron trains bare transformers only, an embodied policy is a small network or has one around it",
        (TASK,),
        "actor.training_backend: fsdp",
    ),
    Rule(
        "actor.model.cnn",
        lambda config: embodied(config) and _layers_differ(config),
        _layers_of,
        (_TYPE, TASK),
    ),
    *_RECURRENT_RULES,
    *_VLA_RULES,
)

_UNREAD_BY_POLICY = (
    Rule("actor.offload", embodied, "an embodied policy is small: it stays where it is", (TASK,)),
    *only(
        policy_is("vla"),
        *(
            Rule(
                f"actor.model.{name}",
                always,
                f"{_TYPE} vla chooses bins from the states of its language model",
                (_TYPE, TASK),
            )
            for name in _MLP
        ),
        Rule(
            "actor.model.instruction",
            lambda config: config.env.tasks,
            "each task has an instruction of its own (env.tasks)",
            ("env.tasks", _TYPE, TASK),
        ),
        Rule(
            "actor.model.train_backbone",
            lambda config: config.actor.lora is not None,
            "adapters (actor.lora) are trained in place of the language model's own weights",
            ("actor.lora", _TYPE, TASK),
        ),
    ),
    *only(
        policy_is("mlp", "cnn", "gru"),
        *(
            Rule(
                f"actor.model.{name}",
                always,
                lambda config: f"{_TYPE} {config.actor.model.type} is no language model",
                (_TYPE, TASK),
            )
            for name in (*_LANGUAGE, *_VLA)
        ),
        Rule(
            "actor.gradient_checkpointing",
            always,
            lambda config: f"{_TYPE} {config.actor.model.type} has no layers whose activations fill the memory",
            (_TYPE, TASK),
        ),
        Rule(
            "actor.lora",
            always,
            "an embodied policy is small and no language model",
            (TASK, _TYPE),
        ),
    ),
    Rule(
        "actor.model.cnn",
        policy_is("mlp", "gru"),
        lambda config: f"{_TYPE} {config.actor.model.type} has no convolutions",
        (_TYPE, TASK),
    ),
    *(
        Rule(
            f"actor.model.{name}",
            policy_is("mlp", "cnn", "vla"),
            lambda config: f"{_TYPE} {config.actor.model.type} remembers nothing",
            (_TYPE,),
        )
        for name in _RECURRENT
    ),
    Rule(
        "actor.max_tokens_per_micro_batch",
        embodied,
        "transitions have no tokens; actor.micro_batch_size counts rows",
        (TASK,),
    ),
    Rule("actor.balance", embodied, "all transitions are the same work", (TASK,)),
    *(
        Rule(f"actor.{name}", embodied, "an embodied policy is small and no language model", (TASK, _TYPE))
        for name in ("parallel.context", "cpu_offload")
    ),
    *(
        Rule(f"{role}.model.{name}", reasoning, "only embodied policies are built from it", (TASK,))
        for role in ("actor", "critic", "reference")
        for name in _POLICY
    ),
)


# The critic and models that leave their devices


def _offload_rule(role: str) -> Rule:
    return Rule(
        f"{role}.offload",
        lambda config: config.runner.max_staleness and config.offload_keys[role] is True,
        "runner.max_staleness generates while the models are trained: nobody can leave for the others",
        ("runner.max_staleness",),
        f"{role}.offload: auto",
    )


def _stays_rule(name: str, is_full: Condition) -> Rule:
    return Rule(
        "reference.offload",
        lambda config: config.reference.offload is True and is_full(config),
        f"{name} full compares to the reference's output matrix in the actor's passes, so it stays",
        (f"algorithm.{name}",),
        "reference.offload: auto",
    )


CRITIC_RULES = (
    Rule(
        _SEPARATE,
        lambda config: (
            reasoning(config)
            and config.algorithm.loss_type == "actor"
            and estimator_of(config.algorithm.adv_type).values
            and not config.critic.use_critic_model
        ),
        lambda config: (
            f"adv_type {config.algorithm.adv_type} with loss_type actor needs values, which only a critic model gives"
        ),
        ("algorithm.loss_type", "algorithm.adv_type", TASK),
        f"{_SEPARATE}: true",
    ),
    Rule(
        _SEPARATE,
        lambda config: (
            embodied(config) and config.algorithm.loss_type == "actor_critic" and config.critic.use_critic_model
        ),
        "loss_type actor_critic already trains values on the policy's backbone: a second critic is not used",
        ("algorithm.loss_type",),
        f"{_SEPARATE}: false",
    ),
    Rule(
        _SEPARATE,
        lambda config: (
            reasoning(config)
            and config.algorithm.adv_type in ESTIMATORS
            and not estimator_of(config.algorithm.adv_type).values
            and config.critic.use_critic_model
        ),
        lambda config: (
            f"adv_type {config.algorithm.adv_type} works without values: a critic would be trained and never asked"
        ),
        ("algorithm.adv_type", TASK),
        f"{_SEPARATE}: false, and no place for critic",
    ),
)

REFUSED = (
    *CRITIC_RULES,
    *(rule for role in ("actor", "critic") for rule in _rules_of_training(role)),
    *(rule for role in ("actor", "critic") for rule in _rules_of_backend(role)),
    *map(_context_rule, ("actor", "critic", "reference")),
    *(rule for role in ("actor", "critic", "reference") for rule in _rules_of_language_model(role)),
    *(_offload_rule(role) for role in ("actor", "critic", "reference", "rollout")),
    _stays_rule("kl_penalty", lambda config: config.algorithm.full_kl_in_reward),
    _stays_rule("kl_loss_type", lambda config: config.algorithm.full_kl_in_loss),
    *_POLICY_RULES,
)

WITHOUT_EFFECT = (
    *_UNREAD_BY_POLICY,
    *(
        Rule(
            key,
            lambda config: not config.critic.use_critic_model,
            "there is no separate critic, critic.use_critic_model is false",
            (_SEPARATE, "algorithm.loss_type"),
        )
        for key in (
            *(f"critic.{name}" for name in _CRITIC),
            "algorithm.critic_ppo_epochs",
            "algorithm.policy_training_start_step",
        )
    ),
    Rule(
        "reference",
        lambda config: not config.algorithm.needs_reference,
        "no KL term is on (algorithm.use_kl_in_reward, algorithm.use_kl_loss)",
        ("algorithm.use_kl_in_reward", "algorithm.use_kl_loss"),
    ),
    Rule(
        "reference",
        lambda config: config.reference_is_base,
        "with actor.lora the reference is the actor's own model without its adapters",
        ("actor.lora", "reference.model"),
    ),
    *(rule for role in ("actor", "critic", "reference") for rule in _unread_layout(role)),
    *map(_unread_end_of_decay, ("actor", "critic")),
)
