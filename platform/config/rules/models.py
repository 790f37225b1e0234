"""Rules of `actor`, `critic` and `reference`: models, optimizers, and layouts of the training backends."""

from __future__ import annotations

from collections.abc import Iterator

from rl_platform.config.rules.data import divisor_of
from rl_platform.config.rules.rule import CHUNKS, TASK, Unread, embodied, reasoning, unknown_name, unread_keys, when
from rl_platform.config.schema import Config
from rl_platform.config.schema.algorithm import ESTIMATORS, estimator_needs
from rl_platform.config.schema.models import FLOW_POLICIES, INSTRUCTED, POLICIES, VLM_POLICIES, Actor, Critic, Model
from rl_platform.errors import Problem

_TYPE, _LENGTH, _SEPARATE = "actor.model.type", "actor.model.sequence_length", "critic.use_critic_model"
_MLP = "hidden_sizes activation initial_log_std log_std action_distribution"
_RECURRENT = "recurrent_size sequence_length"
_LANGUAGE = "path random_init tokenizer"
_VLA = "action_bins backbone_layers"
_INSTRUCTED = "instruction train_backbone"
_VLM = "flow unnorm_key train_vision"
# that only embodied policies read
_POLICY = f"cnn type kwargs {_RECURRENT} {_MLP} {_VLA} {_INSTRUCTED} {_VLM} num_action_chunks"
_CRITIC = (
    "group_name training_backend mini_batch_size micro_batch_size max_tokens_per_micro_batch balance optim "
    "gradient_checkpointing parallel kernels cpu_offload lora router_aux_loss_coef offload model"
)
_CHOSEN = {"vla": "bins", "pi0": "chunks", "smolvla": "chunks", "vlm_tokens": "tokens"}
_TRAINED, _ROLES = ("actor", "critic"), ("actor", "critic", "reference")


def refused(config: Config) -> Iterator[Problem]:
    """Yields the problems of the keys of `actor`, `critic` and `reference`."""
    if problem := when(lambda: critic_problem(config)):
        yield problem
    for role in _TRAINED:
        yield from _training(config, role)
    for role in _ROLES:
        yield from _layout(config, role)
        yield from _language_model(config, role)
    for role in (*_ROLES, "rollout"):
        yield from _offload(config, role)
    if when(lambda: reasoning(config) and config.actor.router_replay):
        yield from _router_replay(config)
    if when(lambda: embodied(config)):
        yield from _policy(config)


def unread(config: Config) -> Iterator[Unread]:
    """Yields unread keys of `actor`, `critic`, `reference` and `algorithm`, each with the reason."""
    if when(lambda: embodied(config)):
        yield from _unread_by_policy(config)
    elif when(lambda: reasoning(config)):
        for role in _ROLES:
            yield from unread_keys(f"{role}.model", _POLICY, "it belongs to embodied policies", TASK)
        yield Unread("actor.device", "it belongs to embodied policies; see cluster.component_placement", (TASK,))
    if when(lambda: not config.critic.use_critic_model):
        reason = "critic.use_critic_model is false"
        switches = (_SEPARATE, "algorithm.loss_type")
        yield from unread_keys("critic", _CRITIC, reason, *switches)
        yield from unread_keys("algorithm", "critic_ppo_epochs policy_training_start_step", reason, *switches)
    if when(lambda: not config.algorithm.needs_reference):
        terms = ("algorithm.use_kl_in_reward", "algorithm.use_kl_loss", "algorithm.distillation_coef")
        yield Unread("reference", f"no KL term is on ({', '.join(terms)})", terms)
    if when(lambda: config.reference_is_base):
        reason = "with actor.lora the reference is the actor's own model without its adapters"
        yield Unread("reference", reason, ("actor.lora", "reference.model"))
    for role in _ROLES:
        yield from _unread_by_training(config, role)


def policy_is(config: Config, *types: str) -> bool:
    """Returns True if the config is embodied and its policy has one of these types."""
    return embodied(config) and config.actor.model.type in types


