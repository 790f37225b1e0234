"""Architectures of language models: `options_of` finds a model's config.json, `small_options` shrinks it.

A config.json on this machine comes first: a folder, or the cache of the Hugging Face hub. Otherwise a table of model
families by their hub ids, with the values of their config.json. Nothing is downloaded.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_platform.config.schema.models import Trainable
from rl_platform.errors import ConfigError, Problem
from rl_platform.launch.rehearse.shrink import small_heads, small_layers
from rl_platform.models.pretrained import PACKAGED, cache_folder

Options = dict[str, Any]
HEAD, HIDDEN, INNER, EXPERT = 16, 64, 128, 32  # widths of small models
SMOLLM2: Options = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49_152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Specials:
    """Special tokens of a tokenizer. chat: the template renders a conversation with `turn` tokens."""

    family: str
    eos: str
    pad: str
    bos: str | None = None
    others: tuple[str, ...] = ()
    start: str = "<|im_start|>{role}\n"  # of a turn
    end: str = "<|im_end|>\n"
    chat: bool = True


QWEN = Specials("Qwen2", "<|im_end|>", "<|endoftext|>", None, ("<|im_start|>",))
DEEPSEEK = Specials(
    "DeepSeek",
    "<｜end▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜begin▁of▁sentence｜>",
    ("<｜User｜>", "<｜Assistant｜>"),
    "<｜{role}｜>",
    "",
)
DEEPSEEK_QWEN = Specials(
    "DeepSeek-R1-Distill-Qwen", *([DEEPSEEK.eos] * 2), DEEPSEEK.bos, DEEPSEEK.others, DEEPSEEK.start, ""
)
DEEPSEEK_LLAMA = Specials(
    "DeepSeek-R1-Distill-Llama", *([DEEPSEEK.eos] * 2), DEEPSEEK.bos, DEEPSEEK.others, DEEPSEEK.start, ""
)
LLAMA3 = Specials(
    "Llama 3",
    "<|eot_id|>",
    "<|finetune_right_pad_id|>",
    "<|begin_of_text|>",
    ("<|start_header_id|>", "<|end_header_id|>"),
    "<|start_header_id|>{role}<|end_header_id|>\n\n",
    "<|eot_id|>",
)
LLAMA2 = Specials("Llama 2", "</s>", "</s>", "<s>", ("[INST]", "[/INST]"), "[{role}] ", " ")
MISTRAL = Specials("Mistral", "</s>", "</s>", "<s>", ("[INST]", "[/INST]"), "[{role}] ", " ")
GEMMA = Specials(
    "Gemma", "<end_of_turn>", "<pad>", "<bos>", ("<start_of_turn>",), "<start_of_turn>{role}\n", "<end_of_turn>\n"
)
MOONLIGHT = Specials("Moonlight", "<|im_end|>", "[PAD]", "[BOS]", ("<|im_user|>", "<|im_middle|>"), "<|im_{role}|>")
SMOLLM = Specials("SmolLM2", "<|im_end|>", "<|im_end|>", "<|im_start|>")
PLAIN = Specials("bytes", "<|endoftext|>", "<|pad|>", None, ())


@dataclass(frozen=True)
class Architecture:
    """config.json of a model, and its tokenizer. folder: the files on this machine; None: from the table."""

    options: Options
    specials: Specials
    folder: Path | None = None

    @property
    def has_tokenizer(self) -> bool:
        return self.folder is not None and any(
            (self.folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")
        )


@dataclass(frozen=True)
class _Family:
    """Models whose hub ids match `pattern`. sizes: billions of parameters in the id -> (hidden, layers, heads,
    kv_heads, intermediate); the last one holds for ids without a known size."""

    pattern: str
    options: Options
    specials: Specials
    sizes: dict[str, tuple[int, int, int, int, int]] = field(default_factory=dict)
    tied: tuple[str, ...] = ()  # sizes that use the embedding as output matrix


_QWEN25_SIZES = {
    "0.5": (896, 24, 14, 2, 4864),
    "1.5": (1536, 28, 12, 2, 8960),
    "3": (2048, 36, 16, 2, 11_008),
    "7": (3584, 28, 28, 4, 18_944),
    "14": (5120, 48, 40, 8, 13_824),
    "32": (5120, 64, 40, 8, 27_648),
    "72": (8192, 80, 64, 8, 29_568),
}
_QWEN3_SIZES = {
    "0.6": (1024, 28, 16, 8, 3072),
    "1.7": (2048, 28, 16, 8, 6144),
    "4": (2560, 36, 32, 8, 9728),
    "8": (4096, 36, 32, 8, 12_288),
    "14": (5120, 40, 40, 8, 17_408),
    "32": (5120, 64, 64, 8, 25_600),
}
_LLAMA3_SIZES = {
    "1": (2048, 16, 32, 8, 8192),
    "3": (3072, 28, 24, 8, 8192),
    "8": (4096, 32, 32, 8, 14_336),
    "70": (8192, 80, 64, 8, 28_672),
}
_DEEPSEEK_MOE: Options = {
    "vocab_size": 129_280,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163_840,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
_ROPE3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_QWEN_VOCABULARY, _QWEN_POSITIONS = {"vocab_size": 151_936}, {"max_position_embeddings": 32_768, "rope_theta": 1e6}
_LLAMA_OPTIONS = {"model_type": "llama", "rms_norm_eps": 1e-5}

FAMILIES = (
    _Family(
        r"r1-distill-qwen",
        {"model_type": "qwen2", **_QWEN_VOCABULARY, **_QWEN_POSITIONS, "max_position_embeddings": 131_072},
        DEEPSEEK_QWEN,
        _QWEN25_SIZES,
    ),
    _Family(
        r"r1-distill-llama",
        {
            **_LLAMA_OPTIONS,
            "vocab_size": 128_256,
            "max_position_embeddings": 131_072,
            "rope_theta": 5e5,
            "rope_scaling": _ROPE3,
        },
        DEEPSEEK_LLAMA,
        _LLAMA3_SIZES,
    ),
    _Family(
        r"qwen3-30b-a3b|qwen3-\w+-30b-a3b|qwen3moe",
        {
            "model_type": "qwen3_moe",
            **_QWEN_VOCABULARY,
            "max_position_embeddings": 40_960,
            "rope_theta": 1e6,
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
        },
        QWEN,
    ),
    _Family(
        r"qwen3-235b-a22b",
        {
            "model_type": "qwen3_moe",
            **_QWEN_VOCABULARY,
            "max_position_embeddings": 40_960,
            "rope_theta": 1e6,
            "hidden_size": 4096,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 12_288,
            "moe_intermediate_size": 1536,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
        },
        QWEN,
    ),
    _Family(
        r"qwen1\.5-moe|qwen2-57b-a14b",
        {
            "model_type": "qwen2_moe",
            **_QWEN_VOCABULARY,
            "max_position_embeddings": 8192,
            "rope_theta": 1e6,
            "hidden_size": 2048,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "intermediate_size": 5632,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "tie_word_embeddings": False,
        },
        QWEN,
    ),
    _Family(
        r"qwen3",
        {
            "model_type": "qwen3",
            **_QWEN_VOCABULARY,
            "max_position_embeddings": 40_960,
            "rope_theta": 1e6,
            "head_dim": 128,
        },
        QWEN,
        _QWEN3_SIZES,
        ("0.6", "1.7", "4"),
    ),
    _Family(
        r"qwen(2|2\.5)\b|qwen2",
        {"model_type": "qwen2", **_QWEN_VOCABULARY, **_QWEN_POSITIONS},
        QWEN,
        _QWEN25_SIZES,
        ("0.5", "1.5", "3"),
    ),
    _Family(
        r"deepseek-(v3|r1)(?!-distill)",
        {"model_type": "deepseek_v3", **_DEEPSEEK_MOE},
        DEEPSEEK,
    ),
    _Family(
        r"moonlight",
        {
            "model_type": "deepseek_v3",
            **_DEEPSEEK_MOE,
            "vocab_size": 163_840,
            "hidden_size": 2048,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "intermediate_size": 11_264,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": None,
            "max_position_embeddings": 8192,
            "routed_scaling_factor": 2.446,
        },
        MOONLIGHT,
    ),
    _Family(
        r"deepseek-v2",
        {
            "model_type": "deepseek_v2",
            **_DEEPSEEK_MOE,
            "vocab_size": 102_400,
            "hidden_size": 2048,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "intermediate_size": 10_944,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": None,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": False,
        },
        DEEPSEEK,
    ),
    _Family(
        r"deepseek-(llm|coder|math)",
        {**_LLAMA_OPTIONS, "vocab_size": 102_400, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6},
        DEEPSEEK,
        {"67": (8192, 95, 64, 8, 22_016), "7": (4096, 30, 32, 32, 11_008)},
    ),
    _Family(
        r"llama-3\.2",
        {
            **_LLAMA_OPTIONS,
            "vocab_size": 128_256,
            "max_position_embeddings": 131_072,
            "rope_theta": 5e5,
            "rope_scaling": _ROPE3,
        },
        LLAMA3,
        _LLAMA3_SIZES,
        ("1", "3"),
    ),
    _Family(
        r"llama-3",
        {
            **_LLAMA_OPTIONS,
            "vocab_size": 128_256,
            "max_position_embeddings": 131_072,
            "rope_theta": 5e5,
            "rope_scaling": _ROPE3 | {"factor": 8.0},
        },
        LLAMA3,
        _LLAMA3_SIZES,
    ),
    _Family(
        r"llama-2",
        {**_LLAMA_OPTIONS, "vocab_size": 32_000, "max_position_embeddings": 4096},
        LLAMA2,
        {"70": (8192, 80, 64, 8, 28_672), "13": (5120, 40, 40, 40, 13_824), "7": (4096, 32, 32, 32, 11_008)},
    ),
    _Family(
        r"mixtral",
        {
            "model_type": "mixtral",
            "vocab_size": 32_000,
            "max_position_embeddings": 32_768,
            "rope_theta": 1e6,
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14_336,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "tie_word_embeddings": False,
        },
        MISTRAL,
    ),
    _Family(
        r"mistral",
        {
            "model_type": "mistral",
            "vocab_size": 32_768,
            "max_position_embeddings": 32_768,
            "rope_theta": 1e6,
            "sliding_window": None,
        },
        MISTRAL,
        {"7": (4096, 32, 32, 8, 14_336)},
    ),
    _Family(
        r"gemma-(2b|7b|1\.1)",
        {
            "model_type": "gemma",
            "vocab_size": 256_000,
            "max_position_embeddings": 8192,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
        },
        GEMMA,
        {"2": (2048, 18, 8, 1, 16_384), "7": (3072, 28, 16, 16, 24_576)},
        ("2", "7"),
    ),
    _Family(r"smollm2", SMOLLM2, SMOLLM),
)


def options_of(path: str, key: str) -> Architecture:
    """Returns the architecture of the model at `path`, a folder or hub id. Raises ConfigError about `key`."""
    folder = local_folder(path)
    known = _from_table(path)
    if folder is not None:
        try:
            options = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError([Problem(key, f"config.json cannot be read: {error}", value=path)]) from error
        return Architecture(options, PLAIN if known is None else known.specials, folder)
    if known is None:
        hint = "hf download MODEL config.json --local-dir FOLDER, then name FOLDER"
        raise ConfigError(
            [Problem(key, "neither on this machine nor among the architectures known here", value=path, hint=hint)]
        )
    return known


def local_folder(path: str) -> Path | None:
    """Returns the folder on this machine with config.json of a model: `path`, or its snapshot in the hub's cache."""
    folder = cache_folder() / PACKAGED if path == PACKAGED else Path(path).expanduser()
    if (folder / "config.json").is_file():
        return folder
    if path.count("/") != 1 or path.startswith((".", "/", "~")):
        return None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(path, "config.json")
    return Path(cached).parent if isinstance(cached, str) else None


