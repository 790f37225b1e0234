"""The shapes of a config's models, from the config and config.json alone, without weights and torch.

Counts are exact for the families in `COUNTED` and `random_init`. Other models have no shape but a reason, and so have
models whose config.json is neither on this machine nor in `architectures`.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Required, TypedDict

from rl_platform.config.schema import Config
from rl_platform.config.schema.models import POLICIES, VLM_POLICIES, Model, RandomLM
from rl_platform.placement.estimates.architectures import Options, known_options
from rl_platform.placement.estimates.model_shape import Latent, ModelShape
from rl_platform.placement.estimates.policy_shape import ACTIONS, ConvShape, PolicyShape, Stack
from rl_platform.placement.estimates.smolvla_options import SMOLVLM2, SMOLVLM2_OPTIONS, smolvla_options
from rl_platform.placement.estimates.vlm_shape import known_vlm, random_options, vlm_policy_shape

BYTE_VOCABULARY = 259  # tokenizer "bytes"
PACKAGED = "smollm2-135m-instruct"  # of models.pretrained
IMAGE, IMAGE_CHANNELS = (84, 84), 4  # assumed too, without env.pixels
COUNTED = (
    "llama",
    "mistral",
    "mixtral",
    "ministral",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "seed_oss",
)
LARGEST_COMPILED = 2**17  # parameters of a policy that accel/compiled_training.py trains
GEMMA = ("gemma", "gemma2", "gemma3_text")
MIXTURES = ("gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3")

Shape = ModelShape | PolicyShape


class _MLP(TypedDict, total=False):
    """The fields of a shape about its feed-forward layers."""

    intermediate: Required[int]
    experts: int
    active_experts: int
    shared: int
    shared_gate: bool
    dense_layers: int
    dense_intermediate: int


def shapes(config: Config) -> tuple[dict[str, Shape], dict[str, str]]:
    """Returns the shapes of components with a model, and the reasons for models without a shape."""
    actor = config.actor.model
    if config.runner.task_type == "embodied":
        names, policy = ("actor", "actor_critic", "rollout"), _policy_shape(config)
        return ({}, dict.fromkeys(names, policy)) if isinstance(policy, str) else (dict.fromkeys(names, policy), {})
    sections = {"actor": actor, "rollout": actor}
    if config.critic.use_critic_model:
        sections["critic"] = config.model_of("critic")
    if config.has_reference:
        sections["reference"] = config.model_of("reference")
    if (scoring := config.reward.classifier) is not None and scoring.model is not None:
        sections["reward"] = Model(path=scoring.model.path)
    known: dict[str, Shape] = {}
    reasons: dict[str, str] = {}
    for name, model in sections.items():
        shape = language_shape(model)
        if isinstance(shape, str):
            reasons[name] = shape
        else:
            known[name] = replace(shape, value_head=True) if name in ("critic", "reward") else shape
    return known, reasons


def _policy_shape(config: Config) -> PolicyShape | str:
    """Returns the shape of an embodied policy, or why it is not known."""
    model, pixels = config.actor.model, config.env.pixels
    if model.type == "mlp":
        shape = PolicyShape(tuple(model.hidden_sizes))
        plain = (model.activation, model.log_std, model.action_distribution) == ("tanh", "free", "gaussian")
        compiled = plain and model.num_action_chunks == 1 and shape.parameters <= LARGEST_COMPILED
        return replace(shape, compiled=compiled and config.runner.accelerate == "auto")
    if model.type in VLM_POLICIES:
        return _vlm_policy(config)
    if model.type not in POLICIES:
        return f"{model.type} is a network of yours"
    if model.type == "gru":
        # three gates of features and state: the parameters of two layers of these widths
        return PolicyShape((*model.hidden_sizes, 3 * model.recurrent_size, model.recurrent_size))
    size, channels = IMAGE, IMAGE_CHANNELS
    if pixels is not None:
        size, channels = (pixels.height, pixels.width), pixels.frame_stack * (1 if pixels.grayscale else 3)
    layers = []
    sizes = model.cnn.map_sizes(*size)
    for out, kernel, (height, width) in zip(model.cnn.channels, model.cnn.kernels, sizes, strict=True):
        layers.append(ConvShape((channels * kernel**2 + 1) * out, out, height * width))
        channels = out
    if model.type == "cnn":
        return PolicyShape(tuple(model.hidden_sizes), layers[-1].elements, tuple(layers))
    language = language_shape(model)
    if isinstance(language, str):
        return language
    used = min(model.backbone_layers or language.layers, language.layers)
    # it keeps a few words of the vocabulary and has no output head
    stack = Stack(
        replace(language, layers=used),
        tokens=layers[-1].places + ACTIONS,
        table=language.hidden,
        frozen=not model.train_backbone,
    )
    return PolicyShape((), convolutions=tuple(layers), stacks=(stack,), heads=language.hidden + 1)


def _vlm_policy(config: Config) -> PolicyShape | str:
    """Returns the shape of a policy on a vision-language model, or why it is not known."""
    model = config.actor.model
    if model.random_init is None:
        options = config_options(model.path or "")
        options = known_vlm(model.path or "") or options if isinstance(options, str) else options
        if not isinstance(options, str) and options.get("type") == "smolvla":
            named = str(options.get("vlm_model_name") or SMOLVLM2)
            vlm = SMOLVLM2_OPTIONS if named == SMOLVLM2 else config_options(named)
            options = vlm if isinstance(vlm, str) else {"model_type": "smolvla", **smolvla_options(options, vlm)}
    elif (vocabulary := _vocabulary(model.tokenizer or "")) is None:
        return _unknown_vocabulary(model)
    else:
        options = random_options(model, vocabulary)
    return options if isinstance(options, str) else vlm_policy_shape(config, options, from_options)


def language_shape(model: Model) -> ModelShape | str:
    """Returns the shape of a section's language model, or why it is not known."""
    if model.random_init is not None:
        vocabulary = _vocabulary(model.tokenizer or "")
        return _unknown_vocabulary(model) if vocabulary is None else _random(model.random_init, vocabulary)
    options = config_options(model.path or "")
    return options if isinstance(options, str) else from_options(options)