def critic_problem(config: Config) -> Problem | None:
    """Returns the problem of `critic.use_critic_model`, None if there is none."""
    algorithm = config.algorithm
    if embodied(config):
        if config.critic.use_critic_model:
            message = "values of an embodied policy come from a head on its own backbone (loss_type actor_critic)"
            return Problem(_SEPARATE, f"{message}, so a separate critic is not used", hint=f"{_SEPARATE}: false")
        return None
    adv_type = algorithm.adv_type
    if config.critic.use_critic_model:
        if adv_type in ESTIMATORS and not estimator_needs(adv_type).values:
            message = f"adv_type {adv_type} uses no values, so a critic would be trained for nothing"
            return Problem(_SEPARATE, message, hint=f"{_SEPARATE}: false, and no placement of critic")
    elif estimator_needs(adv_type).values and algorithm.loss_type == "actor":
        message = f"adv_type {adv_type} with loss_type actor needs the values of a critic model"
        return Problem(_SEPARATE, message, hint=f"{_SEPARATE}: true")
    return None


def _model(config: Config, role: str) -> Model | None:
    """Returns the language model that the section of `role` names, None if it names none or is not used."""
    if embodied(config):
        return config.actor.model if role == "actor" and config.actor.model.type in INSTRUCTED else None
    if role == "critic":
        return config.critic.model if config.critic.use_critic_model else None
    if role == "reference":
        return config.reference.model if config.has_reference else None
    return config.actor.model


def _language_model(config: Config, role: str) -> Iterator[Problem]:
    key, inside = f"{role}.model", f"{role}.model.random_init"
    model = when(lambda: _model(config, role))
    if model is None:
        return
    if when(lambda: (model.path is None) == (model.random_init is None)):
        which = "neither is set" if model.path is None else "both are set"
        message = f"a language model needs exactly one of path and random_init; {which}"
        yield Problem(key, message, hint=f"for example {key}.path: FOLDER")
    if when(lambda: model.path is None and model.random_init is not None and model.tokenizer is None):
        yield Problem(f"{key}.tokenizer", "a random model has no tokenizer of its own", hint=f"{key}.tokenizer: bytes")
    shape = when(lambda: model.random_init)
    if shape is None:
        return
    if when(lambda: shape.hidden_size % shape.num_heads):
        yield Problem(f"{inside}.num_heads", f"the number of heads does not divide hidden_size {shape.hidden_size}")
    if when(lambda: shape.num_kv_heads is not None and shape.num_heads % shape.num_kv_heads):
        message = f"the number of key and value heads does not divide num_heads {shape.num_heads}"
        yield Problem(f"{inside}.num_kv_heads", message)
    if when(lambda: reasoning(config) and shape.max_positions < config.data.longest_sequence):
        message = f"prompt and response together may have {config.data.longest_sequence} tokens"
        yield Problem(f"{inside}.max_positions", message)


def _training(config: Config, role: str) -> Iterator[Problem]:
    """Yields the problems of micro-batches, the optimizer, and keys of trained models only."""
    section = config.section(role)
    if not when(lambda: role == "actor" or config.critic.use_critic_model):
        return
    rows, tokens, mini = f"{role}.micro_batch_size", f"{role}.max_tokens_per_micro_batch", "data.mini_batch_size"
    own = when(lambda: config.critic.mini_batch_size) if role == "critic" else None
    if own is not None:
        mini = "critic.mini_batch_size"
        if when(lambda: config.rows_per_step % own):
            rows_there = config.rows_per_step
            message = f"mini-batches of {own} do not divide the {rows_there} sequences of a step"
            hint = "a step has data.train_batch_size * algorithm.group_size sequences"
            yield Problem(mini, message, allowed=divisor_of(rows_there, own), hint=hint)
    limit = when(lambda: section.max_tokens_per_micro_batch)
    if limit is not None and when(lambda: section.micro_batch_size is not None):
        yield Problem(tokens, f"{rows} is set too; a micro-batch is limited by rows or by tokens, not both")
    size = when(lambda: section.micro_batch_size)
    if size is not None and when(lambda: config.mini_batch_size(role) % size != 0):
        whole = config.mini_batch_size(role)
        message = f"micro-batches of {size} rows do not divide a mini-batch of {whole} ({mini})"
        yield Problem(rows, message, allowed=divisor_of(whole, size))
    if limit is not None and when(lambda: limit < config.data.longest_sequence):
        message = "the longest sequence does not fit: prompt and response together may have "
        yield Problem(tokens, f"{message}{config.data.longest_sequence} tokens")
    if when(lambda: section.optim.min_lr > section.optim.lr):
        message = f"the learning rate would rise: {role}.optim.lr is {section.optim.lr}"
        yield Problem(f"{role}.optim.min_lr", message)


