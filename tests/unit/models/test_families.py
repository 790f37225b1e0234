"""Families of language models: each one computes what transformers computes, or it is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import tiny_families
import torch
from torch import Tensor

from rl_platform.algorithms.kl import full_kl
from rl_platform.engines.rollout import kv_cache, prefill
from rl_platform.engines.rollout.base import Request
from rl_platform.engines.rollout.torch import TorchRolloutEngine
from rl_platform.models import packed
from rl_platform.models.attention import is_plain
from rl_platform.models.build import readable_positions
from rl_platform.models.forward import TokenPolicy
from rl_platform.models.language import LanguageModel
from rl_platform.models.pretrained.families import FAMILIES, architecture_problems, unsupported_features
from rl_platform.models.pretrained.probe import own_forward, probe
from rl_platform.records import RolloutBatch, SamplingParams, Weights

TEMPERATURE = 0.7
FEATURES = ["gemma2", "gpt_oss", "deepseek_v3", "qwen2_moe", "mistral", "cohere2", "granitemoeshared"]


@pytest.mark.parametrize("family", FAMILIES)
def test_computes_and_generates_what_transformers_does(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "PAGE", 4)  # windows end within pages, and before them
    network = tiny_families.tiny(family)
    assert unsupported_features(network.config) == []
    differences = tiny_families.training_difference(network), tiny_families.generation_difference(network)
    documented = [float(number) for number in tiny_families.rows()[family][-1].split(", ")]
    for difference, number in zip(differences, documented, strict=True):
        assert difference < 10 * number, "python tests/tiny_families.py writes the table"
        assert number < 1e-4
    probe(network, partial(own_forward, network, LanguageModel(network)), "FOLDER", "actor.model.path")


def test_the_table_of_the_docs_has_all_families_and_backends() -> None:
    """`python tests/tiny_families.py` writes it."""
    from rl_platform.engines.training.megatron.supported import FAMILIES as OF_MEGATRON

    assert tuple(tiny_families.rows()) == FAMILIES
    assert tiny_families.of_megatron() == set(OF_MEGATRON) & set(FAMILIES)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "mistral", "deepseek_v3"])
def test_few_slots_and_long_responses(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences share pages and enter in parts while others run; pages lie within, across and outside windows."""
    monkeypatch.setattr(kv_cache, "PAGE", 4)
    monkeypatch.setattr(prefill, "WORTH_A_PASS", 1)
    monkeypatch.setattr(prefill, "PREFILL_TOKENS", 5)
    monkeypatch.setattr(tiny_families, "NEW_TOKENS", 23)
    network = tiny_families.tiny(family, **({} if family == "deepseek_v3" else {"sliding_window": 7}))
    for slots in (1, 2, 3):
        assert tiny_families.generation_difference(network, slots) < 1e-4


@pytest.mark.parametrize("groups", [0, 2**60], ids=["many groups", "one group"])
@pytest.mark.parametrize("family", FEATURES)
def test_gradients_are_those_of_transformers(
    family: str, groups: int, monkeypatch: pytest.MonkeyPatch, token_batch: Any, gradients: Callable[..., Any]
) -> None:
    """Of log-probs, entropies and the full KL, through windows, caps, sinks, routers and shared experts."""
    monkeypatch.setitem(packed.SPLIT, "cpu", groups)
    plain = tiny_families.tiny(family)
    policy = TokenPolicy(LanguageModel(copy.deepcopy(plain)), TEMPERATURE, entropy_gradient=True, keep_states=True)
    batch: RolloutBatch = token_batch(tiny_families.SEQUENCES, [5, 8, 7])
    weights = torch.randn(3, int(batch.action_mask.sum()), generator=torch.Generator().manual_seed(3))
    reference = tiny_families.tiny(family, initializer_range=0.2)
    frozen = TokenPolicy(LanguageModel(copy.deepcopy(reference)), TEMPERATURE, keep_states=True)
    with torch.no_grad():
        batch.reference_states = frozen(batch).states
    policy.reference_head = frozen.model.head.weight.detach()

    def loss(log_probs: Tensor, entropies: Tensor, divergence: Tensor) -> Tensor:
        return weights[0] @ log_probs + 0.3 * weights[1] @ entropies + weights[2] @ divergence

    outputs = policy(batch, entropy=True)
    loss(*(part[batch.action_mask] for part in (outputs.log_probs, outputs.entropy, outputs.full_kl))).backward()
    expected = one_by_one(plain, reference, batch)
    loss(*expected).backward()
    torch.testing.assert_close(outputs.log_probs[batch.action_mask], expected[0], rtol=1e-4, atol=1e-4)
    actual = gradients(policy.model)
    for name, gradient in gradients(plain).items():
        if gradient is None or not gradient.abs().max() > 0:  # an expert that no token goes through
            assert actual[name] is None or not actual[name].abs().max() > 0, name
            continue
        scale = float(gradient.abs().max())
        torch.testing.assert_close(actual[name], gradient, rtol=1e-3, atol=1e-4 * scale, msg=f"{family}: {name}")


