"""The shape of a model and its number of parameters, from its config alone, without weights and torch.

Counts are exact for the families in `COUNTED` and `random_init`. Other models have no shape but a reason, and so have
models whose config.json is neither on this machine nor in `architectures`.
"""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rl_platform.config.schema import Config
from rl_platform.config.schema.models import POLICIES, Lora, Model, RandomLM
from rl_platform.placement.architectures import Options, known_options

FLOAT = 4  # bytes of float32, the type of parameters and optimizer state
BYTE_VOCABULARY = 259  # tokenizer "bytes"
PACKAGED = "smollm2-135m-instruct"  # of models.pretrained
OBSERVATIONS, ACTIONS = 64, 16  # assumed: the plan does not start the environment
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
)
GEMMA = ("gemma", "gemma2", "gemma3_text")
MIXTURES = ("gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3")


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, 2024): queries and keys of `plain` + `rotary` channels a head, values
    of `value` channels, computed from `keys` channels and, if it is not 0, `queries` channels."""

    queries: int
    keys: int
    plain: int
    rotary: int
    value: int


@dataclass(frozen=True)
class ModelShape:
    """A decoder. `attention_bias`: of q, k and v; `output_bias`: of the attention's output; `qk_norm`: norms over query
    and key heads; `norms`: over hidden states, of a layer; `sinks`: a number per head; `expert_bias`: of experts and
    router; `value_head`: a scalar head in place of the vocabulary's. `experts` above 0: a layer has as many
    feed-forward networks, each of width `intermediate`, and a token goes through `active_experts` of them and through
    one of width `shared`, which has a gate if `shared_gate`. The first `dense_layers` layers have one of width
    `dense_intermediate` instead."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    tied: bool
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norms: int = 2
    sinks: bool = False
    expert_bias: bool = False
    value_head: bool = False
    experts: int = 0
    active_experts: int = 0
    shared: int = 0
    shared_gate: bool = False
    dense_layers: int = 0
    dense_intermediate: int = 0
    latent: Latent | None = None

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def projections(self) -> int:
        """Parameters of one layer's attention matrices."""
        latent = self.latent
        if latent is None:
            return self.hidden * (2 * self.attention_width + 2 * self.kv_width)
        width = self.attention_width
        queries = latent.queries * (self.hidden + width) if latent.queries else self.hidden * width
        keys = self.hidden * (latent.keys + latent.rotary)
        values = self.heads * latent.value
        return queries + keys + latent.keys * (self.heads * latent.plain + values) + values * self.hidden

    @property
    def matrices_per_layer(self) -> int:
        """Parameters of one layer's matrices: of a layer with experts, if there are any."""
        shared = 3 * self.hidden * self.shared + self.hidden * self.shared_gate
        router = self.hidden * self.experts
        return self.projections + self._network * max(self.experts, 1) + router + shared

    @property
    def _network(self) -> int:
        """Parameters of one feed-forward network; biases only of experts, which are rows of a matrix."""
        biases = (2 * self.intermediate + self.hidden) * self.expert_bias
        return 3 * self.hidden * self.intermediate + biases

    @property
    def matrices(self) -> int:
        """Parameters of the matrices of all layers."""
        return self.layers * self.matrices_per_layer - self._less

    @property
    def _less(self) -> int:
        """Parameters that layers with experts have more than the first layers, of all those."""
        dense = self.projections + 3 * self.hidden * self.dense_intermediate
        return self.dense_layers * (self.matrices_per_layer - dense)

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts of all layers."""
        return self._network * self.experts * (self.layers - self.dense_layers)

    @property
    def inactive_parameters(self) -> int:
        """Parameters of the experts of all layers that a token does not go through."""
        return self.expert_parameters * (self.experts - self.active_experts) // max(self.experts, 1)

    @property
    def feed_forward_width(self) -> int:
        """Channels of one token between the feed-forward matrices, of all its experts."""
        return self.intermediate * max(self.active_experts, 1) + self.shared

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer: of one with experts, if there are any."""
        biases = (self.attention_width + 2 * self.kv_width) * self.attention_bias + self.hidden * self.output_bias
        biases += (2 * self.intermediate + self.hidden) * self.mlp_bias
        biases += self.heads * self.sinks + self.experts * self.expert_bias
        norms = self.norms * self.hidden + 2 * self.head_dim * self.qk_norm
        norms += self.latent.queries + self.latent.keys if self.latent else 0
        return self.matrices_per_layer + biases + norms

    @property
    def decoder_parameters(self) -> int:
        """Parameters of all layers."""
        return self.layers * self.layer_parameters - self._less

    def adapter_parameters(self, lora: Lora) -> int:
        """Returns the parameters of the adapters of all layers; only linear layers of counted models have adapters."""
        hidden, queries, latent = self.hidden, self.attention_width, self.latent
        sums = {"q_proj": hidden + queries, "o_proj": queries + hidden}  # width in and out
        sums |= dict.fromkeys(("k_proj", "v_proj"), hidden + self.kv_width)
        if latent is not None:
            sums = {"q_proj": hidden + queries, "o_proj": self.heads * latent.value + hidden}
            if latent.queries:
                sums |= {"q_proj": 0, "q_a_proj": hidden + latent.queries, "q_b_proj": latent.queries + queries}
            sums["kv_a_proj_with_mqa"] = hidden + latent.keys + latent.rotary
            sums["kv_b_proj"] = latent.keys + self.heads * (latent.plain + latent.value)
        total = self.layers * sum(sums.get(name, 0) for name in set(lora.target_modules))
        widths = [(self.layers, self.intermediate)]
        if self.experts:  # transformers keeps the experts of a layer in one tensor, which has no adapters
            shared = (self.layers - self.dense_layers) * bool(self.shared)
            widths = [(self.dense_layers, self.dense_intermediate), (shared, self.shared)]
        matrices = len({"gate_proj", "up_proj", "down_proj"} & set(lora.target_modules))
        return lora.rank * (total + matrices * sum(layers * (hidden + width) for layers, width in widths))

    @property
    def head_parameters(self) -> int:
        """Parameters of the output head: 0 if it is the embedding, with a bias for values."""
        if self.value_head:
            return self.hidden + 1
        return 0 if self.tied else self.vocabulary * self.hidden

    @property
    def outer_parameters(self) -> int:
        """Parameters outside the layers: embedding, last norm, head."""
        return self.vocabulary * self.hidden + self.hidden + self.head_parameters

    @property
    def parameters(self) -> int:
        return self.decoder_parameters + self.outer_parameters

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses."""
        return self.parameters - self.inactive_parameters

    @property
    def products_per_token(self) -> int:
        """Multiply-adds of one token's forward, without attention scores."""
        head = self.hidden * (1 if self.value_head else self.vocabulary)
        return self.matrices - self.inactive_parameters + head

    @property
    def whole_kv_elements_per_token(self) -> int:
        """Cached numbers of the built-in engine, which keeps the keys and values of all heads, of one width."""
        if self.latent is None:
            return self.kv_elements_per_token
        return self.layers * 2 * self.heads * max(self.head_dim, self.latent.value)

    @property
    def kv_elements_per_token(self) -> int:
        each = 2 * self.kv_width if self.latent is None else self.latent.keys + self.latent.rotary
        return self.layers * each


