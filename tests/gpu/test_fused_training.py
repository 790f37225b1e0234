"""On a GPU: fused layers and log-probs (accel/fused_layers, accel/fused_log_probs) train as the plain ones do."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from rl_platform import acceleration
from rl_platform.accel import fused_elementwise, fused_layers
from rl_platform.engines.training.fsdp import autocast
from rl_platform.models import language
from rl_platform.models.forward import TokenPolicy
from rl_platform.models.language import LanguageModel, Statistic
from rl_platform.models.packed import pack

DEVICE = torch.device("cuda", 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]


def language_model(model_type: str) -> LanguageModel:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    config = AutoConfig.for_model(
        model_type,
        vocab_size=1000,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        pad_token_id=None,
        **sizes,
    )
    return LanguageModel(AutoModelForCausalLM.from_config(config, dtype=torch.float32)).to(DEVICE)


def trained(
    model: LanguageModel, dtype: torch.dtype, statistic: Statistic, lengths: tuple[int, ...]
) -> dict[str, Tensor]:
    """Returns log-probs and gradients of rows with these lengths."""
    draw = torch.Generator().manual_seed(1)
    rows = [torch.randint(1000, (length,), generator=draw) for length in lengths]
    packed = pack(rows).to(DEVICE)[0]
    targets = torch.randint(1000, packed.tokens.shape, generator=draw).to(DEVICE)
    with autocast(DEVICE, dtype):
        states = model.hidden(packed.tokens, packed.positions, packed.attention)
        log_probs, entropies = model.log_probs(states, targets, 0.8, statistic)
    loss = log_probs.mean() + (entropies.mean() if entropies is not None and statistic == "entropy_gradient" else 0)
    loss.backward()
    gradients = {name: tensor.grad for name, tensor in model.named_parameters() if tensor.grad is not None}
    return {"log-probs": log_probs.detach(), **gradients}


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
@pytest.mark.parametrize("statistic", ["entropy", "entropy_gradient"])
def test_log_probs_and_gradients(model_type: str, statistic: Statistic, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second lengths have another number of tokens."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    assert fused_elementwise.fuses(DEVICE), "torch.compile works on a GPU with Triton"
    monkeypatch.setattr(fused_layers, "LARGE", 1)
    monkeypatch.setattr(language, "TOKENS_PER_CHUNK", 256)
    for lengths in ((300, 41, 220), (130, 500)):
        plain = language_model(model_type)
        fused = copy.deepcopy(plain)
        acceleration.find("fuse_layers", TokenPolicy(fused, 1.0), DEVICE, torch.bfloat16)
        assert "forward" in vars(fused.backbone.layers[0].mlp)
        with acceleration.accelerating("off"):
            exact = trained(plain, torch.float32, statistic, lengths)
        found = trained(fused, torch.bfloat16, statistic, lengths)
        assert (found["log-probs"] - exact["log-probs"]).abs().max() < 0.05
        for name, tensor in exact.items():
            assert (found[name] - tensor).norm() <= 0.05 * tensor.norm(), name
