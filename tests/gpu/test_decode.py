"""On a GPU: decoding steps as CUDA graphs (accel/cuda_decode) equal the plain forward pass."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from decoding_scenarios import (
    Arriving,
    answers,
    causal_lm,
    check_equal,
    engine_for,
    prompts,
    teacher_forced,
    teacher_forced_logits,
    weights_of,
)

from rl_platform.engines.rollout.torch import TorchRolloutEngine
from rl_platform.records import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]
DEVICE = torch.device("cuda", 0)
LENGTHS = (3, 70, 1, 64, 63, 130, 5, 200, 9, 14, 65, 6, 40)
LONG = SamplingParams(150)  # tokens: two pages and more


@pytest.fixture(autouse=True)
def _exact() -> Any:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def graphs(engine: TorchRolloutEngine) -> int:
    assert engine._decoding is not None, "the accelerated step is on"
    return sum(graph is not None for graph in engine._decoding._graphs.values())


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize(
    "sampling",
    [LONG, SamplingParams(150, temperature=0.0), SamplingParams(150, temperature=1.3, top_p=0.9, top_k=30)],
    ids=["drawn", "greedy", "filtered"],
)
def test_it_generates_what_the_plain_step_generates(kind: str, sampling: SamplingParams) -> None:
    """There are more sequences than rows. Some share prefixes and prompts; they end at different times."""
    network = causal_lm(kind).to(DEVICE)
    fast, plain = (engine_for(network, DEVICE, fast=on) for on in (True, False))
    assert plain._decoding is None
    for requests in (prompts(LENGTHS), prompts(LENGTHS[:5], shared=100, samples=3)):
        assert check_equal(answers(fast, requests, sampling), answers(plain, requests, sampling)) > 200
    assert graphs(fast) >= 3


@pytest.mark.parametrize(
    ("heads", "key_heads", "head_dim"), [(4, 4, 64), (14, 2, 64), (8, 1, 128), (2, 2, 40), (2, 1, 120)]
)
def test_shapes_of_heads(heads: int, key_heads: int, head_dim: int) -> None:
    network = causal_lm(heads=heads, key_heads=key_heads, head_dim=head_dim).to(DEVICE)
    fast, plain = (engine_for(network, DEVICE, fast=on, max_running=40) for on in (True, False))
    requests = prompts(LENGTHS, samples=4)
    check_equal(answers(fast, requests, LONG), answers(plain, requests, LONG))
    assert graphs(fast) > 0


def test_filters_of_a_large_vocabulary() -> None:
    """Libraries sort long rows with other kernels. The last token that a filter keeps depends on rounding."""
    network, filtered = causal_lm(vocabulary=100_000).to(DEVICE), SamplingParams(70, top_p=0.9, top_k=2000)
    fast, requests = engine_for(network, DEVICE, fast=True), prompts(LENGTHS)
    found, ranks = answers(fast, requests, filtered), []
    for request in requests:
        completion = found[request.index]
        logits = teacher_forced_logits(network, request, completion).double()
        probs = logits.softmax(-1)
        drawn = probs.gather(1, torch.tensor(completion.token_ids, device=DEVICE)[:, None])
        assert (drawn.log()[:, 0].cpu() - torch.tensor(completion.log_probs)).abs().max() < 1e-3
        likelier = probs > drawn
        ranks += likelier.sum(-1).tolist()
        kept = probs.topk(2000).values.sum(-1)  # the nucleus is a share of these
        assert ((probs * likelier).sum(-1) < 0.9 * kept + 1e-4).all()
    assert 500 < max(ranks) < 2000
    assert graphs(fast) > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_smaller_types_stay_close(dtype: torch.dtype) -> None:
    network = causal_lm(heads=14, key_heads=2, head_dim=64).to(DEVICE, dtype)
    fast, requests = engine_for(network, DEVICE, fast=True, dtype=dtype), prompts(LENGTHS, shared=100)
    found = answers(fast, requests, LONG)
    assert graphs(fast) > 0
    exact, worst = copy.deepcopy(network).float(), []
    for request in requests:
        forced = teacher_forced(exact, request, found[request.index])
        worst.append((forced.cpu() - torch.tensor(found[request.index].log_probs)).abs().mean())
    plain = answers(engine_for(network, DEVICE, fast=False, dtype=dtype), requests, LONG)
    for request in requests:
        forced = teacher_forced(exact, request, plain[request.index])
        worst.append((forced.cpu() - torch.tensor(plain[request.index].log_probs)).abs().mean())
    own, theirs = (torch.stack(part).mean() for part in (worst[: len(requests)], worst[len(requests) :]))
    assert own < 1.3 * theirs + 1e-4, "its rounding is that of the plain step"


def test_new_weights_between_generations() -> None:
    """The second weights are at new addresses; the third replace them in place."""
    networks = [causal_lm(seed=seed).to(DEVICE) for seed in (0, 1)]
    fast, requests = engine_for(networks[0], DEVICE, fast=True), prompts(LENGTHS)
    first = answers(fast, requests, LONG)
    fast.receive(weights_of(networks[1], 1))
    check_equal(answers(fast, requests, LONG), answers(engine_for(networks[1], DEVICE, fast=False), requests, LONG))
    kept = graphs(fast)
    for parameter, other in zip(networks[1].parameters(), networks[0].parameters(), strict=True):
        parameter.data.copy_(other.data)
    fast.receive(weights_of(networks[1], 2))
    check_equal(answers(fast, requests, LONG), first)
    assert graphs(fast) >= kept > 0


def test_arrivals_and_an_abort() -> None:
    network = causal_lm().to(DEVICE)
    fast, plain = (engine_for(network, DEVICE, fast=on) for on in (True, False))
    found = [answers(engine, [], LONG, Arriving(prompts(LENGTHS), 400)) for engine in (fast, plain)]
    check_equal(*found)
    cut = answers(fast, prompts(LENGTHS), LONG, on_finished=lambda completion: fast.abort())
    assert {"abort"} < {completion.finish_reason for completion in cut.values()}
    requests = prompts(LENGTHS)
    check_equal(answers(fast, requests, LONG), answers(plain, requests, LONG))


def test_offloading_frees_the_graphs() -> None:
    network = causal_lm("qwen2")  # on the CPU, so the engine has copies, and joins matrices with the same input
    fast, requests = engine_for(network, DEVICE, fast=True), prompts(LENGTHS)
    first = answers(fast, requests, LONG)
    fast.offload()
    assert graphs(fast) == 0
    held = torch.empty(2**20, device=DEVICE)  # may get the former addresses of the weights
    check_equal(answers(fast, requests, LONG), first)
    assert graphs(fast) > 0
    del held
