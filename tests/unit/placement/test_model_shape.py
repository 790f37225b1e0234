"""Parameters counted from a config equal those of the model that is really built from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_platform.config.schema import Config
from rl_platform.config.schema.models import Lora, Model, RandomLM
from rl_platform.models.adapters.lora import adapter_parameters, linear_names
from rl_platform.models.attention import cached_heads
from rl_platform.placement.estimates.component_shapes import IMAGE, from_options, language_shape, shapes
from rl_platform.placement.estimates.model_shape import ModelShape
from rl_platform.placement.estimates.policy_shape import ACTIONS, OBSERVATIONS, PolicyShape

SMALL = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "vocab_size": 101,
}

EXPERTS = {"model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}

SHARED = EXPERTS | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 28}

LATENT = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 20,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}


def built(options: dict[str, Any]) -> Any:
    """The model that transformers makes of the options, without memory for its numbers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(AutoConfig.for_model(**options))
    network.tie_weights()
    return network


def count(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "own",
    [
        {"model_type": "llama"},
        {"model_type": "llama", "num_key_value_heads": 4, "head_dim": 10},
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
        {"model_type": "mistral"},
        {"model_type": "qwen2"},
        {"model_type": "qwen3"},
        {"model_type": "qwen3", "attention_bias": True, "head_dim": 12},
        EXPERTS,
        EXPERTS | {"attention_bias": True, "head_dim": 12},
        {"model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2},
        {"model_type": "gemma", "head_dim": 10},
        {"model_type": "gemma2"},
        {"model_type": "gemma2", "attention_bias": True, "head_dim": 10},
        {"model_type": "gemma3_text", "head_dim": 10},
        {"model_type": "ministral", "head_dim": 6},
        {"model_type": "gpt_oss", "num_local_experts": 5, "num_experts_per_tok": 2},
        {"model_type": "seed_oss", "head_dim": 10},
        {"model_type": "seed_oss", "attention_bias": False, "head_dim": 10},
        SHARED,
        EXPERTS | {"decoder_sparse_step": 3},
        SHARED | {"qkv_bias": False, "mlp_only_layers": [0, 1]},
        LATENT | {"model_type": "deepseek_v2"},
        LATENT | {"model_type": "deepseek_v3", "q_lora_rank": None, "n_shared_experts": 3},
    ],
    ids=lambda own: ",".join(map(str, own.values())),
)
def test_parameters_are_those_of_the_model(own: dict[str, Any], tied: bool) -> None:
    options = SMALL | own | {"tie_word_embeddings": tied}
    network = built(options)
    shape = from_options(json.loads(json.dumps(network.config.to_dict())))
    assert isinstance(shape, ModelShape)
    assert shape.parameters == count(network)
    assert from_options(options) == shape  # the keys that a config.json may leave out have the same defaults
    assert shape.decoder_parameters == count(network.model.layers)
    layer = network.model.layers[-1]
    assert shape.layer_parameters == count(layer)
    matrices = [parameter for parameter in layer.parameters() if parameter.dim() > 1]
    assert shape.matrices_per_layer == sum(matrix.numel() for matrix in matrices)
    critic = replace(shape, value_head=True)
    assert critic.parameters == count(network.model) + shape.hidden + 1


def test_the_built_in_engine_caches_the_heads_of_latent_attention_as_it_was_estimated() -> None:
    network = built(SMALL | LATENT | {"model_type": "deepseek_v3"})
    shape = from_options(network.config.to_dict())
    assert isinstance(shape, ModelShape)
    heads, width = cached_heads(network.config)
    assert shape.whole_kv_elements_per_token == 3 * 2 * heads * width
    assert shape.kv_elements_per_token == 3 * (10 + 4)


@pytest.mark.parametrize(
    "own",
    [
        {"model_type": "llama"},
        EXPERTS,
        SHARED | {"mlp_only_layers": [1]},
        LATENT | {"model_type": "deepseek_v3"},
        LATENT | {"model_type": "deepseek_v2", "q_lora_rank": None},
    ],
)
def test_adapters_are_counted_like_those_of_the_model(own: dict[str, Any]) -> None:
    names = ["q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "v_proj", "o_proj", "up_proj"]
    for lora in (Lora(rank=3, target_modules=names), Lora(rank=2)):
        shape = from_options(SMALL | own)
        assert isinstance(shape, ModelShape)
        assert shape.adapter_parameters(lora) == adapter_parameters(built(SMALL | own), lora)
        assert {*shape.linear_layers} == linear_names(built(SMALL | own).model)


def test_experts_that_a_token_does_not_go_through_are_not_active() -> None:
    network = built(SMALL | EXPERTS)
    shape = from_options(network.config.to_dict())
    assert isinstance(shape, ModelShape)
    experts = sum(count(layer.mlp.experts) for layer in network.model.layers)
    assert shape.active_parameters == count(network) - experts * 4 // 6
    assert shape.products_per_token < shape.active_parameters
    assert shape.feed_forward_width == 40
    dense = from_options(SMALL | {"model_type": "qwen3"})
    assert isinstance(dense, ModelShape)
    assert dense.active_parameters == dense.parameters


def test_the_published_size_of_a_mixture_of_experts() -> None:
    """Qwen3-30B-A3B, whose name says it."""
    sizes = {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4}
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144}
    shape = from_options({"model_type": "qwen3_moe", "vocab_size": 151936, "head_dim": 128} | sizes | experts)
    assert isinstance(shape, ModelShape)
    assert shape.parameters == pytest.approx(30.5e9, rel=0.01)
    assert shape.active_parameters == pytest.approx(3.3e9, rel=0.03)


def test_random_init_is_counted_like_the_model_the_run_builds() -> None:
    from rl_platform.models.causal_lm import load_causal_lm
    from rl_platform.models.language import LanguageModel

    random = RandomLM(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=48, max_positions=16)
    model = Model(random_init=random, tokenizer="bytes")
    shape = language_shape(model)
    assert isinstance(shape, ModelShape)
    network = load_causal_lm(model, 259, 258, seed=1)
    assert shape.parameters == count(network)
    critic = replace(shape, value_head=True)
    assert critic.parameters == count(LanguageModel(network, value_head=True))


def test_the_packaged_model_has_its_published_size() -> None:
    shape = language_shape(Model(path="smollm2-135m-instruct"))
    assert isinstance(shape, ModelShape)
    assert shape.parameters == 134_515_008


@pytest.mark.parametrize(
    ("path", "parameters"),
    [
        ("Qwen/Qwen2.5-0.5B", 494_032_768),
        ("Qwen/Qwen2.5-1.5B-Instruct", 1_543_714_304),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", 1_777_088_000),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", 7_615_616_512),
        ("Qwen/Qwen2.5-32B-Instruct", 32_763_876_352),
        ("deepseek-ai/deepseek-llm-7b-chat", 6_910_365_696),
        ("google/gemma-2b-it", 2_506_172_416),
        ("google/gemma-1.1-7b-it", 8_537_680_896),
        ("google/gemma-2-2b-it", 2_614_341_888),
        ("google/gemma-2-9b", 9_241_705_984),
        ("Qwen/Qwen1.5-MoE-A2.7B-Chat", 14_315_784_192),
        ("moonshotai/Moonlight-16B-A3B-Instruct", 15_960_108_544),
        ("deepseek-ai/DeepSeek-V3", 671_026_404_352),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", 46_702_792_704),
        ("HuggingFaceTB/SmolLM2-1.7B-Instruct", 1_711_376_384),
    ],
)
def test_known_models_of_the_hub_have_their_published_sizes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: str, parameters: int
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    shape = language_shape(Model(path=path))
    assert isinstance(shape, ModelShape)
    assert shape.parameters == parameters