@dataclass(frozen=True)
class ConvShape:
    """A layer of convolutions over an image."""

    parameters: int
    channels: int
    places: int

    @property
    def elements(self) -> int:
        """Number of its outputs for one image."""
        return self.channels * self.places


@dataclass(frozen=True)
class PolicyShape:
    """An embodied policy: one backbone, a policy head and a value head. Numbers of observations and actions are
    assumed, and the size of images that the environment itself gives.

    widths: of the MLP, whose first layer reads `inputs` numbers. `language` reads `tokens` of them per row instead.
    """

    widths: tuple[int, ...]
    inputs: int = OBSERVATIONS
    convolutions: tuple[ConvShape, ...] = ()
    language: ModelShape | None = None
    tokens: int = 0
    frozen: bool = False

    @property
    def parameters(self) -> int:
        vision = sum(layer.parameters for layer in self.convolutions)
        if self.language is not None:
            return vision + self.language.parameters
        sizes = (self.inputs, *self.widths)
        layers = sum((first + 1) * second for first, second in itertools.pairwise(sizes))
        return vision + layers + (sizes[-1] + 1) * (ACTIONS + 1) + ACTIONS

    def trained_parameters(self, lora: Lora | None = None) -> int:
        """All, or those outside the language model and its adapters."""
        if self.language is None or not (self.frozen or lora):
            return self.parameters
        adapters = 0 if lora is None else self.language.adapter_parameters(lora)
        return self.parameters - self.language.parameters + adapters

    @property
    def active_parameters(self) -> int:
        return self.parameters

    @property
    def layers(self) -> int:
        return len(self.widths) + len(self.convolutions) + (self.language.layers if self.language else 0)

    @property
    def elements(self) -> list[int]:
        """Number of outputs of each layer for one row, without a language model."""
        return [*(layer.elements for layer in self.convolutions), *self.widths]

    @property
    def products_per_token(self) -> int:
        """Multiply-adds of one row's forward."""
        vision = sum(layer.parameters * (layer.places - 1) for layer in self.convolutions)
        if self.language is None:
            return self.parameters + vision
        return self.parameters - self.language.parameters + vision + self.tokens * self.language.products_per_token


Shape = ModelShape | PolicyShape