def config_options(path: str) -> Options | str:
    """Returns config.json of a folder, of a hub id in the cache or of a known model, or why there is none."""
    file = _config_file(path)
    if file is None and (known := known_options(path)) is not None:
        return known
    if file is None:
        return f"no config.json of {path} is on this machine"
    try:
        options = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"{file} cannot be read: {error}"
    return options if isinstance(options, dict) else f"{file} holds no mapping"


def _unknown_vocabulary(model: Model) -> str:
    return f"the vocabulary of tokenizer {model.tokenizer!r} is unknown on this machine"


def from_options(options: Options) -> ModelShape | str:
    """Returns the shape that a Hugging Face config.json describes, or why it cannot be counted."""
    kind = options.get("model_type")
    if kind not in COUNTED:
        return f"parameters of model_type {kind} are not counted, only those of {', '.join(COUNTED)}"
    try:
        hidden, heads = int(options["hidden_size"]), int(options["num_attention_heads"])
        bias = bool(options.get("attention_bias", kind in ("gpt_oss", "seed_oss")))
        always = {"qwen2": True, "qwen2_moe": bool(options.get("qkv_bias", True))}  # whatever attention_bias says
        always |= dict.fromkeys(("mistral", "ministral", "mixtral", "deepseek_v2", "deepseek_v3"), False)
        usual = {"qwen3": 128, "gpt_oss": 64} | dict.fromkeys(GEMMA, 256)
        head_dim = int(options.get("head_dim") or usual.get(kind, hidden // heads))
        mlp = _experts(options) if kind in MIXTURES else _MLP(intermediate=int(options["intermediate_size"]))
        latent = _latent(options) if kind in ("deepseek_v2", "deepseek_v3") else None
        return ModelShape(
            vocabulary=int(options["vocab_size"]),
            hidden=hidden,
            layers=int(options["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(options.get("num_key_value_heads") or heads),
            head_dim=head_dim if latent is None else latent.plain + latent.rotary,
            tied=bool(options.get("tie_word_embeddings", kind in GEMMA)),
            attention_bias=always.get(kind, bias),
            output_bias=kind in ("llama", "qwen3", "qwen3_moe", "gpt_oss", *GEMMA) and bias,
            mlp_bias=kind == "llama" and bool(options.get("mlp_bias", False)),
            qk_norm=kind in ("qwen3", "qwen3_moe", "gemma3_text"),
            norms=4 if kind in ("gemma2", "gemma3_text") else 2,
            sinks=kind == "gpt_oss",
            expert_bias=kind == "gpt_oss",
            latent=latent,
            **mlp,
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        return f"config.json lacks or garbles {error}"


def _experts(options: Options) -> _MLP:
    kind = options["model_type"]
    if kind == "gpt_oss":
        return _MLP(
            intermediate=int(options["intermediate_size"]),
            experts=int(options["num_local_experts"]),
            active_experts=int(options["num_experts_per_tok"]),
        )
    width = int(options["intermediate_size" if kind == "mixtral" else "moe_intermediate_size"])
    number = next(name for name in ("num_experts", "num_local_experts", "n_routed_experts") if name in options)
    fields = _MLP(intermediate=width, experts=int(options[number]), active_experts=int(options["num_experts_per_tok"]))
    if kind == "qwen2_moe":
        fields["shared"], fields["shared_gate"] = int(options["shared_expert_intermediate_size"]), True
    layers, dense = int(options["num_hidden_layers"]), 0
    if kind in ("deepseek_v2", "deepseek_v3"):
        fields["shared"] = width * int(options.get("n_shared_experts") or 0)
        dense = min(int(options["first_k_dense_replace"]), layers)
    elif kind != "mixtral":
        without, every = options.get("mlp_only_layers") or (), int(options.get("decoder_sparse_step", 1))
        dense = sum(layer in without or (layer + 1) % every != 0 for layer in range(layers))
    if dense:
        fields["dense_layers"], fields["dense_intermediate"] = dense, int(options["intermediate_size"])
    return fields


def _latent(options: Options) -> Latent:
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return Latent(*(int(options[name] or 0) for name in names))


def _random(random: RandomLM, vocabulary: int) -> ModelShape:
    return ModelShape(
        vocabulary=vocabulary,
        hidden=random.hidden_size,
        layers=random.num_layers,
        heads=random.num_heads,
        kv_heads=random.num_kv_heads or random.num_heads,
        head_dim=random.hidden_size // random.num_heads,
        intermediate=random.intermediate_size,
        tied=True,
    )


def _config_file(path: str) -> Path | None:
    """Returns config.json of a folder, or of a hub id in the local cache. Downloads nothing."""
    folders = [Path(path).expanduser()]
    if path.count("/") <= 1 and not path.startswith((".", "/", "~")):  # a hub id
        home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
        hub = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
        folders += sorted((hub / f"models--{path.replace('/', '--')}" / "snapshots").glob("*"))
    return next((folder / "config.json" for folder in folders if (folder / "config.json").is_file()), None)


def _vocabulary(tokenizer: str) -> int | None:
    if tokenizer == "bytes":
        return BYTE_VOCABULARY
    if tokenizer == PACKAGED:
        return int((known_options(PACKAGED) or {})["vocab_size"])
    file = _config_file(tokenizer)
    folder = file.parent if file is not None else Path(tokenizer).expanduser()
    try:
        content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        tokens = set(content["model"]["vocab"])
        return len(tokens | {entry["content"] for entry in content.get("added_tokens", ())})
    except (OSError, ValueError, KeyError, TypeError):
        return None
