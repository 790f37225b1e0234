"""The parts of the Megatron backend that need no process group: shares of tensors, log-probs, the view of torch."""

from __future__ import annotations

import importlib
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rl_platform.config.schema.models import Parallel
from rl_platform.engines.training.megatron.device import CONNECTIONS, importing_megatron, prepare
from rl_platform.engines.training.megatron.mixture import Mixture
from rl_platform.engines.training.megatron.supported import unfit, uses_transformer_engine
from rl_platform.engines.training.megatron.vocab_parallel import vocab_parallel_full_kl, vocab_parallel_log_probs
from rl_platform.engines.training.megatron.weight_map import TensorSource, boxes, join, placed, source_of, split
from rl_platform.models import language
from rl_platform.models.language import full_kl_of_states, token_log_probs

HEADS, KEY_HEADS, HEAD, WIDTH, INNER, VOCABULARY = 8, 4, 6, 20, 24, 31
CONFIG = SimpleNamespace(
    model_type="qwen3",
    num_attention_heads=HEADS,
    num_key_value_heads=KEY_HEADS,
    head_dim=HEAD,
    vocab_size=VOCABULARY,
    hidden_size=WIDTH,
)
QUERIES, KEYS = HEADS * HEAD, KEY_HEADS * HEAD
WHOLE = {  # parameters of a stage, and the shapes of the tensors that they consist of
    "decoder.layers.1.self_attention.linear_qkv.weight": [(QUERIES, WIDTH), (KEYS, WIDTH), (KEYS, WIDTH)],
    "decoder.layers.1.self_attention.linear_qkv.bias": [(QUERIES,), (KEYS,), (KEYS,)],
    "decoder.layers.1.self_attention.linear_proj.weight": [(WIDTH, QUERIES)],
    "decoder.layers.1.mlp.linear_fc1.weight": [(INNER, WIDTH), (INNER, WIDTH)],
    "decoder.layers.1.mlp.linear_fc2.weight": [(WIDTH, INNER)],
    "decoder.layers.1.mlp.experts.gate_up": [(8, INNER, WIDTH)],
    "decoder.layers.1.mlp.experts.down": [(8, WIDTH, INNER)],
    "decoder.layers.1.mlp.router.weight": [(8, WIDTH)],
    "embedding.word_embeddings.weight": [(VOCABULARY, WIDTH)],
    "output_layer.weight": [(VOCABULARY, WIDTH)],
    "decoder.final_layernorm.weight": [(WIDTH,)],
}


def shared(source: TensorSource, whole: Sequence[Tensor], size: int) -> list[Tensor]:
    """The parameters of `size` ranks, put together from whole tensors in the order of Megatron's layers."""
    match source.sharing:
        case "replicated":
            return [whole[0]] * size
        case "columns":
            return [*whole[0].chunk(size, dim=1)]
        case "rows":
            return [*F.pad(whole[0], (0, 0, 0, -len(whole[0]) % size)).chunk(size)]
        case "gate_up":
            return [torch.cat(halves) for halves in zip(*(tensor.chunk(size) for tensor in whole), strict=True)]
        case "qkv":  # for each key head its queries, its key and its value
            heads = [tensor.view(KEY_HEADS, -1, *tensor.shape[1:]) for tensor in whole]
            return [*torch.cat(heads, dim=1).flatten(0, 1).chunk(size)]
        case _:
            return [*whole[0].chunk(size)]


