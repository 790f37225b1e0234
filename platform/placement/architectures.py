"""config.json of known language models by their hub ids, for plans and rehearsals without the model's files.

A table by family, with the published values. Keys that no layer and no count depends on are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Options = dict[str, Any]  # a config.json of Hugging Face
Sizes = Mapping[str, tuple[int, ...]]
_SIZE_KEYS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
)


@dataclass(frozen=True)
class Family:
    """Models whose hub ids match `pattern`, in lower case and without the organisation.

    tokenizer: a name for its special tokens. sizes: parameters in the id -> values of `_SIZE_KEYS`, of which the last
    may be missing. tied: sizes that use the embedding as output matrix.
    """

    pattern: str
    tokenizer: str
    options: Options
    sizes: Sizes = field(default_factory=dict)
    tied: tuple[str, ...] = ()

    def options_of(self, path: str) -> Options | None:
        """Returns config.json of the model `path` of this family; None if its size is not known."""
        if not self.sizes:
            return dict(self.options)
        match = re.search(r"(\d+(?:\.\d+)?)[bm]\b", _name(path))
        size = match[1] if match else ""
        if size not in self.sizes:
            return None
        named = dict(zip(_SIZE_KEYS, self.sizes[size], strict=False))
        return {**self.options, **named, "tie_word_embeddings": size in self.tied}


_QWEN25_SIZES = {
    "0.5": (896, 24, 14, 2, 4864),
    "1.5": (1536, 28, 12, 2, 8960),
    "3": (2048, 36, 16, 2, 11_008),
    "7": (3584, 28, 28, 4, 18_944, 152_064),
    "14": (5120, 48, 40, 8, 13_824, 152_064),
    "32": (5120, 64, 40, 8, 27_648, 152_064),
    "72": (8192, 80, 64, 8, 29_568, 152_064),
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
_YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
_YARN_V2 = _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}
_DEEPSEEK_V3: Options = {
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
    "tie_word_embeddings": False,
}
_DEEPSEEK_SMALL = {  # DeepSeek-V2-Lite, and Moonlight
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
}
_ROPE3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5}
_LLAMA3 = {**_LLAMA, "vocab_size": 128_256, "max_position_embeddings": 131_072, "rope_theta": 5e5}
_LLAMA31 = {**_LLAMA3, "rope_scaling": _ROPE3 | {"factor": 8.0}}
_QWEN = {"vocab_size": 151_936, "rope_theta": 1e6}
_QWEN2 = {"model_type": "qwen2", **_QWEN}
_SMOLLM2 = {"model_type": "llama", "vocab_size": 49_152, "max_position_embeddings": 8192}
_QWEN3_MOE = {
    "model_type": "qwen3_moe",
    **_QWEN,
    "max_position_embeddings": 40_960,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
_QWEN2_MOE = {"model_type": "qwen2_moe", **_QWEN, "norm_topk_prob": False, "tie_word_embeddings": False}

FAMILIES = (
    Family(  # of Qwen2.5-Math
        r"r1-distill-qwen-(1\.5|7)b",
        "deepseek-qwen",
        {**_QWEN2, "max_position_embeddings": 131_072, "rope_theta": 1e4},
        _QWEN25_SIZES,
    ),
    Family(r"r1-distill-qwen", "deepseek-qwen", {**_QWEN2, "max_position_embeddings": 131_072}, _QWEN25_SIZES),
    Family(r"r1-distill-llama", "deepseek-llama", _LLAMA31, _LLAMA3_SIZES),
    Family(
        r"qwen3-30b-a3b|qwen3-\w+-30b-a3b|qwen3moe",
        "qwen",
        {
            **_QWEN3_MOE,
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
        },
    ),
    Family(
        r"qwen3-235b-a22b",
        "qwen",
        {
            **_QWEN3_MOE,
            "hidden_size": 4096,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "intermediate_size": 12_288,
            "moe_intermediate_size": 1536,
        },
    ),
    Family(
        r"qwen1\.5-moe",
        "qwen",
        {
            **_QWEN2_MOE,
            "max_position_embeddings": 8192,
            "hidden_size": 2048,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "intermediate_size": 5632,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts": 60,
            "num_experts_per_tok": 4,
        },
    ),
    Family(
        r"qwen2-57b-a14b",
        "qwen",
        {
            **_QWEN2_MOE,
            "max_position_embeddings": 32_768,
            "hidden_size": 3584,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "intermediate_size": 18_944,
            "moe_intermediate_size": 2560,
            "shared_expert_intermediate_size": 20_480,
            "num_experts": 64,
            "num_experts_per_tok": 8,
        },
    ),
    Family(
        r"qwen3",
        "qwen",
        {"model_type": "qwen3", **_QWEN, "max_position_embeddings": 40_960, "head_dim": 128},
        _QWEN3_SIZES,
        ("0.6", "1.7", "4"),
    ),
    Family(
        r"qwen2\.5-math",
        "qwen",
        {**_QWEN2, "max_position_embeddings": 4096, "rope_theta": 1e4},
        _QWEN25_SIZES,
        ("1.5",),
    ),
    Family(  # base models
        r"qwen2(-0\.5b|(\.5)?-(1\.5|7|14|32|72)b)$",
        "qwen",
        {**_QWEN2, "max_position_embeddings": 131_072},
        _QWEN25_SIZES,
        ("0.5", "1.5"),
    ),
    Family(r"qwen2", "qwen", {**_QWEN2, "max_position_embeddings": 32_768}, _QWEN25_SIZES, ("0.5", "1.5", "3")),
    Family(
        r"deepseek-(v3|r1)(?!-distill)",
        "deepseek",
        {"model_type": "deepseek_v3", **_DEEPSEEK_V3, "rope_scaling": _YARN},
    ),
    Family(
        r"moonlight",
        "moonlight",
        {
            "model_type": "deepseek_v3",
            **_DEEPSEEK_V3,
            **_DEEPSEEK_SMALL,
            "vocab_size": 163_840,
            "intermediate_size": 11_264,
            "max_position_embeddings": 8192,
            "rope_theta": 5e4,
            "rms_norm_eps": 1e-5,
            "routed_scaling_factor": 2.446,
        },
    ),
    Family(
        r"deepseek-(coder-)?v2-lite",
        "deepseek",
        {
            "model_type": "deepseek_v2",
            **_DEEPSEEK_V3,
            **_DEEPSEEK_SMALL,
            "vocab_size": 102_400,
            "intermediate_size": 10_944,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": False,
            "rope_scaling": _YARN_V2,
        },
    ),
    Family(
        r"deepseek-(coder-)?v2",
        "deepseek",
        {
            "model_type": "deepseek_v2",
            **_DEEPSEEK_V3,
            "vocab_size": 102_400,
            "hidden_size": 5120,
            "num_hidden_layers": 60,
            "intermediate_size": 12_288,
            "moe_intermediate_size": 1536,
            "n_routed_experts": 160,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "topk_group": 3,
            "topk_method": "group_limited_greedy",
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 16.0,
            "norm_topk_prob": False,
            "rope_scaling": _YARN_V2,
        },
    ),
    Family(
        r"deepseek-(llm|math)",
        "deepseek",
        {**_LLAMA, "vocab_size": 102_400, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6},
        {"67": (8192, 95, 64, 8, 22_016), "7": (4096, 30, 32, 32, 11_008)},
    ),
    Family(r"llama-3\.2", "llama-3", {**_LLAMA3, "rope_scaling": _ROPE3}, _LLAMA3_SIZES, ("1", "3")),
    Family(r"llama-3\.[13]", "llama-3", _LLAMA31, _LLAMA3_SIZES),
    Family(r"llama-3", "llama-3", {**_LLAMA3, "max_position_embeddings": 8192}, _LLAMA3_SIZES),
    Family(  # a reward model
        r"fsfairx-llama3",
        "llama-3",
        {**_LLAMA3, "max_position_embeddings": 8192, **dict(zip(_SIZE_KEYS, _LLAMA3_SIZES["8"], strict=False))},
    ),
    Family(
        r"llama-2",
        "llama-2",
        {**_LLAMA, "vocab_size": 32_000, "max_position_embeddings": 4096},
        {"70": (8192, 80, 64, 8, 28_672), "13": (5120, 40, 40, 40, 13_824), "7": (4096, 32, 32, 32, 11_008)},
    ),
    Family(
        r"mixtral-8x7b",
        "mistral",
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
    ),
    Family(
        r"mistral",
        "mistral",
        {
            "model_type": "mistral",
            "vocab_size": 32_768,
            "max_position_embeddings": 32_768,
            "rope_theta": 1e6,
            "sliding_window": None,
        },
        {"7": (4096, 32, 32, 8, 14_336)},
    ),
    Family(
        r"gemma-(2b|7b|1\.1)",
        "gemma",
        {
            "model_type": "gemma",
            "vocab_size": 256_000,
            "max_position_embeddings": 8192,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
        },
        {"2": (2048, 18, 8, 1, 16_384), "7": (3072, 28, 16, 16, 24_576)},
        ("2", "7"),
    ),
    Family(
        r"smollm2-1\.7b",
        "smollm2",
        {**_SMOLLM2, "rope_theta": 1.3e5},
        {"1.7": (2048, 24, 32, 32, 8192)},
        ("1.7",),
    ),
    Family(
        r"smollm2",
        "smollm2",
        {**_SMOLLM2, "rope_theta": 1e5},
        {"135": (576, 30, 9, 3, 1536), "360": (960, 32, 15, 5, 2560)},
        ("135", "360"),
    ),
)


_OTHER_MODELS = re.compile(r"\b(vl|audio|omni|embedding|reranker|coder-480b)\b|qwen3-next")


def family_of(path: str) -> Family | None:
    """Returns the family of a hub id."""
    name = _name(path)
    if _OTHER_MODELS.search(name):  # of another architecture than the family that their names begin with
        return None
    return next((family for family in FAMILIES if re.search(family.pattern, name)), None)


def known_options(path: str) -> Options | None:
    """Returns config.json of a hub id; None if the table lacks it."""
    family = family_of(path)
    return None if family is None else family.options_of(path)


def _name(path: str) -> str:
    return path.rpartition("/")[2].lower()