def _from_table(path: str) -> Architecture | None:
    name = path.rpartition("/")[2].lower()
    family = next((each for each in FAMILIES if re.search(each.pattern, name)), None)
    if family is None:
        return None
    options = dict(family.options)
    if family.sizes:
        match = re.search(r"(\d+(?:\.\d+)?)b\b", name)
        size = match[1] if match and match[1] in family.sizes else list(family.sizes)[-1]
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
        options |= dict(zip(names, family.sizes[size], strict=True))
        options["tie_word_embeddings"] = size in family.tied
    return Architecture(options, family.specials)


def small_options(options: Options, section: Trainable, vocabulary: int) -> Options:
    """Returns config.json of a small model of the same architecture.

    Cut are layers, widths, heads and experts. The relation of heads to key and value heads, rotary positions, biases,
    norms, tied matrices and the kinds of layers stay. section: how the model is trained, which decides the layers.
    """
    small = {name: value for name, value in options.items() if name not in ("quantization_config", "auto_map")}
    layers = small_layers(options["num_hidden_layers"], section)
    heads, kv_heads = _small_heads(options)
    wide = options.get("head_dim") not in (None, options["hidden_size"] // options["num_attention_heads"])
    head = 2 * HEAD if wide else HEAD
    sizes = {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": heads * HEAD,
        "intermediate_size": INNER,
        "head_dim": head,
        "vocab_size": vocabulary,
        "moe_intermediate_size": EXPERT,
        "shared_expert_intermediate_size": EXPERT,
        "q_lora_rank": EXPERT,
        "kv_lora_rank": HEAD,
        "qk_nope_head_dim": HEAD,
        "qk_rope_head_dim": HEAD // 2,
        "v_head_dim": HEAD,
        "num_experts": 4,
        "num_local_experts": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": min(options.get("num_experts_per_tok") or 2, 2),
        "n_group": min(options.get("n_group") or 1, 2),
        "topk_group": 1,
        "first_k_dense_replace": min(options.get("first_k_dense_replace") or 0, 1),
        "max_window_layers": layers,
    }
    small |= {name: value for name, value in sizes.items() if options.get(name) is not None}
    if options.get("layer_types"):
        kinds = options["layer_types"]
        small["layer_types"] = [*dict.fromkeys(kinds), *kinds][:layers]
    if options.get("mlp_only_layers"):
        small["mlp_only_layers"] = [number for number in options["mlp_only_layers"] if number < layers]
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(options.get(name), dict):
            small[name] = {key: _rotary(value, head) for key, value in options[name].items()}
    return small


def _small_heads(options: Options) -> tuple[int, int]:
    heads = options["num_attention_heads"]
    return small_heads(heads, options.get("num_key_value_heads") or heads)


def _rotary(value: object, head: int) -> object:
    """Cuts factors of each rotary frequency to the small head."""
    return value[: head // 2] if isinstance(value, list) else value
