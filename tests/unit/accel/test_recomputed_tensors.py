"""Recomputed tensors have equal bits and take less memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rl_platform import acceleration
from rl_platform.accel.recomputed_tensors import FAMILIES
from rl_platform.models.forward import TokenPolicy
from rl_platform.models.language import LanguageModel
from rl_platform.models.packed import pack

CPU = torch.device("cpu")
SIZES = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}


def language_model(model_type: str) -> LanguageModel:
    config: PretrainedConfig = CONFIG_MAPPING[model_type](
        vocab_size=50, num_key_value_heads=2, head_dim=16, pad_token_id=None, **SIZES
    )
    torch.manual_seed(1)
    return LanguageModel(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def trained(model: Any) -> tuple[int, Tensor, list[Tensor]]:
    """Returns the bytes that autograd stores beside parameters, the hidden states, and the gradients."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    stored: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in parameters:
            stored[address] = tensor
        return tensor

    packed = pack([torch.arange(12) + row for row in range(3)])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        states = model.hidden(packed.tokens, packed.positions, packed.attention)
    size = sum(tensor.untyped_storage().nbytes() for tensor in stored.values())
    (states * torch.linspace(-1, 1, states.shape[1])).sum().backward()
    return size, states.detach(), [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_states_and_gradients_have_the_same_bits(model_type: str) -> None:
    plain = language_model(model_type)
    lean = copy.deepcopy(plain)
    acceleration.find("recompute_tensors", TokenPolicy(lean, 1.0), CPU, torch.float32)
    (_, states, gradients), (_, lean_states, lean_gradients) = trained(plain), trained(lean)
    assert torch.equal(states, lean_states)
    assert len(gradients) == len(lean_gradients)
    assert all(torch.equal(*pair) for pair in zip(gradients, lean_gradients, strict=True))
    with torch.no_grad():
        packed = pack([torch.arange(12)])
        arguments = packed.tokens, packed.positions, packed.attention
        assert torch.equal(plain.hidden(*arguments), lean.hidden(*arguments))


def kept_bytes(model: Any) -> int:
    """Returns the bytes of the tensors that a forward pass leaves allocated."""
    packed = pack([torch.arange(12) + row for row in range(3)])
    with torch.profiler.profile(profile_memory=True) as profile:
        states = model.hidden(packed.tokens, packed.positions, packed.attention)
    assert states.requires_grad  # they hold what the backward pass needs
    return sum(event.self_cpu_memory_usage for event in profile.key_averages())


def test_the_backward_pass_keeps_less() -> None:
    plain = language_model("llama")
    lean = copy.deepcopy(plain)
    acceleration.find("recompute_tensors", TokenPolicy(lean, 1.0), CPU, torch.float32)
    assert kept_bytes(lean) < 0.6 * kept_bytes(plain)


def test_it_is_for_float32_on_a_cpu_unless_acceleration_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for device, dtype in ((torch.device("cuda"), torch.float32), (CPU, torch.bfloat16)):
        model = language_model("llama")
        acceleration.find("recompute_tensors", TokenPolicy(model, 1.0), device, dtype)
        assert not any("forward" in vars(module) for module in model.modules())
    monkeypatch.setenv(acceleration.VARIABLE, "off")
    acceleration.find("recompute_tensors", TokenPolicy(model, 1.0), CPU, torch.float32)
    assert not any("forward" in vars(module) for module in model.modules())
