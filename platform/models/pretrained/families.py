"""Architectures of language models that the platform computes, judged by their transformers config alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_platform.errors import Problem

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Families whose logits and greedy tokens a test compares to transformers'. Others may mix tokens outside attention or
# use an attention, positions or a head of their own, and would compute wrong numbers silently.
# fmt: off
FAMILIES = (
    "llama", "qwen2", "qwen3", "mistral", "ministral", "gemma", "gemma2", "gemma3_text", "phi3", "olmo", "olmo2",
    "olmo3", "granite", "smollm3", "starcoder2", "gpt_neox", "glm", "glm4", "cohere", "cohere2", "ernie4_5",
    "seed_oss", "exaone4", "arcee", "helium", "hunyuan_v1_dense", "nanochat", "apertus", "deepseek_v2", "deepseek_v3",
    "gpt_oss", "qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "granitemoe", "granitemoeshared", "glm4_moe",
    "ernie4_5_moe", "phimoe", "dots1",
)
# fmt: on
ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
DEQUANTISED = {  # quant_method: how transformers writes such a checkpoint without quantisation
    "fp8": "FineGrainedFP8Config(dequantize=True)",
    "mxfp4": "Mxfp4Config(dequantize=True)",
}


def architecture_problems(config: PretrainedConfig, folder: str, key: str) -> list[Problem]:
    """Returns the reasons why the platform cannot train or generate with a model of this config."""
    problems = []
    if (problem := quantisation_problem(config, folder, key)) is not None:
        problems.append(problem)
    if features := unsupported_features(config):
        message = f"{config.model_type} has {', '.join(features)}"
        problems.append(Problem(key, message, value=folder, allowed=", ".join(FAMILIES)))
    return problems


def quantisation_problem(config: PretrainedConfig, folder: str, key: str) -> Problem | None:
    """Returns a problem if the checkpoint holds quantised weights; None for plain floating-point weights."""
    options = getattr(config, "quantization_config", None) or getattr(config, "compression_config", None)
    if options is None:
        return None
    options = options if isinstance(options, dict) else options.to_dict()
    method = str(options.get("quant_method", "unknown"))
    if any(options.get(f"load_in_{bits}bit") for bits in (4, 8)):
        method = "bitsandbytes"
    message = f"the weights are quantised ({method}), and an update is smaller than the steps between their values"
    hint = "name the model's checkpoint in bfloat16, from which the quantised one was made"
    if (way := DEQUANTISED.get(method)) is not None:
        hint += (
            f", or write one: from_pretrained(..., quantization_config={way}, dtype='bfloat16').save_pretrained(...)"
        )
    elif method == "bitsandbytes":
        hint += ", or write one: from_pretrained(...).dequantize().save_pretrained(...)"
    return Problem(key, message, value=folder, allowed="float32, bfloat16 or float16 weights", hint=hint)


def unsupported_features(config: PretrainedConfig) -> list[str]:
    """Returns what the model of a config has and `language.LanguageModel` does not compute."""
    kinds = set(getattr(config, "layer_types", None) or ATTENTION_LAYERS)
    present = {
        "images, sound or several models in one: only text models are trained": config.get_text_config() is not config,
        f"layers of kind {', '.join(sorted(kinds - ATTENTION_LAYERS))}, which packed sequences and the paged cache do "
        "not support": not kinds <= ATTENTION_LAYERS,
        "attention to later tokens": bool(getattr(config, "use_bidirectional_attention", False)),
    }
    features = [feature for feature, there in present.items() if there]
    if not features and config.model_type not in FAMILIES:
        features.append("layers that are not tested here")
    return features