def _section(config: Config, role: str) -> Actor | Critic | None:
    """Returns the section of `role` if the config writes its layout. A reference without one has the actor's layout."""
    if role == "critic" and not config.critic.use_critic_model:
        return None
    if role == "reference" and not (config.has_reference and config.reference.parallel is not None):
        return None
    return config.section(role)


def _trained_by(config: Config, role: str, backend: str) -> bool:
    section = _section(config, role)
    return section is not None and section.training_backend == backend


def _layout(config: Config, role: str) -> Iterator[Problem]:
    section = when(lambda: _section(config, role))
    if section is None:
        return
    by_megatron = when(lambda: section.training_backend == "megatron")
    if by_megatron and role != "reference" and when(lambda: section.cpu_offload):
        yield Problem(f"{role}.cpu_offload", "it is an option of FSDP2", hint=f"{role}.training_backend: fsdp")
    if role != "reference" and when(
        lambda: (
            section.parallel.pipeline > 1
            and section.parallel.virtual_pipeline > 1
            and section.micro_batch_size is None
            and section.max_tokens_per_micro_batch is None
        )
    ):
        message = "without a limit a mini-batch is one micro-batch, and an interleaved schedule needs several"
        yield Problem(
            f"{role}.parallel.virtual_pipeline",
            message,
            hint=f"set {role}.micro_batch_size or {role}.max_tokens_per_micro_batch",
        )


def _unread_by_training(config: Config, role: str) -> Iterator[Unread]:
    backend, parallel = f"{role}.training_backend", f"{role}.parallel"
    if when(lambda: _trained_by(config, role, "fsdp")):
        reason = f"it belongs to {backend} megatron; fsdp shards the model over all ranks"
        yield from unread_keys(parallel, "tensor pipeline virtual_pipeline expert sequence", reason, backend)
        if role != "reference":
            reason = f"it belongs to {backend} megatron"
            yield Unread(f"{role}.kernels", reason, (backend,))
    elif when(lambda: _trained_by(config, role, "megatron")):
        if when(lambda: config.section(role).parallel.tensor == 1):
            reason = f"tensor ranks split the tokens, and {parallel}.tensor is 1"
            yield Unread(f"{parallel}.sequence", reason, (f"{parallel}.tensor",))
        if when(lambda: config.section(role).parallel.pipeline == 1):
            reason = f"it interleaves pipeline stages, and {parallel}.pipeline is 1"
            yield Unread(f"{parallel}.virtual_pipeline", reason, (f"{parallel}.pipeline",))
    schedule = f"{role}.optim.lr_schedule"
    if role != "reference" and when(lambda: config.section(role).optim.lr_schedule == "constant"):
        yield Unread(f"{role}.optim.min_lr", f"{schedule} is constant", (schedule,))


def _router_replay(config: Config) -> Iterator[Problem]:
    key = "actor.router_replay"
    if when(lambda: config.rollout.backend == "vllm"):
        message = "vLLM reports selected experts with another sampler only, whose log-probs are not those of training"
        yield Problem(key, message, hint="rollout.backend: torch or sglang")
    if when(lambda: config.rollout.multi_turn is not None):
        message = "each turn computes the tokens of the earlier ones anew, maybe with other experts"
        yield Problem(key, message, hint="rollout.multi_turn: null")
    if when(lambda: config.rollout.partial_rollout is not None):
        message = "a continued response computes its tokens anew with other weights, and so with other experts"
        yield Problem(key, message, hint="rollout.partial_rollout: null")


def _offload(config: Config, role: str) -> Iterator[Problem]:
    key, hint = f"{role}.offload", f"{role}.offload: auto"
    if not when(lambda: getattr(config, role).offload is True):
        return
    if when(lambda: config.runner.max_staleness):
        message = (
            "with runner.max_staleness generation and training run at the same time, so no component can leave the GPU"
        )
        yield Problem(key, message, hint=hint)
    why = "full needs the reference's output matrix while the actor is on the GPU"
    if role == "reference" and when(lambda: config.algorithm.full_kl_in_reward):
        yield Problem(key, f"kl_penalty {why}", hint=hint)
    if role == "reference" and when(lambda: config.algorithm.full_kl_in_loss):
        yield Problem(key, f"kl_loss_type {why}", hint=hint)