class TestShares:
    @pytest.mark.parametrize("cuts", [1, 3], ids=["parameters", "stretches of them"])
    @pytest.mark.parametrize("size", [1, 2, 4])
    @pytest.mark.parametrize("name", WHOLE)
    def test_all_ranks_together_make_up_the_whole(self, name: str, size: int, cuts: int) -> None:
        """Each element of a rank's parameter comes back to its place once; and a view writes through."""
        source, shapes = source_of(name, 5, CONFIG, value_head=False), WHOLE[name]
        whole = [torch.rand(shape) for shape in shapes]
        joined = [torch.full(shape, math.nan) for shape in shapes]
        times = [torch.zeros(shape) for shape in shapes]
        parameters = shared(source, whole, size)
        for rank, parameter in enumerate(parameters[:1] if source.sharing == "replicated" else parameters):
            assert torch.equal(split(source, rank, parameter.shape, whole), parameter)
            own = parameter.clone()
            ends = [round(own.numel() * number / cuts) for number in range(cuts + 1)]  # across rows
            for start, stop in pairwise(ends):
                for index, offsets, part in placed(source, rank, own.shape, shapes, own.view(-1)[start:stop], start):
                    assert part.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()
                    where = tuple(slice(first, first + count) for first, count in zip(offsets, part.shape, strict=True))
                    joined[index][where] = part
                    times[index][where] += 1
        assert all(torch.equal(*pair) for pair in zip(joined, whole, strict=True))
        assert all(bool((count == 1).all()) for count in times)
        assert all(torch.equal(*pair) for pair in zip(join(source, parameters, shapes), whole, strict=True))

    @given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=4), data=st.data())
    def test_boxes_are_the_stretch_in_order(self, shape: list[int], data: st.DataObject) -> None:
        stop = data.draw(st.integers(0, math.prod(shape)))
        start = data.draw(st.integers(0, stop))
        numbers = torch.arange(math.prod(shape)).view(shape)
        elements = []
        for offsets, sizes in boxes(shape, start, stop):
            box = numbers[tuple(slice(first, first + size) for first, size in zip(offsets, sizes, strict=True))]
            assert box.shape == sizes
            elements += box.flatten().tolist()
        assert elements == list(range(start, stop))

    def test_names(self) -> None:
        def source(name: str, value_head: bool = False) -> TensorSource:
            return source_of(name, 5, CONFIG, value_head=value_head)

        layer = "decoder.layers.1"
        assert source(f"{layer}.mlp.linear_fc2.weight").names == ("model.backbone.layers.6.mlp.down_proj.weight",)
        norms = {"self_attention.linear_qkv": "input_layernorm", "mlp.linear_fc1": "pre_mlp_layernorm"}
        for fused, plain in norms.items():  # Transformer Engine's layers include the norm
            assert source(f"{layer}.{fused}.layer_norm_weight") == source(f"{layer}.{plain}.weight")
        head = source("output_layer.bias", value_head=True)
        assert (head.names, head.sharing) == (("model.head.bias",), "replicated")

    def test_a_rank_holds_whole_heads_and_the_queries_of_its_keys(self) -> None:
        source = source_of("decoder.layers.0.self_attention.linear_qkv.weight", 0, CONFIG, value_head=False)
        query, key, value = (torch.rand(rows, WIDTH) for rows in (QUERIES, KEYS, KEYS))
        mine = split(source, 1, (8 * HEAD, WIDTH), [query, key, value])  # key heads 2 and 3, query heads 4 to 7
        per_key = mine.view(2, -1, WIDTH)
        assert torch.equal(per_key[:, : 2 * HEAD].flatten(0, 1), query[4 * HEAD :])
        assert torch.equal(per_key[:, 2 * HEAD : 3 * HEAD].flatten(0, 1), key[2 * HEAD :])
        assert torch.equal(per_key[:, 3 * HEAD :].flatten(0, 1), value[2 * HEAD :])


