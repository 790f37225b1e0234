"""The Triton kernels of a decoding step, without a GPU: in Triton's interpreter, and compiled for an H100.

tests/gpu/test_decode.py runs CUDA graphs. Triton is no dependency of the tests; torch for GPUs installs it. Its
interpreter of 3.6 needs numpy below 2.4 and has no products of bfloat16.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from decoding_scenarios import answers, causal_lm, check_equal, engine_for, prompts

from rl_platform import acceleration
from rl_platform.engines.rollout import kv_cache
from rl_platform.engines.rollout.base import Request
from rl_platform.engines.rollout.paged_attention import PrefillAttention, PrefillChunk
from rl_platform.engines.rollout.sampling import sample
from rl_platform.records import SamplingParams

triton = pytest.importorskip("triton", reason="Triton is not installed")
CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="runs in a process of its own: test_in_the_interpreter"
)
compiled = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled there")


@compiled
def test_in_the_interpreter() -> None:
    """Triton reads its variable when it is imported."""
    command = [sys.executable, "-m", "pytest", "-x", "-n", "0", __file__]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
    assert "passed" in done.stdout, "not only skipped"


@interpreted
@pytest.mark.parametrize(("head_dim", "heads", "group"), [(16, 2, 1), (64, 1, 3), (40, 1, 17)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("programs", [1, 512])
def test_attention(
    head_dim: int, heads: int, group: int, dtype: torch.dtype, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """programs: few or many parts per row, more than there are pages. The last row has no sequence."""
    from rl_platform.accel import cuda_decode_kernels as kernels

    monkeypatch.setattr(kernels, "PROGRAMS", programs)
    monkeypatch.setattr(kernels, "MOST_SPLITS", 8)  # the interpreter takes as long for a part without a page
    torch.manual_seed(0)
    lengths, scaling, layer, page = (1, 64, 65, 150, 0), 0.3, 1, kv_cache.PAGE
    cache = kv_cache.KVCache(2, len(lengths), heads, head_dim, dtype=dtype, device=CPU)
    cache.tails.normal_()
    table = torch.zeros(4, len(lengths) + 2, 2, dtype=torch.int64)
    together = torch.randn(len(lengths), heads * (group + 2) * head_dim, dtype=dtype)  # side by side, as of one product
    given = together.split([heads * group * head_dim, heads * head_dim, heads * head_dim], dim=1)
    query, key, value = (part.reshape(len(lengths), -1, head_dim).float().clone() for part in given)
    angles = torch.rand(len(lengths), head_dim // 2).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    norms = [torch.nn.Module() for _ in range(2)] if group > 1 else []
    for norm in norms:
        norm.weight, norm.variance_epsilon = torch.nn.Parameter(torch.rand(head_dim).to(dtype)), 1e-6
        norm.requires_grad_(False)
    for norm, part in zip(norms, (query, key), strict=False):
        part.copy_(F.rms_norm(part, (head_dim,), norm.weight.float(), norm.variance_epsilon))
    query, key = (
        part * cos[:, None] + torch.cat([-part[..., head_dim // 2 :], part[..., : head_dim // 2]], -1) * sin[:, None]
        for part in (query, key)
    )
    wanted, before = [], cache.tails.clone()
    for slot, length in enumerate(lengths[:-1]):
        pages = [cache.take(readers) for readers in range(1, (length - 1) // page + 1)]  # of several pools
        parts = [*(taken.data.normal_() for taken in pages), cache.tails[:, :, slot]]
        for place, part in enumerate(parts):
            table[place, slot] = torch.tensor([part.data_ptr(), part.stride(0) * part.itemsize])
        before[layer, :, slot, :, (length - 1) % page] = torch.stack([key[slot], value[slot]])
        stored = torch.cat([*(part[layer] for part in parts[:-1]), before[layer, :, slot]], dim=2)[:, :, :length]
        keys, values = stored.float().repeat_interleave(group, dim=1)
        weights = (query[slot, :, None] @ keys.transpose(1, 2) * scaling).softmax(-1)
        wanted.append((weights @ values)[:, 0])
    attention = kernels.PagedAttention(torch.tensor(lengths), table, page, cos, sin)
    found = attention(layer, *given, scaling, norms).view(len(lengths), -1, head_dim)
    tolerance = 2e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(found[:-1].float(), torch.stack(wanted), rtol=tolerance, atol=tolerance)
    assert found[-1].eq(0).all()
    torch.testing.assert_close(cache.tails, before, rtol=tolerance, atol=tolerance)
    assert cache.tails.eq(before).sum() >= before.numel() - 2 * (len(lengths) - 1) * heads * head_dim


@interpreted
def test_prompts_enter_as_by_the_plain_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are several passes: some continue a prompt, fill a page begun earlier, or follow a shared page."""
    from rl_platform.accel.cuda_prefill import PagedPrefill

    torch.manual_seed(0)
    page, heads, width, layers = 16, 2, 24, 2
    monkeypatch.setattr(kv_cache, "PAGE", page)
    caches = [kv_cache.KVCache(layers, 4, heads, width, dtype=torch.float32, device=CPU) for _ in range(2)]
    passes = [{"a": (0, 25), "b": (0, 7)}, {"a": (25, 65), "b": (7, 22), "c": (0, 16)}, {"a": (65, 67)}]
    held: list[dict[str, tuple[list[kv_cache.Page], torch.Tensor]]] = [
        {name: ([], torch.zeros(layers, 2, heads, page, width)) for name in "abc"} for _ in caches
    ]
    for chunks in passes:
        count = sum(stop - start for start, stop in chunks.values())
        planned = []
        for cache, prompts_of in zip(caches, held, strict=True):
            for name, (_, stop) in chunks.items():
                pages = prompts_of[name][0]
                pages += [cache.take(1) for _ in range(stop // page - len(pages))]
            planned.append([PrefillChunk(*prompts_of[name], *span) for name, span in chunks.items()])
        plain, fast = PrefillAttention(planned[0]), PagedPrefill(planned[1], _flash)
        for layer in range(layers):
            joined = torch.randn(count, heads * 3 + heads * 2, width)
            parts = [part.transpose(0, 1)[None] for part in joined.split([3 * heads, heads, heads], dim=1)]
            torch.testing.assert_close(fast(layer, *parts, 0.3), plain(layer, *parts, 0.3), rtol=1e-4, atol=1e-4)
        for name, (_, stop) in chunks.items():
            contents = [
                torch.cat([*(part.data for part in pages), tail], dim=3)[:, :, :, :stop]
                for pages, tail in (prompts_of[name] for prompts_of in held)
            ]
            assert torch.equal(*contents), "the same keys and values are stored"


def _flash(queries: Any, keys: Any, values: Any, query_ends: Any, key_ends: Any, scaling: float) -> torch.Tensor:
    """Computes `varlen.flash_attention`, sequence by sequence."""
    assert query_ends[1] == query_ends[0].diff().max()
    assert key_ends[1] == key_ends[0].diff().max()
    out = []
    for place in range(len(query_ends[0]) - 1):
        query = queries[query_ends[0][place] : query_ends[0][place + 1]].transpose(0, 1)
        own = slice(key_ends[0][place], key_ends[0][place + 1])
        key, value = (part[own].transpose(0, 1).repeat_interleave(3, dim=0) for part in (keys, values))
        mask = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool).tril(key.shape[1] - query.shape[1])
        out.append(F.scaled_dot_product_attention(query, key, value, mask, scale=scaling).transpose(0, 1))
    return torch.cat(out)


@interpreted
@pytest.mark.parametrize(("vocabulary", "chunk"), [(259, 4096), (500, 64), (4096, 1024)])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_sampling(vocabulary: int, chunk: int, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws what the plain step draws. Impossible tokens are never drawn, whatever the random number."""
    from rl_platform.accel import cuda_sampling

    monkeypatch.setattr(cuda_sampling, "CHUNK", chunk)
    torch.manual_seed(0)
    rows, sampling = 40, SamplingParams(1, temperature=temperature)
    logits = 3 * torch.randn(rows, vocabulary + 5)[:, :vocabulary]  # rows that do not follow each other
    logits[:, torch.rand(vocabulary) < 0.5] = float("-inf")
    logits[:, -3:] = logits[:, :70] = float("-inf")
    uniform = torch.rand(rows, dtype=torch.float64)
    uniform[0], uniform[1] = 0.0, 1 - 2**-53
    tokens, log_probs = cuda_sampling.draw(logits, uniform, sampling)
    expected_tokens, expected = sample(logits, uniform, sampling)
    assert torch.equal(tokens, expected_tokens)
    torch.testing.assert_close(log_probs, expected, rtol=1e-5, atol=1e-6)
    assert logits.gather(1, tokens[:, None]).isfinite().all()
    assert tokens.unique().numel() > (20 if temperature else 10)


@interpreted
def test_rounding_of_a_chunk_draws_no_unlikely_token() -> None:
    """The float32 sum of the chunk is greater than the sum of its masses, whose last one is 1e-20 of it."""
    from rl_platform.accel.cuda_sampling import draw

    torch.manual_seed(1)
    logits, sampling = 3 * torch.randn(1, 1000), SamplingParams(1, temperature=1.3)
    logits[:, -1] = -60.0
    tokens, _ = draw(logits.repeat(40, 1), 1 - 5e-9 * torch.arange(1, 41, dtype=torch.float64), sampling)
    assert 999 not in tokens.tolist()


@interpreted
def test_sampling_of_logits_that_are_not_numbers() -> None:
    """The trainer reports the model that diverged."""
    from rl_platform.accel.cuda_sampling import draw

    logits = torch.zeros(2, 300)
    logits[0, 7] = float("nan")
    tokens, log_probs = draw(logits, torch.tensor([0.5, 0.5], dtype=torch.float64), SamplingParams(1))
    assert log_probs.isnan().tolist() == [True, False]
    assert ((tokens >= 0) & (tokens < 300)).all()


@pytest.mark.parametrize(
    ("sampling", "covered"),
    [
        (SamplingParams(1), True),
        (SamplingParams(1, temperature=0.0), True),
        (SamplingParams(1, top_k=300), True),
        (SamplingParams(1, top_k=299), False),
        (SamplingParams(1, top_p=0.9), False),
    ],
)
def test_filters_are_left_to_plain_torch(sampling: SamplingParams, covered: bool) -> None:
    from rl_platform.accel.cuda_sampling import covers

    assert covers(sampling, 300) == covered


@interpreted
@pytest.mark.parametrize(("kind", "joined"), [("llama", False), ("qwen2", True), ("qwen3", True)])
@pytest.mark.parametrize("sampling", [SamplingParams(20), SamplingParams(20, temperature=0.0)], ids=["drawn", "greedy"])
def test_generation(kind: str, joined: bool, sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows come, go and move, and pages too, as in the plain step. joined: one product has several matrices."""
    from rl_platform.accel import cuda_decode, cuda_decode_kernels

    monkeypatch.setattr(kv_cache, "PAGE", 16)
    monkeypatch.setattr(cuda_decode_kernels, "PROGRAMS", 4)
    network = causal_lm(kind, key_heads=1)
    if joined:
        network.double()  # so the engine copies the weights
    fast, plain = (engine_for(network, CPU, fast=False, max_running=3) for _ in range(2))
    assert cuda_decode.decodes(fast._decoder, torch.float32)
    fast._decoding = cuda_decode.CudaDecoding(fast._decoder, 3, CPU)
    if joined:
        fast._decoding.join()
    weights = [layer.weight for layer in fast._decoder.layers[0].qkv.layers]
    assert (cuda_decode._side_by_side(weights) is not None) == joined
    for requests in (prompts((3, 17, 1, 15, 30), shared=40), prompts((3, 17), samples=3)):
        assert check_equal(answers(fast, requests, sampling), answers(plain, requests, sampling)) > 20


@interpreted
def test_a_generation_that_is_cut_keeps_no_cache_for_training(monkeypatch: pytest.MonkeyPatch):
    from rl_platform.accel import cuda_decode, cuda_decode_kernels

    monkeypatch.setattr(cuda_decode_kernels, "PROGRAMS", 1)
    fast = engine_for(causal_lm(key_heads=1), CPU, fast=False, max_running=2)
    fast._decoding = cuda_decode.CudaDecoding(fast._decoder, 2, CPU)
    requests = [Request(one.index, one.token_ids, one.seed, 3 + 3 * one.index) for one in prompts((3, 1))]
    cut = answers(fast, requests, SamplingParams(6), on_finished=lambda completion: fast.abort())
    assert [completion.finish_reason for completion in cut.values()] == ["length", "abort"]
    gc.collect()
    left = [type(one) for one in gc.get_objects() if type(one) in (kv_cache.KVCache, kv_cache.Pool, kv_cache.Page)]
    assert left == []


@interpreted
def test_kernels_are_compared_with_plain_torch_before_their_use(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong results and errors give one warning each; generation then uses plain torch."""
    from rl_platform.accel import cuda_check

    decoder: Any = engine_for(causal_lm(heads=6, key_heads=2), CPU, fast=False)._decoder
    assert cuda_check.agrees(decoder, CPU, torch.float32, flash=False)
    assert not caplog.messages
    monkeypatch.setattr(cuda_check.CudaRows, "gated", lambda self, gate_up: gate_up.chunk(2, dim=-1)[0])
    assert not cuda_check.agrees(decoder, CPU, torch.float32, flash=False)
    assert "gate: relative difference" in caplog.messages[0]
    monkeypatch.undo()
    monkeypatch.setattr(cuda_check.PagedAttention, "__call__", lambda *_: 1 / 0)
    assert not cuda_check.agrees(decoder, CPU, torch.float32, flash=False)
    assert "division by zero" in caplog.messages[1]
    monkeypatch.undo()
    monkeypatch.setattr(cuda_check, "draw", lambda *given: (sample(*given)[0], sample(*given)[1] + 0.5))
    assert not cuda_check.agrees(decoder, CPU, torch.float32, flash=False)
    assert "log-probs of sampled tokens: relative difference" in caplog.messages[2]
    assert len(caplog.messages) == 3


@compiled
def test_which_gpus_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs decode by graphs if the kernels cover the model and agree with plain torch."""
    from rl_platform.accel import cuda_check, cuda_decode

    decoder: Any = engine_for(causal_lm(), CPU, fast=False)._decoder
    gpu, compared = torch.device("cuda", 0), []
    monkeypatch.setattr("rl_platform.accel.build._has_triton", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(cuda_decode, "CudaDecoding", lambda *given, graphs: given)
    monkeypatch.setattr(cuda_check, "agrees", lambda *given, flash: compared.append(given) or True)
    assert acceleration.find("decoding_step", decoder, 4, gpu, torch.float32, graphs=True) is not None
    assert len(compared) == 1
    assert acceleration.find("decoding_step", object(), 4, gpu, torch.float32, graphs=True) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert acceleration.find("decoding_step", decoder, 4, gpu, torch.float32, graphs=True) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(cuda_check, "agrees", lambda *given, flash: False)
    assert acceleration.find("decoding_step", decoder, 4, gpu, torch.float32, graphs=True) is None
    assert len(compared) == 1


def test_only_gpus_have_it() -> None:
    decoder: Any = engine_for(causal_lm(), CPU, fast=False)._decoder
    assert acceleration.find("decoding_step", decoder, 4, CPU, torch.float32, graphs=True) is None


@compiled
@pytest.mark.parametrize(("name", "size"), [("bf16", 2), ("fp32", 4)])
@pytest.mark.parametrize("head_dim", [40, 128])
def test_compiled_for_an_h100_it_loads_16_bytes_at_once(name: str, size: int, head_dim: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from rl_platform.accel import cuda_decode_kernels as kernels
    from rl_platform.accel import cuda_sampling

    shape = {"D": head_dim, "WIDTH": triton.next_power_of_2(head_dim)}
    stored = {**shape, "PAGE": 64, "SIZE": size}
    group = {"GROUP": 7, "MEMBERS": 16, "SPLITS": 8}
    tables = dict.fromkeys(("lengths", "table"), "*i64")
    numbers = "query key value cos sin query_norm key_norm placed states more weight gate up out"
    tensors = dict.fromkeys(numbers.split(), f"*{name}")
    given = {**tensors, **tables, **dict.fromkeys(("parts", "logs"), "*fp32"), "scale": "fp32", "epsilon": "fp32"}
    given |= dict.fromkeys(("tops", "sums", "log_probs"), "*fp32") | {"logits": f"*{name}", "temperature": "fp32"}
    given |= {"uniforms": "*fp64", "tokens": "*i64"}
    all_constants = {
        "_place": {**stored, "HEADS": 7, "KEY_HEADS": 1, "NORMED": True},
        "_attend": {**stored, **group},
        "_combine": {**shape, "SPLITS": 8},
        "_add_and_norm": {"ADDS": True, "H": 896, "WIDTH": 1024},
        "_gate": {"INNER": 4864, "BLOCK": kernels.BLOCK},
        "_reduce": {"V": 151_936, "CHUNK": cuda_sampling.CHUNK},
        "_draw": {"V": 151_936, "CHUNK": cuda_sampling.CHUNK, "CHUNKS": 38, "SLOTS": 64, "GREEDY": False},
    }
    for kernel, constants in all_constants.items():
        function = getattr(cuda_sampling if kernel in ("_reduce", "_draw") else kernels, kernel)
        signature = {
            argument: "constexpr" if argument in constants else given.get(argument, "i32")
            for argument in function.arg_names
        }
        aligned = {
            (place,): [["tt.divisibility", 16]]
            for place, argument in enumerate(function.arg_names)
            if signature[argument] != "constexpr" and argument not in ("layer", "scale", "epsilon", "temperature")
        }
        source = ASTSource(function, signature, constexprs=constants, attrs=aligned)
        assembly = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
        if kernel == "_attend":
            assert "cp.async.cg" in assembly, "pages are copied 16 bytes at a time, ahead of their use"