def test_config_json_of_a_folder_and_of_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = SMALL | {"model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(options))
    expected = from_options(options)
    assert language_shape(Model(path=str(tmp_path))) == expected
    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(options))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert language_shape(Model(path="some/model")) == expected
    assert language_shape(Model(path="some/other")) == "no config.json of some/other is on this machine"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"model_type": "glm4_moe"}', "parameters of model_type glm4_moe are not counted, only those of llama"),
        ("{}", "parameters of model_type None are not counted"),
        ('{"model_type": "llama"}', "config.json lacks or garbles 'hidden_size'"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "config.json lacks or garbles"),
        ("[]", "holds no mapping"),
        ("{", "cannot be read"),
    ],
)
def test_models_that_cannot_be_counted_say_why(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "config.json").write_text(text)
    unknown = language_shape(Model(path=str(tmp_path)))
    assert isinstance(unknown, str)
    assert reason in unknown


def test_the_vocabulary_of_a_tokenizers_file(tmp_path: Path) -> None:
    content = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"content": "<end>"}, {"content": "b"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    shape = language_shape(Model(random_init=RandomLM(), tokenizer=str(tmp_path)))
    assert isinstance(shape, ModelShape)
    assert shape.vocabulary == 3
    unknown = language_shape(Model(random_init=RandomLM(), tokenizer=str(tmp_path / "nowhere")))
    assert isinstance(unknown, str)
    assert "the vocabulary of tokenizer" in unknown


def test_an_embodied_policy_is_counted_like_the_one_built() -> None:
    from rl_platform.envs.embodied.spaces import ActionSpace
    from rl_platform.models.policy import ActorCriticPolicy, PolicyConfig

    space = ActionSpace("continuous", ACTIONS)
    policy = ActorCriticPolicy((OBSERVATIONS,), space, PolicyConfig((32, 24)))
    assert PolicyShape((32, 24)).parameters == count(policy)


@pytest.mark.parametrize("kind", ["cnn", "vla", "frozen vla", "short vla"])
def test_a_policy_that_sees_is_counted_like_the_one_built(kind: str) -> None:
    from rl_platform.algorithms.action_levels import ActionLevels
    from rl_platform.envs.embodied.spaces import ActionSpace, EnvSpaces
    from rl_platform.models.embodied_policy import build_policy

    model = {"type": "cnn", "hidden_sizes": [32]}
    if kind != "cnn":
        model = {"type": "vla", "random_init": {"hidden_size": 64, "num_layers": 6}, "tokenizer": "bytes"}
        model |= {"instruction": "reach", "train_backbone": kind != "frozen vla"}
        model |= {"backbone_layers": 2} if kind == "short vla" else {}
    config = Config.model_validate(
        {
            "runner": {"task_type": "embodied"},
            "cluster": {"component_placement": {"actor_critic,env,rollout": "all"}},
            "actor": {"model": model},
        }
    )
    shape = shapes(config)[0]["actor_critic"]
    assert isinstance(shape, PolicyShape)
    bounds = (-1.0,) * ACTIONS, (1.0,) * ACTIONS
    spaces = EnvSpaces((*IMAGE, 4), ActionSpace("continuous", ACTIONS), (ACTIONS,), *bounds, 0, "uint8")
    policy = build_policy(config.actor.model, spaces, ActionLevels(1, ACTIONS), seed=1)
    trained = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    assert shape.parameters == pytest.approx(count(policy), rel=0 if kind == "cnn" else 0.03)
    assert shape.trained_parameters() == pytest.approx(trained, rel=0 if kind == "cnn" else 0.15)