def _policy(config: Config) -> Iterator[Problem]:
    """Yields the problems of embodied policies."""
    model, actor, chunks = when(lambda: config.actor.model), config.actor, f"{CHUNKS}: 1"
    if when(lambda: actor.training_backend == "megatron"):
        message = "Megatron trains plain language models only, and no embodied policies"
        yield Problem("actor.training_backend", message, hint="actor.training_backend: fsdp")
    if model is None:
        return
    if unknown := when(lambda: unknown_name(_TYPE, model.type, POLICIES, "Class")):
        yield unknown
        return
    if when(lambda: len({len(model.cnn.channels), len(model.cnn.kernels), len(model.cnn.strides)}) > 1):
        counts = f"{len(model.cnn.channels)} channels, {len(model.cnn.kernels)} kernels and {len(model.cnn.strides)}"
        message = f"each layer needs channels, a kernel and a stride, but there are {counts} strides"
        yield Problem("actor.model.cnn", message)
    kind = when(lambda: model.type)
    if kind == "gru":
        yield from _recurrent(config)
    if kind in INSTRUCTED and when(lambda: model.instruction is None and not config.env.tasks):
        message = f"{_TYPE} {kind} needs an instruction"
        yield Problem("actor.model.instruction", message, hint="for example: keep the pole upright")
    if kind in VLM_POLICIES:
        yield from _vlm_policy(config)
    if kind == "vla" and when(lambda: model.num_action_chunks > 1):
        yield Problem(CHUNKS, f"{_TYPE} vla chooses one action per observation", hint=chunks)