def shapes(config: Config) -> tuple[dict[str, Shape], dict[str, str]]:
    """Returns the shapes of components with a model, and the reasons for models without a shape."""
    actor = config.actor.model
    if config.runner.task_type == "embodied":
        names, policy = ("actor", "actor_critic", "rollout"), _policy_shape(config)
        return ({}, dict.fromkeys(names, policy)) if isinstance(policy, str) else (dict.fromkeys(names, policy), {})
    sections = {"actor": actor, "rollout": actor}
    if config.critic.use_critic_model:
        sections["critic"] = config.critic.model or actor
    if config.has_reference:
        sections["reference"] = config.reference.model or actor
    if (scoring := config.reward.classifier) is not None and scoring.model is not None:
        sections["reward"] = Model(path=scoring.model.path)
    known: dict[str, Shape] = {}
    reasons: dict[str, str] = {}
    for name, model in sections.items():
        shape = language_shape(model)
        if isinstance(shape, str):
            reasons[name] = shape
        else:
            known[name] = _with_value_head(shape) if name in ("critic", "reward") else shape
    return known, reasons


def _policy_shape(config: Config) -> PolicyShape | str:
    """Returns the shape of an embodied policy, or why it is not known."""
    model, pixels = config.actor.model, config.env.pixels
    if model.type == "mlp":
        return PolicyShape(tuple(model.hidden_sizes))
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
    language = replace(language, layers=used, vocabulary=0, value_head=True)
    tokens = layers[-1].places + ACTIONS
    frozen = not model.train_backbone
    return PolicyShape((), 0, tuple(layers), language, tokens, frozen)


def language_shape(model: Model) -> ModelShape | str:
    """Returns the shape of a section's language model, or why it is not known."""
    if model.random_init is not None:
        vocabulary = _vocabulary(model.tokenizer or "")
        if vocabulary is None:
            return f"the vocabulary of tokenizer {model.tokenizer!r} is unknown on this machine"
        return _random(model.random_init, vocabulary)
    path = model.path or ""
    file = _config_file(path)
    if file is None and _is_hub_id(path) and (known := known_options(path)) is not None:
        return from_options(known)
    if file is None:
        return f"no config.json of {path} is on this machine"
    try:
        options = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"{file} cannot be read: {error}"
    return from_options(options) if isinstance(options, dict) else f"{file} holds no mapping"


def from_options(options: Options) -> ModelShape | str:
    """Returns the shape that a Hugging Face config.json describes, or why it cannot be counted."""
    kind = options.get("model_type")
    if kind not in COUNTED:
        return f"parameters of model_type {kind} are not counted, only those of {', '.join(COUNTED)}"
    try:
        hidden, heads = int(options["hidden_size"]), int(options["num_attention_heads"])
        bias = bool(options.get("attention_bias", kind == "gpt_oss"))
        always = {"qwen2": True, "qwen2_moe": bool(options.get("qkv_bias", True))}  # whatever attention_bias says
        always |= dict.fromkeys(("mistral", "ministral", "mixtral", "deepseek_v2", "deepseek_v3"), False)
        usual = {"qwen3": 128, "gpt_oss": 64} | dict.fromkeys(GEMMA, 256)
        head_dim = int(options.get("head_dim") or usual.get(kind, hidden // heads))
        experts: dict[str, Any] = (
            _experts(options) if kind in MIXTURES else {"intermediate": int(options["intermediate_size"])}
        )
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
            **experts,
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        return f"config.json lacks or garbles {error}"


def _experts(options: Options) -> dict[str, int]:
    """Returns the fields of a shape about its experts."""
    kind = options["model_type"]
    if kind == "gpt_oss":
        names = {"intermediate": "intermediate_size", "experts": "num_local_experts"}
        names["active_experts"] = "num_experts_per_tok"
        return {field: int(options[name]) for field, name in names.items()}
    width = int(options["intermediate_size" if kind == "mixtral" else "moe_intermediate_size"])
    number = next(name for name in ("num_experts", "num_local_experts", "n_routed_experts") if name in options)
    fields = {"intermediate": width, "experts": int(options[number])}
    fields["active_experts"] = int(options["num_experts_per_tok"])
    if kind == "qwen2_moe":
        fields |= {"shared": int(options["shared_expert_intermediate_size"]), "shared_gate": True}
    layers, dense = int(options["num_hidden_layers"]), 0
    if kind in ("deepseek_v2", "deepseek_v3"):
        fields["shared"] = width * int(options.get("n_shared_experts") or 0)
        dense = min(int(options["first_k_dense_replace"]), layers)
    elif kind != "mixtral":
        without, every = options.get("mlp_only_layers") or (), int(options.get("decoder_sparse_step", 1))
        dense = sum(layer in without or (layer + 1) % every != 0 for layer in range(layers))
    if dense:
        fields |= {"dense_layers": dense, "dense_intermediate": int(options["intermediate_size"])}
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


def _with_value_head(shape: ModelShape) -> ModelShape:
    return replace(shape, value_head=True)


def _config_file(path: str) -> Path | None:
    """Returns config.json of a folder, or of a hub id in the local cache. Downloads nothing."""
    folders = [Path(path).expanduser()]
    if _is_hub_id(path):
        home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
        hub = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
        folders += sorted((hub / f"models--{path.replace('/', '--')}" / "snapshots").glob("*"))
    return next((folder / "config.json" for folder in folders if (folder / "config.json").is_file()), None)


def _is_hub_id(path: str) -> bool:
    return path.count("/") <= 1 and not path.startswith((".", "/", "~"))


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
