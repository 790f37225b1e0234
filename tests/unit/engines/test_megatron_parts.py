"""The parts of the Megatron backend that need no process group: shares of tensors, log-probs, the view of torch."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from rl_platform.config.schema.models import Parallel
from rl_platform.engines.training.megatron.supported import unfit, uses_transformer_engine
from rl_platform.engines.training.megatron.vocab_parallel import vocab_parallel_full_kl, vocab_parallel_log_probs
from rl_platform.engines.training.megatron.weights import source_of
from rl_platform.models import language
from rl_platform.models.language import full_kl_of_states, token_log_probs

HEADS, KEY_HEADS, HEAD, WIDTH, INNER, VOCABULARY = 8, 4, 6, 20, 24, 31
CONFIG = SimpleNamespace(
    num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS, head_dim=HEAD, vocab_size=VOCABULARY, hidden_size=WIDTH
)
SHAPES = {
    "q_proj": (HEADS * HEAD, WIDTH),
    "k_proj": (KEY_HEADS * HEAD, WIDTH),
    "v_proj": (KEY_HEADS * HEAD, WIDTH),
    "o_proj": (WIDTH, HEADS * HEAD),
    "gate_proj": (INNER, WIDTH),
    "up_proj": (INNER, WIDTH),
    "down_proj": (WIDTH, INNER),
    "experts": (8, INNER, WIDTH),
    "embed_tokens": (VOCABULARY, WIDTH),
    "head": (VOCABULARY, WIDTH),
    "norm": (WIDTH,),
    "gate": (8, WIDTH),
}
PARAMETERS = [
    "decoder.layers.1.self_attention.linear_qkv.weight",
    "decoder.layers.1.self_attention.linear_qkv.bias",
    "decoder.layers.1.self_attention.linear_proj.weight",
    "decoder.layers.1.mlp.linear_fc1.weight",
    "decoder.layers.1.mlp.linear_fc2.weight",
    "decoder.layers.1.mlp.experts.gate_up",
    "decoder.layers.1.mlp.experts.down",
    "decoder.layers.1.mlp.router.weight",
    "embedding.word_embeddings.weight",
    "output_layer.weight",
    "decoder.final_layernorm.weight",
]


def tensor_of(name: str) -> Tensor:
    """A tensor in which every number is different."""
    module, kind = name.split(".")[-2:]
    shape = SHAPES[module][:1] if kind == "bias" else SHAPES[module]
    return torch.arange(float(torch.tensor(shape).prod())).view(shape) + len(module) / 100


class TestShares:
    @pytest.mark.parametrize("size", [1, 2, 4])
    @pytest.mark.parametrize("name", PARAMETERS)
    def test_shares_are_equal_and_whole_together(self, name: str, size: int) -> None:
        source = source_of(name, 5, CONFIG, size, value_head=False, expert_size=size)
        whole = [tensor_of(part) for part in source.names]
        parts = [source.split(whole, rank) for rank in range(size)]
        assert len({part.shape for part in parts}) == 1
        joined = source.join(parts)
        assert len(joined) == len(whole)
        assert all(torch.equal(*pair) for pair in zip(joined, whole, strict=True))

    def test_experts_are_shared_by_other_ranks_than_matrices(self) -> None:
        source = source_of("decoder.layers.0.mlp.experts.down", 0, CONFIG, 2, value_head=False, expert_size=4)
        (experts,) = (tensor_of(name) for name in source.names)
        assert torch.equal(source.split([experts], 3), experts[6:])

    def test_norms_of_fused_layers_are_those_of_the_plain_ones(self) -> None:
        for fused, plain in (
            ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
            ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
        ):
            sources = [source_of(f"decoder.layers.3.{n}", 0, CONFIG, 2, value_head=False) for n in (fused, plain)]
            assert sources[0] == sources[1]

    def test_layers_are_numbered_in_the_model(self) -> None:
        source = source_of("decoder.layers.1.mlp.linear_fc2.weight", 5, CONFIG, 1, value_head=False)
        assert source.names == ("model.backbone.layers.6.mlp.down_proj.weight",)

    def test_a_rank_holds_whole_heads_and_the_queries_of_its_keys(self) -> None:
        source = source_of("decoder.layers.0.self_attention.linear_qkv.weight", 0, CONFIG, 2, value_head=False)
        query, key, value = (tensor_of(name) for name in source.names)
        mine = source.split([query, key, value], 1)  # key heads 2 and 3, query heads 4 to 7
        per_key = mine.view(2, -1, WIDTH)
        assert torch.equal(per_key[:, : 2 * HEAD].flatten(0, 1), query[4 * HEAD :])
        assert torch.equal(per_key[:, 2 * HEAD : 3 * HEAD].flatten(0, 1), key[2 * HEAD :])
        assert torch.equal(per_key[:, 3 * HEAD :].flatten(0, 1), value[2 * HEAD :])

    def test_a_value_head_is_not_shared(self) -> None:
        source = source_of("output_layer.bias", 0, CONFIG, 2, value_head=True)
        assert (source.names, source.sharing) == (("model.head.bias",), "replicated")


class TestLogProbs:
    @pytest.mark.parametrize("entropy", ["none", "value", "gradient"])
    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    @pytest.mark.parametrize("chunk", [4, 1024])
    def test_as_with_full_logits(self, monkeypatch, entropy: Any, temperature: float, chunk: int) -> None:
        monkeypatch.setattr(language, "TOKENS_PER_CHUNK", chunk)
        draw = torch.Generator().manual_seed(0)
        states, weight = (torch.randn(rows, 8, generator=draw) for rows in (11, 23))
        targets = torch.randint(23, (11,), generator=draw)
        results = []
        for function in (
            lambda s, w: token_log_probs(s, targets, w, temperature, entropy),
            lambda s, w: vocab_parallel_log_probs(s, w, targets, 0, temperature, entropy),
        ):
            leaves = [tensor.clone().requires_grad_() for tensor in (states, weight)]
            log_probs, entropies = function(*leaves)
            total = log_probs.square().sum()
            if entropies is not None and entropies.requires_grad:
                total = total + entropies.sum()
            total.backward()
            results.append([log_probs, entropies, *(leaf.grad for leaf in leaves)])
        for actual, expected in zip(results[1], results[0], strict=True):
            assert (actual is None) == (expected is None)
            if expected is not None:
                torch.testing.assert_close(actual, expected, rtol=1e-4, atol=3e-5)
        assert results[1][1] is None or results[1][1].requires_grad == (entropy == "gradient")

    def test_logits_of_more_than_a_chunk_never_exist(self, monkeypatch) -> None:
        sizes = []
        linear = torch.nn.functional.linear
        monkeypatch.setattr(language, "TOKENS_PER_CHUNK", 4)
        monkeypatch.setattr(torch.nn.functional, "linear", lambda *a: sizes.append(len(a[0])) or linear(*a))
        states = torch.randn(11, 8, requires_grad=True)
        weight = torch.randn(23, 8, requires_grad=True)
        vocab_parallel_log_probs(states, weight, torch.zeros(11, dtype=torch.int64), 0, 1.0, "value")[
            0
        ].sum().backward()
        assert max(sizes) == 4
        assert sum(sizes) == 22  # forward, and again for the backward

    @pytest.mark.parametrize("chunk", [1, 4, 1024])
    def test_kl_over_the_whole_vocabulary(self, monkeypatch, chunk: int) -> None:
        monkeypatch.setattr(language, "TOKENS_PER_CHUNK", chunk)
        draw = torch.Generator().manual_seed(0)
        shapes = ((11, 8), (23, 8), (11, 6), (23, 6))
        states, weight, other_states, other_weight = (torch.randn(shape, generator=draw) for shape in shapes)
        results = []
        for function in (full_kl_of_states, vocab_parallel_full_kl):
            leaves = [tensor.clone().requires_grad_() for tensor in (states, weight)]
            divergence = function(*leaves, other_states, other_weight, 0.7)
            divergence.square().sum().backward()
            results.append([divergence, *(leaf.grad for leaf in leaves)])
        for divergence, expected in zip(results[1], results[0], strict=True):
            torch.testing.assert_close(divergence, expected, rtol=1e-4, atol=3e-5)

    def test_no_tokens(self) -> None:
        nothing = torch.zeros(0, dtype=torch.int64)
        log_probs, entropies = vocab_parallel_log_probs(torch.zeros(0, 8), torch.zeros(23, 8), nothing, 0, 1.0, "value")
        assert log_probs.shape == (0,)
        assert entropies is not None
        assert entropies.shape == (0,)


class TestLayout:
    LLAMA = SimpleNamespace(
        model_type="llama",
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=96,
        num_hidden_layers=6,
        rope_parameters={"rope_type": "default"},
        attention_bias=False,
    )

    EXPERTS: ClassVar[dict[str, Any]] = {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    }

    @pytest.mark.parametrize("parallel", [{"expert": 8}, {"tensor": 4, "sequence": True, "expert": 2, "pipeline": 3}])
    def test_experts_fit(self, parallel: dict[str, Any]) -> None:
        config = SimpleNamespace(**vars(self.LLAMA) | self.EXPERTS | {"intermediate_size": 90})
        assert list(unfit(config, Parallel(**parallel), "actor")) == []

    @pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 3), (4, 2), (4, 6)])
    def test_fits(self, tensor: int, pipeline: int) -> None:
        assert list(unfit(self.LLAMA, Parallel(tensor=tensor, pipeline=pipeline), "actor")) == []

    @pytest.mark.parametrize(
        ("change", "parallel", "key", "reason"),
        [
            ({}, {"tensor": 3}, "critic.parallel.tensor", "8 attention heads"),
            ({}, {"tensor": 8}, "critic.parallel.tensor", "4 key and value heads"),
            ({"intermediate_size": 90}, {"tensor": 4}, "critic.parallel.tensor", "90 channels"),
            ({}, {"pipeline": 4}, "critic.parallel.pipeline", "6 layers"),
            ({"model_type": "gpt2"}, {}, "critic.training_backend", "llama, qwen2, qwen3"),
            ({"rope_parameters": {"rope_type": "yarn"}}, {}, "critic.training_backend", "yarn"),
            ({"attention_bias": True}, {}, "critic.training_backend", "bias"),
            ({}, {"pipeline": 2, "virtual_pipeline": 2}, "critic.parallel.virtual_pipeline", "2 stages of 2 parts"),
            ({}, {"expert": 2}, "critic.parallel.expert", "a llama model has none"),
            (EXPERTS, {"expert": 3}, "critic.parallel.expert", "8 experts"),
            (EXPERTS, {"tensor": 2}, "critic.parallel.sequence", "route the same tokens"),
            (EXPERTS | {"mlp_only_layers": [0]}, {}, "critic.training_backend", "layers without"),
            (EXPERTS | {"decoder_sparse_step": 2}, {}, "critic.training_backend", "layers without"),
        ],
    )
    def test_does_not_fit(self, change: dict[str, Any], parallel: dict[str, int], key: str, reason: str) -> None:
        config = SimpleNamespace(**vars(self.LLAMA) | change)
        (problem,) = unfit(config, Parallel(**parallel), "critic")
        assert problem.key == key
        assert reason in problem.message


@pytest.mark.parametrize(
    ("kernels", "installed", "on_gpu", "fused"),
    [
        ("auto", True, True, True),
        ("auto", True, False, False),
        ("auto", False, True, False),
        ("torch", True, True, False),
        ("transformer_engine", True, True, True),
    ],
)
def test_whose_layers(monkeypatch, kernels: str, installed: bool, on_gpu: bool, fused: bool) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if installed else None)
    assert uses_transformer_engine(kernels, on_gpu=on_gpu) == fused


@pytest.mark.skipif(torch.cuda.is_available(), reason="the view is for machines without a GPU")
@pytest.mark.filterwarnings("ignore")
class TestViewOfTorch:
    def test_only_megatron_sees_a_device_that_is_not_there(self) -> None:
        from rl_platform.engines.training.megatron.device import prepare

        assert prepare(torch.device("cpu")) == "gloo"
        prepare(torch.device("cpu"))
        finders = [finder for finder in sys.meta_path if type(finder).__name__ == "_LateModules"]
        assert len(finders) == 1
        utils: Any = importlib.import_module("megatron.core.utils")
        assert utils.torch.zeros(2, device="cuda").device.type == "cpu"
        assert utils.torch.nn is torch.nn
        assert torch.zeros is not utils.torch.zeros
        with pytest.raises((RuntimeError, AssertionError)):
            torch.zeros(2, device="cuda")
        with pytest.raises((RuntimeError, AssertionError)):
            torch.zeros(2).cuda()
        assert torch.zeros(2).type() == "torch.FloatTensor"

    def test_importing_the_platform_imports_no_megatron(self) -> None:
        code = (
            "import sys, rl_platform.components.learner, rl_platform.engines.training.megatron.model;"
            "assert not [name for name in sys.modules if name.startswith('megatron')]"
        )
        subprocess.run([sys.executable, "-c", code], check=True)