def _vlm_policy(config: Config) -> Iterator[Problem]:
    """Yields the problems of policies on vision-language models of transformers."""
    model, flow = config.actor.model, "actor.model.flow"
    tokens = when(lambda: model.type == "vlm_tokens")
    if not tokens and when(lambda: config.actor.gradient_checkpointing is not False):
        message = f"{_TYPE} {model.type} caches keys and values, which a second forward would append again"
        yield Problem("actor.gradient_checkpointing", message, hint="actor.micro_batch_size, to save memory")
    if when(lambda: model.unnorm_key is not None and model.path is None):
        message = "the statistics are in the folder of actor.model.path, which is not set"
        yield Problem("actor.model.unnorm_key", message, hint="remove it: actions are scaled to their bounds")
    if when(lambda: model.type == "smolvla" and model.path is not None and model.tokenizer is None):
        message = "a folder of LeRobot has no tokenizer: it belongs to the vision-language model"
        hint = "HuggingFaceTB/SmolVLM2-500M-Video-Instruct, or a folder with it: vlm_model_name in config.json"
        yield Problem("actor.model.tokenizer", message, hint=hint)
    pixels = when(lambda: config.env.pixels)
    if pixels is not None and when(lambda: pixels.grayscale and pixels.frame_stack % 3 == 0):
        message = f"{_TYPE} {model.type} reads channels in threes as one color image, and these are gray images"
        hint = "env.pixels.grayscale: false, or another number of images"
        yield Problem("env.pixels.frame_stack", message, hint=hint)
    shape = when(lambda: model.random_init)
    if shape is not None and when(lambda: shape.hidden_size // shape.num_heads % 2 == 1):
        message = (
            f"a head has {shape.hidden_size // shape.num_heads} numbers, and rotary embeddings need an even number"
        )
        yield Problem("actor.model.random_init.num_heads", message)
    if tokens:
        if when(lambda: not model.train_backbone and config.actor.lora is None):
            message = "without the backbone nothing but the value head would be trained"
            yield Problem("actor.model.train_backbone", message, hint="true, or actor.lora: adapters of a frozen model")
        return
    if when(lambda: model.flow.method == "flow_cps" and model.flow.denoising_steps == 1):
        message = "the last step of flow_cps draws no noise, so one step has no log-prob"
        yield Problem(f"{flow}.denoising_steps", message, allowed="at least 2")
    if when(lambda: model.flow.method != "flow_noise" and config.algorithm.entropy_bonus):
        message = f"the entropy of {model.flow.method} is constant, and only flow_noise learns its deviation"
        yield Problem(
            "algorithm.entropy_bonus", message, hint=f"algorithm.entropy_bonus: 0, or {flow}.method: flow_noise"
        )


def _recurrent(config: Config) -> Iterator[Problem]:
    if when(lambda: config.actor.model.num_action_chunks > 1):
        message = "a recurrent policy needs every observation, and it gets none within an action chunk"
        yield Problem(CHUNKS, message, hint=f"{CHUNKS}: 1, or {_TYPE}: mlp")
    length = when(lambda: config.sequence_length)
    if length is None:
        return
    if when(lambda: config.env.rollout_steps % length):
        message = f"sequences of {length} steps do not divide the {config.env.rollout_steps} of env.rollout_steps"
        yield Problem(_LENGTH, message)
    if not when(lambda: config.env.rollout_steps % length == 0):
        return
    message = (
        f"not a multiple of the sequences of {length} transitions that a recurrent policy trains on ({_LENGTH}; null: "
        "env.rollout_steps)"
    )
    if when(lambda: config.data.mini_batch_size % length):
        yield Problem("data.mini_batch_size", message, hint=f"a multiple of {length}")
    if when(lambda: (config.actor.micro_batch_size or 0) % length):
        yield Problem("actor.micro_batch_size", message, hint=f"a multiple of {length}")


def _unread_by_policy(config: Config) -> Iterator[Unread]:
    yield Unread("actor.offload", "embodied policies are small and always stay on their device", (TASK,))
    kind, model = when(lambda: config.actor.model.type), "actor.model"
    if kind in INSTRUCTED:
        reason = f"{_TYPE} {kind} has no such layers; its language model chooses {_CHOSEN[kind]}"
        yield from unread_keys(model, _MLP, reason, _TYPE, TASK)
        if when(lambda: config.env.tasks):
            reason = "env.tasks has an instruction for each task"
            yield Unread("actor.model.instruction", reason, ("env.tasks", _TYPE, TASK))
        # other policies also freeze the vision tower and the layers between both, which have no adapters
        if kind == "vla" and when(lambda: config.actor.lora is not None):
            reason = "actor.lora trains adapters instead of the language model's weights"
            yield Unread("actor.model.train_backbone", reason, ("actor.lora", _TYPE, TASK))
    elif kind:
        names = f"{_LANGUAGE} {_VLA} {_INSTRUCTED}"
        yield from unread_keys(model, names, f"{_TYPE} {kind} is no language model", _TYPE, TASK)
        reason = f"it belongs to language models, and {_TYPE} is {kind}"
        yield Unread("actor.gradient_checkpointing", reason, (_TYPE, TASK))
        yield Unread("actor.lora", "an embodied policy is small and no language model", (TASK, _TYPE))
    own = kind is not None and kind not in POLICIES
    if own:
        reason = f"{_TYPE} {kind} is a network of yours; actor.model.kwargs has its arguments"
        yield from unread_keys(model, "hidden_sizes activation", reason, _TYPE)
    elif kind:
        yield Unread("actor.model.kwargs", f"{_TYPE} {kind} has keys of its own", (_TYPE,))
    if kind and kind not in VLM_POLICIES:
        yield from unread_keys(model, _VLM, f"they belong to {_TYPE} {', '.join(VLM_POLICIES)}", _TYPE)
    elif kind:
        reason = f"{_TYPE} {kind} has a network of its own"
        yield Unread(f"{model}.backbone_layers", reason, (_TYPE,))
        other = "flow" if kind == "vlm_tokens" else "action_bins"
        yield Unread(f"{model}.{other}", f"{_TYPE} {kind} has other actions", (_TYPE,))
        if when(lambda: not config.actor.model.train_backbone):
            frozen = f"{model}.train_backbone"
            yield Unread(f"{model}.train_vision", f"{frozen} false freezes the vision tower too", (frozen, _TYPE))
        if kind in FLOW_POLICIES and when(lambda: config.actor.model.flow.method == "flow_noise"):
            method = f"{model}.flow.method"
            yield Unread(f"{model}.flow.noise_level", f"{method} flow_noise learns its deviation", (method, _TYPE))
    if kind in ("mlp", "gru", *VLM_POLICIES) or own:
        yield Unread("actor.model.cnn", f"{_TYPE} {kind} has no convolutions", (_TYPE, TASK))
    if kind in ("mlp", "cnn", *INSTRUCTED) or own:
        yield from unread_keys(model, _RECURRENT, f"{_TYPE} {kind} is not recurrent", _TYPE)
    reason = "transitions have no tokens; see actor.micro_batch_size"
    yield Unread("actor.max_tokens_per_micro_batch", reason, (TASK,))
    yield Unread("actor.balance", "all transitions take the same work", (TASK,))
    reason = "an embodied policy is small and no language model"
    yield from unread_keys(
        "actor", "parallel.context cpu_offload router_aux_loss_coef router_replay", reason, TASK, _TYPE
    )
