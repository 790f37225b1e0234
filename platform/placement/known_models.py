"""Shapes of well-known models of the Hugging Face hub, so that a plan needs no download.

The values are those of their config.json. A config.json on this machine takes precedence: see `model_shape`.
"""

from __future__ import annotations

from typing import Any

Options = dict[str, Any]


def _qwen2(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocabulary: int) -> Options:
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocabulary,
        "tie_word_embeddings": hidden < 3584,
    }


_QWEN_05B = _qwen2(896, 24, 14, 2, 4864, 151_936)
_QWEN_15B = _qwen2(1536, 28, 12, 2, 8960, 151_936)
_QWEN_7B = _qwen2(3584, 28, 28, 4, 18_944, 152_064)

KNOWN: dict[str, Options] = {
    "Qwen/Qwen2.5-0.5B": _QWEN_05B,
    "Qwen/Qwen2.5-0.5B-Instruct": _QWEN_05B,
    "Qwen/Qwen2.5-1.5B": _QWEN_15B,
    "Qwen/Qwen2.5-1.5B-Instruct": _QWEN_15B,
    "Qwen/Qwen2.5-7B": _QWEN_7B,
    "Qwen/Qwen2.5-7B-Instruct": _QWEN_7B,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": _QWEN_15B | {"tie_word_embeddings": False},
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": _QWEN_7B,
}
