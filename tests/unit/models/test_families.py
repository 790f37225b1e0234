"""Families of language models: each one computes what transformers computes, or it is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from rl_platform.engines.rollout.base import Request
from rl_platform.engines.rollout.torch import TorchRolloutEngine
from rl_platform.models.language import LanguageModel
from rl_platform.models.packed import PackedAttention
from rl_platform.models.pretrained import FAMILIES, unsupported_features
from rl_platform.records import SamplingParams, Weights

MIXTURE = {
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 16,
}
LATENT = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 4,
    "num_key_value_heads": 4,
}
MIXTURES = ("qwen2_moe", "qwen3_moe", "mixtral")
REFUSED = ("phi", "stablelm", "cohere", "deepseek_v2", "deepseek_v3", "nemotron", "gemma2", "gemma3_text")
REFUSED += ("falcon", "bloom", "gpt2", "opt")


def causal_lm(kind: str) -> Any:
    """A tiny model with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 47,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,  # distributions far from uniform
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if kind == "falcon":
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).eval()
    sizes |= {"sliding_window": None} if kind == "mistral" else {}
    sizes |= {"head_dim": 8} if kind not in ("deepseek_v2", "deepseek_v3") else LATENT
    sizes |= {"num_key_value_heads": 4} if kind == "gpt_neox" else {}  # it has as many as heads
    sizes |= MIXTURE if kind in MIXTURES else {}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes), dtype=torch.float32).eval()


@pytest.mark.parametrize("kind", FAMILIES)
def test_generates_what_transformers_generates(kind: str) -> None:
    plain = causal_lm(kind)
    assert unsupported_features(plain) == []
    model, tokens = LanguageModel(copy.deepcopy(plain)), torch.tensor([3, 1, 4, 1, 5, 9, 2])
    whole = PackedAttention(0, torch.arange(7)[None], torch.ones(1, 7, dtype=torch.bool))
    logits = model.head(model.hidden(tokens, torch.arange(7), whole))  # as the training engine computes them
    torch.testing.assert_close(logits, plain(tokens[None]).logits[0], rtol=1e-4, atol=1e-4)
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9, 7]]
    expected = []
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        for _ in range(6):
            tokens = torch.cat([tokens, plain(tokens).logits[:, -1:].argmax(-1)], dim=1)
        expected.append(tokens[0, len(prompt) :].tolist())
    engine = TorchRolloutEngine(plain.config, (48,), 2, torch.device("cpu"))
    engine.receive(Weights(0, LanguageModel(plain).state_dict()))
    responses: dict[int, list[int]] = {}

    def keep(completion: Any) -> None:
        responses[completion.index] = list(completion.token_ids)

    requests = [Request(index, tuple(prompt), 0) for index, prompt in enumerate(prompts)]
    engine.generate(requests, SamplingParams(6, temperature=0.0), keep)
    assert [responses[index] for index in sorted(responses)] == expected


@pytest.mark.parametrize("kind", REFUSED)
def test_the_others_are_refused(kind: str) -> None:
    assert unsupported_features(causal_lm(kind))
