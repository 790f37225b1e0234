"""The shape of the model that the GPU benchmarks use, with random weights: nothing is downloaded."""

from __future__ import annotations

from typing import Any

MODEL = "Qwen/Qwen2.5-1.5B"
TINY = {
    "model_type": "qwen2",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


def shape_of(dry_run: bool) -> dict[str, Any]:
    """Settings of transformers' config; a tiny one to try a script out on a CPU."""
    from rl_platform.placement.known_models import KNOWN

    return dict(TINY if dry_run else KNOWN[MODEL]) | {"max_position_embeddings": 32_768}
