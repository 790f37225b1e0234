"""Tiny random models of every family, and how far the platform's numbers are from those of transformers.

`python tests/tiny_families.py` measures all of them and writes the table of docs/families.md.
"""

from __future__ import annotations

import copy
import re
import textwrap
from pathlib import Path
from typing import Any

import torch

from rl_platform.engines.rollout.base import Completion, Request
from rl_platform.engines.rollout.torch import TorchRolloutEngine
from rl_platform.models.causal_lm import quiet_transformers
from rl_platform.models.language import LanguageModel
from rl_platform.models.packed import pack
from rl_platform.models.pretrained.families import FAMILIES
from rl_platform.records import SamplingParams, Weights

PAGE = Path(__file__).parents[1] / "docs" / "families.md"
BEGIN, END = "<!-- families -->", "<!-- /families -->"
HEADER = (
    "| family (`model_type`) | models | training, generation |",
    "|---|---|---|",
)
MEGATRON = "`megatron` trains "
MODELS = {
    "llama": "Llama 1 to 3, SmolLM2, DeepSeek-LLM",
    "qwen2": "Qwen1.5, Qwen2, Qwen2.5, DeepSeek-R1-Distill-Qwen",
    "qwen3": "Qwen3",
    "mistral": "Mistral 7B",
    "ministral": "Ministral",
    "gemma": "Gemma 1",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3 270M, 1B",
    "phi3": "Phi-3, Phi-4",
    "olmo": "OLMo 1",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "granite": "Granite 3",
    "smollm3": "SmolLM3",
    "starcoder2": "StarCoder2",
    "gpt_neox": "Pythia",
    "glm": "GLM-4 9B (2024)",
    "glm4": "GLM-4 (2025)",
    "cohere": "Command R",
    "cohere2": "Command R7B, Command A",
    "ernie4_5": "ERNIE 4.5 0.3B",
    "seed_oss": "Seed-OSS",
    "exaone4": "EXAONE 4",
    "arcee": "AFM",
    "helium": "Helium",
    "hunyuan_v1_dense": "Hunyuan dense",
    "nanochat": "nanochat",
    "apertus": "Apertus",
    "deepseek_v2": "DeepSeek-V2, V2-Lite",
    "deepseek_v3": "Moonlight; DeepSeek-V3, R1 (in bfloat16)",
    "gpt_oss": "GPT-OSS (in bfloat16)",
    "qwen2_moe": "Qwen1.5-MoE, Qwen2-57B-A14B",
    "qwen3_moe": "Qwen3-30B-A3B, 235B-A22B",
    "mixtral": "Mixtral",
    "olmoe": "OLMoE",
    "granitemoe": "Granite 3 MoE",
    "granitemoeshared": "Granite MoE with shared experts",
    "glm4_moe": "GLM-4.5, 4.6",
    "ernie4_5_moe": "ERNIE 4.5 21B-A3B",
    "phimoe": "Phi-3.5-MoE",
    "dots1": "dots.llm1",
}