class TestLogProbs:
    @pytest.mark.parametrize("statistic", ["none", "entropy", "entropy_gradient", "squared_probs"])
    @pytest.mark.parametrize("temperature", [1.0, 0.7])
    @pytest.mark.parametrize("chunk", [4, 1024])
    def test_as_with_full_logits(self, monkeypatch, statistic: Any, temperature: float, chunk: int) -> None:
        monkeypatch.setattr(language, "TOKENS_PER_CHUNK", chunk)
        draw = torch.Generator().manual_seed(0)
        states, weight = (torch.randn(rows, 8, generator=draw) for rows in (11, 23))
        targets = torch.randint(23, (11,), generator=draw)
        results = []
        for function in (
            lambda s, w: token_log_probs(s, targets, w, temperature, statistic),
            lambda s, w: vocab_parallel_log_probs(s, w, targets, 0, temperature, statistic),
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
        assert results[1][1] is None or results[1][1].requires_grad == (
            statistic in ("entropy_gradient", "squared_probs")
        )

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
        log_probs, entropies = vocab_parallel_log_probs(
            torch.zeros(0, 8), torch.zeros(23, 8), nothing, 0, 1.0, "entropy"
        )
        assert log_probs.shape == (0,)
        assert entropies is not None
        assert entropies.shape == (0,)


class TestMixture:
    OPTIONS: ClassVar[dict[str, Any]] = {
        "hidden_size": 8,
        "num_attention_heads": 4,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 2,
        "n_routed_experts": 12,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
    }

    @pytest.mark.parametrize(
        ("family", "router", "options"),
        [
            ("qwen2_moe", "Qwen2MoeTopKRouter", {"num_experts": 12}),
            ("qwen3_moe", "Qwen3MoeTopKRouter", {"num_experts": 12, "norm_topk_prob": True}),
            ("mixtral", "MixtralTopKRouter", {"num_local_experts": 12}),
            ("deepseek_v2", "DeepseekV2TopkRouter", {"topk_method": "greedy"}),
            ("deepseek_v2", "DeepseekV2TopkRouter", {"topk_method": "group_limited_greedy"}),
            ("deepseek_v3", "DeepseekV3TopkRouter", {"norm_topk_prob": True}),
            ("deepseek_v3", "DeepseekV3TopkRouter", {"norm_topk_prob": False}),
        ],
    )
    def test_routes_and_weights_are_those_of_transformers(self, family: str, router: str, options: Any) -> None:
        from transformers import AutoConfig

        config = AutoConfig.for_model(family, **{**self.OPTIONS, **options})
        theirs = getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), router)(config)
        mixture = Mixture.of(config)
        assert mixture is not None
        draw = torch.Generator().manual_seed(0)
        states, correction = torch.randn(40, 8, generator=draw), None
        with torch.no_grad():
            theirs.weight.copy_(torch.randn(theirs.weight.shape, generator=draw))
            if mixture.correction:
                correction = theirs.e_score_correction_bias.copy_(torch.randn(12, generator=draw))
            logits, weights, routes = theirs(states)
            scores = mixture.scores(logits.float())
            ours = mixture.routes(scores, correction)
            found = mixture.weights(logits.float(), scores, ours)
        whole = [torch.zeros(40, 12).scatter(1, *pair) for pair in ((routes, weights), (ours, found))]
        torch.testing.assert_close(whole[1], whole[0])

    def test_which_layers_have_experts(self) -> None:
        config = SimpleNamespace(**vars(TestLayout.LLAMA) | TestLayout.SHARED | {"decoder_sparse_step": 2})
        config.mlp_only_layers = [3]
        mixture = Mixture.of(config)
        assert mixture is not None
        assert mixture.layers == (False, True, False, False, False, True)
        latent = Mixture.of(SimpleNamespace(**vars(TestLayout.LLAMA) | TestLayout.LATENT))
        assert latent is not None
        assert latent.layers == (False, True, True, True, True, True)
        assert Mixture.of(TestLayout.LLAMA) is None


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
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 90,
        "norm_topk_prob": True,
    }
    SHARED: ClassVar[dict[str, Any]] = EXPERTS | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 90}
    SEQUENCE: ClassVar[dict[str, Any]] = {"tensor": 4, "sequence": True}
    LATENT: ClassVar[dict[str, Any]] = EXPERTS | {
        "model_type": "deepseek_v3",
        "kv_lora_rank": 8,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
    }

    @pytest.mark.parametrize("parallel", [{"expert": 8}, {"tensor": 4, "sequence": True, "expert": 2, "pipeline": 3}])
    def test_experts_fit(self, parallel: dict[str, Any]) -> None:
        config = SimpleNamespace(**vars(self.LLAMA) | self.EXPERTS | {"intermediate_size": 90})
        assert list(unfit(config, Parallel(**parallel), "actor")) == []

    def test_latent_attention_has_layers_of_its_own(self) -> None:
        config = SimpleNamespace(**vars(self.LLAMA) | self.LATENT | {"rope_parameters": {"rope_type": "yarn"}})
        assert list(unfit(config, Parallel(), "actor", "auto")) == []
        (problem,) = unfit(config, Parallel(), "actor", "transformer_engine")
        assert problem.key == "actor.kernels"

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
            (EXPERTS | {"mlp_only_layers": [0], "intermediate_size": 90}, SEQUENCE, "critic.parallel.tensor", "90"),
            (SHARED, SEQUENCE, "critic.parallel.tensor", "90 channels"),
            (LATENT | {"rope_interleave": False}, {}, "critic.training_backend", "not interleaved"),
            ({"mlp_bias": True}, {}, "critic.training_backend", "biases"),
            ({"hidden_act": "gelu"}, {}, "critic.training_backend", "gelu"),
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="functions of Megatron are compiled for the GPU of this machine")
@pytest.mark.parametrize(("before", "after"), [(None, "1"), ("32", "32")])
def test_on_a_gpu_kernels_start_in_the_order_of_their_launch(monkeypatch, before: str | None, after: str) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setenv(CONNECTIONS, before or "")
    if before is None:
        monkeypatch.delenv(CONNECTIONS)
    assert prepare(torch.device("cuda", 0)) == "nccl"
    assert os.environ[CONNECTIONS] == after


def test_megatron_is_imported_without_a_compiler_where_there_is_no_gpu():
    def function() -> None: ...

    compile_ = torch.compile
    with importing_megatron():
        assert torch.compile(function) is function
        assert torch.compile(dynamic=True)(function) is function
    assert torch.compile is compile_