def one_by_one(plain: Any, reference: Any, batch: RolloutBatch) -> list[Tensor]:
    """Log-probs, entropies and KL to the reference of transformers, of all actions."""
    parts: list[list[Tensor]] = [[], [], []]
    for row, length in enumerate(batch.inputs["lengths"].tolist()):
        tokens = batch.inputs["tokens"][row, :length]
        start = int(batch.action_mask[row].nonzero()[0])
        here, before = slice(start, length), slice(start - 1, length - 1)
        logits = plain(tokens[None], use_cache=False).logits[0, before] / TEMPERATURE
        with torch.no_grad():
            theirs = reference(tokens[None], use_cache=False).logits[0, before] / TEMPERATURE
        distribution = logits.log_softmax(-1)
        parts[0].append(distribution.gather(1, tokens[here, None]).squeeze(1))
        parts[1].append(-(distribution.exp() * distribution).sum(-1))
        parts[2].append(full_kl(logits, theirs))
    return [torch.cat(part) for part in parts]


def test_biases_that_select_experts_stay_float32_in_a_bfloat16_engine() -> None:
    network = tiny_families.tiny("deepseek_v3")
    bias = network.model.layers[1].mlp.gate.e_score_correction_bias
    bias.fill_(1.0 + 1e-6)
    engine = TorchRolloutEngine(network.config, (48,), 1, torch.device("cpu"), torch.bfloat16)
    for version in range(2):
        engine.receive(Weights(version, LanguageModel(network).state_dict()))
        own = engine.model.backbone.layers[1].mlp
        assert torch.equal(own.gate.e_score_correction_bias, bias)
        assert own.experts.down_proj.dtype == torch.bfloat16
    answers: list[Any] = []
    engine.generate([Request(0, (3, 1, 4), 0)], SamplingParams(4), answers.append)
    assert len(answers[0].token_ids) == 4


def test_windows_longer_than_all_sequences_are_plain_attention() -> None:
    config = tiny_families.tiny("mistral").config
    assert is_plain(config, 4)
    assert not is_plain(config, 5)
    assert not is_plain(tiny_families.tiny("gpt_oss", sliding_window=64).config, 4)
    assert not is_plain(tiny_families.tiny("gemma2", sliding_window=64).config, 4)
    assert is_plain(tiny_families.tiny("qwen2", use_sliding_window=False).config, 10**9)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("phi", "not tested"),
        ("stablelm", "not tested"),
        ("nemotron", "not tested"),
        ("falcon", "not tested"),
        ("bloom", "not tested"),
        ("gpt2", "not tested"),
        ("opt", "not tested"),
        ("qwen3_next", "layers of kind linear_attention"),
        ("mamba", "layers of kind linear_attention"),
        ("llama4_text", "layers of kind chunked_attention"),
        ("gemma3", "images"),
        ("qwen2_vl", "images"),
    ],
)
def test_the_others_are_refused(family: str, reason: str) -> None:
    from transformers import AutoConfig

    (problem,) = architecture_problems(AutoConfig.for_model(family), "FOLDER", "actor.model.path")
    assert problem.message.startswith(f"{family} has ")
    assert reason in problem.message


@pytest.mark.parametrize(
    ("options", "method", "hint"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8", "FineGrainedFP8Config(dequantize=True)"),
        ({"quant_method": "mxfp4"}, "mxfp4", "Mxfp4Config(dequantize=True)"),
        ({"quant_method": "gptq", "bits": 4}, "gptq", "in bfloat16"),
        ({"quant_method": "awq", "bits": 4}, "awq", "in bfloat16"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes", "dequantize()"),
        ({"load_in_8bit": True}, "bitsandbytes", "dequantize()"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors", "in bfloat16"),
    ],
)
def test_quantised_weights_are_refused_with_what_to_do(options: dict[str, Any], method: str, hint: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model("llama", quantization_config=options)
    (problem,) = architecture_problems(config, "FOLDER", "critic.model.path")
    assert f"the weights are quantised ({method})" in problem.message
    assert hint in problem.hint
    assert (problem.key, problem.value) == ("critic.model.path", "FOLDER")


def test_longrope_reads_as_many_positions_as_its_short_factors_hold_for() -> None:
    from transformers import AutoConfig

    rotary = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "rope_theta": 1e4}
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 4096}
    config = AutoConfig.for_model("phi3", **sizes, original_max_position_embeddings=512, rope_parameters=rotary)
    assert readable_positions(config) == 512
    assert readable_positions(AutoConfig.for_model("llama", max_position_embeddings=64)) == 64
