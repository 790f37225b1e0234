"""Decoder layers with fused elementwise operations equal those of transformers. A CPU computes them here unfused."""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rl_platform import acceleration
from rl_platform.accel import fused_layers
from rl_platform.accel.fused_layers import fuse_layers
from rl_platform.accel.recomputed_tensors import FAMILIES
from rl_platform.engines.training.fsdp import autocast
from rl_platform.models.forward import TokenPolicy
from rl_platform.models.language import LanguageModel
from rl_platform.models.packed import pack

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SIZES = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}


def language_model(model_type: str, **options: object) -> LanguageModel:
    config: PretrainedConfig = CONFIG_MAPPING[model_type](
        vocab_size=50, num_key_value_heads=2, head_dim=16, pad_token_id=None, **SIZES, **options
    )
    torch.manual_seed(1)
    return LanguageModel(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def trained(model: LanguageModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the hidden states and the gradients."""
    packed = pack([torch.arange(12) + row for row in range(3)])
    with autocast(CPU, dtype):
        states = model.hidden(packed.tokens, packed.positions, packed.attention)
    (states * torch.linspace(-1, 1, states.shape[1])).sum().backward()
    gradients = {name: tensor.grad for name, tensor in model.named_parameters() if tensor.grad is not None}
    return {"states": states.detach(), **gradients}


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_states_and_gradients(model_type: str, dtype: torch.dtype, tolerance: float) -> None:
    plain = language_model(model_type)
    fused = copy.deepcopy(plain)
    fuse_layers(fused.backbone, dtype)
    expected, found = trained(plain, dtype), trained(fused, dtype)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= tolerance * tensor.norm(), name


def test_a_sliding_window_is_kept() -> None:
    plain = language_model("mistral", sliding_window=3)
    fused, whole = copy.deepcopy(plain), language_model("mistral", sliding_window=None)
    fuse_layers(fused.backbone, torch.float32)
    expected, found, without = (trained(model, torch.float32)["states"] for model in (plain, fused, whole))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(without, expected, atol=1e-3)


def test_what_is_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large models of the families in half precision are fused, on a GPU on which torch.compile works."""
    monkeypatch.setattr(fused_layers, "fuses", lambda device: device == GPU)
    monkeypatch.setattr(fused_layers, "LARGE", 2 * 64)

    def is_fused(model_type: str = "qwen2", device: torch.device = GPU, dtype: torch.dtype = torch.bfloat16) -> bool:
        model = language_model(model_type)
        acceleration.find("fuse_layers", TokenPolicy(model, 1.0), device, dtype)
        return "forward" in vars(model.backbone.layers[0].self_attn)

    assert is_fused()
    assert not is_fused("gemma")
    assert not is_fused(device=CPU)
    assert not is_fused(dtype=torch.float32)
    monkeypatch.setattr(fused_layers, "LARGE", 2 * 64 + 1)
    assert not is_fused()


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="Triton is installed")
def test_nothing_is_compiled_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_platform.accel.fused_elementwise import fused, fuses

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not fuses(GPU)
    assert fused(abs, GPU) is abs


def test_nothing_is_compiled_if_results_must_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    from rl_platform.accel import fused_elementwise

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(fused_elementwise, "_compiles", lambda device: True)
    assert fused_elementwise.fuses(GPU)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not fused_elementwise.fuses(GPU)