SHARED = [3, 1, 4, 1, 5, 9, 2]
SEQUENCES = [[*SHARED, 6, 5, 3, 5, 8, 9, 7], [*SHARED, 9, 3], [*SHARED, 2, 38, 4, 6]]
NEW_TOKENS = 6
EXPERTS = {
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "shared_expert_intermediate_size": 16,
    "n_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
WINDOW = {"sliding_window": 4}
OWN: dict[str, dict[str, Any]] = {  # options of a family beside the sizes
    "mistral": WINDOW,
    "gemma2": WINDOW | {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 3.0},
    "gemma3_text": WINDOW | {"query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": WINDOW | EXPERTS | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "cohere2": WINDOW | {"layer_types": ["sliding_attention", "full_attention"]},
    "olmo3": WINDOW | {"layer_types": ["sliding_attention", "full_attention"]},
    "exaone4": WINDOW | {"layer_types": ["sliding_attention", "full_attention"]},
    "ministral": WINDOW | {"layer_types": ["sliding_attention", "full_attention"]},
    "qwen2": WINDOW | {"use_sliding_window": True, "max_window_layers": 1},
    "gpt_neox": {"num_key_value_heads": 4},  # it has as many as heads
    "granite": {"logits_scaling": 8.0},
    "granitemoe": EXPERTS | {"logits_scaling": 6.0},
    "granitemoeshared": EXPERTS | {"logits_scaling": 6.0, "shared_intermediate_size": 16},
    "deepseek_v2": EXPERTS | LATENT,
    "deepseek_v3": EXPERTS | LATENT,
}
MIXTURES = ("qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "glm4_moe", "ernie4_5_moe", "phimoe", "dots1")


def tiny(family: str, **options: Any) -> Any:
    """Returns a transformers model with random weights, two layers and distributions far from uniform."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "vocab_size": 47,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    config = AutoConfig.for_model(family, **sizes | OWN.get(family, EXPERTS if family in MIXTURES else {}) | options)
    with quiet_transformers(), torch.random.fork_rng():
        torch.manual_seed(0)
        network = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        for parameter in network.parameters():  # sinks start at 0, biases too
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return network


def packed_logits(model: LanguageModel) -> list[torch.Tensor]:
    """Returns the logits [L,vocabulary] of each of SEQUENCES, computed in one packed forward."""
    packed = pack([torch.tensor(tokens) for tokens in SEQUENCES])
    states = model.hidden(packed.tokens, packed.positions, packed.attention)
    logits = model.logit_transform(model.head(states))
    return [logits[packed.flat_index[row, : len(tokens)]] for row, tokens in enumerate(SEQUENCES)]


@torch.no_grad()
def training_difference(network: Any) -> float:
    """Returns the largest difference between logits of the packed forward and those of transformers."""
    expected = [network(torch.tensor([tokens])).logits[0] for tokens in SEQUENCES]
    actual = packed_logits(LanguageModel(copy.deepcopy(network)))
    return max(float((one - other).abs().max()) for one, other in zip(actual, expected, strict=True))


@torch.no_grad()
def generation_difference(network: Any, slots: int = len(SEQUENCES)) -> float:
    """Returns the largest difference between the log-probs of the engine's greedy tokens and those of transformers."""
    engine = TorchRolloutEngine(copy.deepcopy(network.config), (48,), slots, torch.device("cpu"))
    engine.receive(Weights(0, LanguageModel(copy.deepcopy(network)).state_dict()))
    differences = []

    def compare(completion: Completion) -> None:
        tokens = torch.tensor([*SEQUENCES[completion.index], *completion.token_ids])
        predicted = network(tokens[None]).logits[0, -NEW_TOKENS - 1 : -1].log_softmax(-1)
        assert predicted.argmax(-1).tolist() == list(completion.token_ids)
        expected = predicted.max(-1).values
        differences.append(float((expected - torch.tensor(completion.log_probs)).abs().max()))

    requests = [Request(index, tuple(tokens), 0) for index, tokens in enumerate(SEQUENCES)]
    engine.generate(requests, SamplingParams(NEW_TOKENS, temperature=0.0), compare)
    assert len(differences) == len(SEQUENCES)
    return max(differences)


def rows() -> dict[str, list[str]]:
    """Returns the cells of the documented table by family."""
    table = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    lines = [line.strip("| ").split("|") for line in table.splitlines() if line.startswith("| `")]
    return {cells[0].strip(" `"): [cell.strip() for cell in cells[1:]] for cells in lines}


def of_megatron() -> set[str]:
    """Returns the families that the documented line names for Megatron."""
    line = PAGE.read_text(encoding="utf-8").partition(f"\n{MEGATRON}")[2].partition(".\n")[0]
    return set(re.findall(r"`(\w+)`", line))


def main() -> None:
    from rl_platform.engines.training.megatron.supported import FAMILIES as OF_MEGATRON

    lines = [*HEADER]
    for family in FAMILIES:
        network = tiny(family)
        numbers = f"{training_difference(network):.0e}, {generation_difference(network):.0e}"
        lines.append(f"| `{family}` | {MODELS[family]} | {numbers} |")
    line = f"{MEGATRON}{', '.join(f'`{family}`' for family in FAMILIES if family in OF_MEGATRON)}."
    lines += ["", *textwrap.wrap(line, 120)]
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    PAGE.write_text("\n".join([before + BEGIN, *lines, END + after]), encoding="utf-8")


if __name__ == "__main__":
    main()
