"""Weights that are read one layer at a time equal those of a model that is loaded whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl_platform.config.schema.models import Model
from rl_platform.errors import ConfigError
from rl_platform.models.causal_lm import load_causal_lm, load_config, quiet_transformers
from rl_platform.models.language import LanguageModel
from rl_platform.models.pretrained.weight_parts import WeightParts, safetensors_files

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "num_local_experts": 3}
LATENT = {"n_routed_experts": 3, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": None}
LATENT |= {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": False},
    "gpt_neox": {},
    "mixtral": EXPERTS,
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 8},
    "deepseek_v3": EXPERTS | LATENT,
}


def saved(kind: str, folder: Path, dtype: torch.dtype = torch.float32) -> str:
    """Writes a random model in several files; its buffers are random too."""
    config = AutoConfig.for_model(kind, **SIZES, **KINDS[kind])
    torch.manual_seed(0)
    with quiet_transformers():
        network = AutoModelForCausalLM.from_config(config, dtype=dtype)
        state = network.state_dict()
        for name, buffer in network.named_buffers():
            if name in state:
                buffer.normal_()
        network.save_pretrained(folder, max_shard_size="10KB")
    return str(folder)


def parts_of(folder: str, *, value_head: bool = False) -> WeightParts:
    return WeightParts(folder, load_config(Model(path=folder), 40, 2), "actor.model.path", value_head=value_head)


@pytest.mark.parametrize("value_head", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_comes_once_and_is_that_of_the_whole_model(tmp_path: Path, kind: str, value_head: bool) -> None:
    folder = saved(kind, tmp_path, torch.bfloat16 if kind == "qwen2" else torch.float32)
    assert len(safetensors_files(folder)) > 1
    whole = LanguageModel(load_causal_lm(Model(path=folder), 40, 2, 0), value_head=value_head).state_dict()
    found: dict[str, torch.Tensor] = {}
    for part in parts_of(folder, value_head=value_head):
        assert not part.keys() & found.keys()
        assert len({name.split("layers.")[1][0] for name in part if "layers." in name}) < 2  # of one layer
        found |= {name: tensor.clone() for name, tensor in part.items()}
    assert found.keys() == whole.keys()
    for name, tensor in whole.items():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], tensor), name


def test_an_empty_model_takes_no_memory_but_has_its_rotary_frequencies(tmp_path: Path) -> None:
    parts = parts_of(saved("llama", tmp_path), value_head=True)
    language = parts.empty()
    assert language.pretrained is parts
    assert all(parameter.is_meta for parameter in language.backbone.parameters())
    assert not language.head.weight.any()
    assert not language.backbone.rotary_emb.inv_freq.is_meta


def test_a_missing_weight_and_a_torn_file_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = saved("llama", tmp_path)
    file = next(path for path in safetensors_files(folder) if "model.layers.1.mlp.up_proj.weight" in load_file(path))
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=r"1 weights are missing, as backbone.layers.1.mlp.up_proj.weight"):
        list(parts_of(folder))
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ConfigError, match=r"actor.model.path: cannot be loaded"):
        list(parts_of(folder))
