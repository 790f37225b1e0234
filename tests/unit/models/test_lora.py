"""Adapters against peft's own model: what is computed, merged and switched off."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rl_platform.config.schema.models import Lora
from rl_platform.errors import ConfigError
from rl_platform.models.adapters.lora import add_adapters, merged, without_adapters
from rl_platform.models.causal_lm import export_causal_lm
from rl_platform.models.language import LanguageModel
from rl_platform.models.packed import pack

LORA = Lora(rank=3, alpha=5.0, target_modules=["q_proj", "v_proj", "gate_proj"])
TOKENS = torch.arange(1, 20)


def hidden(model: LanguageModel) -> torch.Tensor:
    packed = pack([TOKENS, TOKENS[:7]])
    return model.hidden(packed.tokens, packed.positions, packed.attention)


@pytest.fixture(params=["llama", "qwen2"])
def pair(request: pytest.FixtureRequest, causal_lm: Any) -> tuple[LanguageModel, Any]:
    """The platform's model with adapters, and peft's of the same numbers. qwen2: matrices with biases."""
    from peft import LoraConfig, get_peft_model

    network = causal_lm(request.param)
    options = LoraConfig(r=LORA.rank, lora_alpha=LORA.alpha, target_modules=LORA.target_modules)
    theirs = get_peft_model(copy.deepcopy(network), options)
    ours = LanguageModel(network)
    add_adapters(ours.backbone, LORA, 1, "actor.lora")
    numbers = torch.Generator().manual_seed(0)
    own = {name.partition("backbone.")[2]: parameter for name, parameter in ours.named_parameters()}
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=numbers))
                own[name.partition("base_model.model.model.")[2]].copy_(parameter)
    return ours, theirs


def test_what_is_merged_is_bit_for_bit_what_peft_merges(pair: Any, tmp_path: Any) -> None:
    ours, theirs = pair
    plain = merged(dict(ours.state_dict()), LORA)
    expected = theirs.merge_and_unload().state_dict()
    assert {name.replace("head.", "lm_head.").replace("backbone", "model") for name in plain} == expected.keys()
    for name, tensor in plain.items():
        assert torch.equal(tensor, expected[name.replace("head.", "lm_head.").replace("backbone", "model")]), name

    class NoTokenizer:
        eos_token_ids = (2,)

        def save(self, folder: Any) -> None:
            pass

    export_causal_lm(plain, ours.config, NoTokenizer(), tmp_path)
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(tensor, expected[name])


def test_merged_weights_compute_what_adapters_compute(pair: Any, causal_lm: Any) -> None:
    ours, _ = pair
    plain = LanguageModel(causal_lm(ours.config.model_type))
    before = hidden(plain)
    plain.load_state_dict(merged(dict(ours.state_dict()), LORA))
    torch.testing.assert_close(hidden(plain), hidden(ours), rtol=1e-5, atol=1e-5)
    assert (hidden(plain) - before).abs().max() > 0.1


def test_without_adapters_it_is_the_model_it_was(pair: Any, causal_lm: Any) -> None:
    ours, _ = pair
    expected, adapted = hidden(LanguageModel(causal_lm(ours.config.model_type))), hidden(ours)
    with without_adapters(ours):
        assert torch.equal(hidden(ours), expected)
    assert torch.equal(hidden(ours), adapted)
    trained = {name for name, parameter in ours.backbone.named_parameters() if parameter.requires_grad}
    assert trained
    assert trained == {name for name, _ in ours.backbone.named_parameters() if ".lora_" in name}


def test_new_adapters_change_nothing_and_depend_on_the_seed_alone(causal_lm: Any) -> None:
    def adapted(seed: int) -> LanguageModel:
        model = LanguageModel(causal_lm())
        torch.rand(seed)  # other random numbers before
        add_adapters(model.backbone, LORA, seed // 10, "actor.lora")
        return model

    first, second, other = adapted(10), adapted(11), adapted(20)
    assert torch.equal(hidden(first), hidden(LanguageModel(causal_lm())))
    name = "layers.0.self_attn.q_proj.lora_A.default.weight"
    assert torch.equal(first.backbone.get_parameter(name), second.backbone.get_parameter(name))
    assert not torch.equal(first.backbone.get_parameter(name), other.backbone.get_parameter(name))


def test_a_target_that_is_not_there(causal_lm: Any) -> None:
    with pytest.raises(ConfigError, match="no linear layer") as caught:
        add_adapters(LanguageModel(causal_lm()).backbone, Lora(target_modules=["c_attn"]), 1, "critic.lora")
    assert caught.value.problems[0].key == "critic.lora.target_modules"
