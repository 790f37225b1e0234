"""On GPUs: how weights reach SGLang there, memory that it gives back, tensor parallel ranks, seeds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from sglang_engine import needs_sglang

from rl_platform.engines.rollout.sglang.program import SGLangSetup
from rl_platform.engines.rollout.sglang.sglang_client import SGLangEngine
from rl_platform.records import SamplingParams, Weights
from rl_platform.runtime.ray.weight_sender import GroupTransfer
from rl_platform.runtime.weights.group import JoinRequest, WeightGroup, offer_fields, place_of
from rl_platform.runtime.weights_token import WeightsToken

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    needs_sglang,
    pytest.mark.timeout(900),
    pytest.mark.skipif(GPUS == 0, reason="there is no GPU"),
]
two_gpus = pytest.mark.skipif(GPUS < 2, reason="there are no two GPUs")
GREEDY = SamplingParams(8, temperature=0.0)
GIB = 2**30
Start = Callable[..., SGLangEngine]


@pytest.fixture(scope="module")
def shared(script: Any) -> ModuleType:
    """Models, prompts and checks that the engines are tested with on a CPU."""
    return script(Path(__file__).parents[1] / "unit" / "engines" / "test_rollout.py")


@pytest.fixture
def plain(shared: ModuleType) -> Any:
    return shared.causal_lm()


@pytest.fixture
def start(shared: ModuleType, plain: Any, tmp_path: Path, closes) -> Start:
    """start(gpus, **engine_args): an engine without weights."""

    def run(*gpus: int, **arguments: Any) -> SGLangEngine:
        description = plain.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
        setup = SGLangSetup(description, "cuda", len(gpus), "float32", 16, None, 0.3, 0, gpus, arguments)
        return closes(SGLangEngine("rollout[0]", setup, (shared.NEVER,), {}, tmp_path / "engine.log"))

    return run


def assert_generates_with(engine: SGLangEngine, plain: Any, shared: ModuleType) -> None:
    """The log-probabilities are those of `plain`; kernels of GPUs round in other ways than a CPU."""
    requests = shared.prompts()
    for index, completion in shared.answers(engine, requests, SamplingParams(8)).items():
        expected = shared.teacher_forced(copy.deepcopy(plain).cpu(), requests[index], completion)
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("gpu", [0, pytest.param(1, marks=two_gpus)])
def test_weights_on_a_gpu_are_read_where_they_are(start: Start, plain: Any, shared: ModuleType, gpu: int) -> None:
    """Also by an engine on another GPU than theirs, which numbers its GPUs in its own way."""
    engine = start(gpu)
    trainer = plain.cuda(0)
    for version in range(2):
        for parameter in trainer.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
        engine.receive(Weights(version, shared.state_of(trainer)))
        assert engine._shared._views == [], "nothing goes through main memory"
        assert_generates_with(engine, trainer, shared)


@two_gpus
def test_weights_from_another_gpu_by_nccl(start: Start, plain: Any, shared: ModuleType) -> None:
    engine = start(1)
    state = shared.state_of(plain.cuda(0))
    fields = offer_fields(state, {})
    token = WeightsToken("host0", "actor[0]", 1, 0, delta=False, **fields)
    transfer = GroupTransfer(lambda: "127.0.0.1", lambda _: pytest.fail("fetched"))

    def ask(request: JoinRequest | WeightGroup) -> Any:
        if isinstance(request, JoinRequest):
            return transfer.meet(token, request)
        assert request.backend == "nccl"
        return transfer.publish(token, state, request)

    offer = transfer.receive(token, ask)
    assert offer is not None
    device = torch.device("cuda", 1)
    assert offer.reaches([device]), "both sides are on GPUs of their own"
    assert not replace(offer, device=place_of(device)).reaches([device])
    engine.receive(offer)
    assert_generates_with(engine, plain, shared)


@two_gpus
def test_tensor_parallel_ranks(start: Start, plain: Any, shared: ModuleType) -> None:
    engine = start(0, 1)
    engine.receive(Weights(0, shared.state_of(plain.cuda(0))))
    assert_generates_with(engine, plain, shared)


def test_memory_is_free_while_it_sleeps(start: Start, plain: Any, shared: ModuleType) -> None:
    engine = start(0)
    engine.receive(Weights(0, shared.state_of(plain.cuda(0))))
    before = {index: one.token_ids for index, one in shared.answers(engine, shared.prompts(), GREEDY).items()}
    awake = torch.cuda.device_memory_used(0)
    engine.offload()
    assert awake - torch.cuda.device_memory_used(0) > GIB, "keys and values of 0.3 of any GPU are more than that"
    after = shared.answers(engine, shared.prompts(), GREEDY)
    assert {index: one.token_ids for index, one in after.items()} == before
    assert torch.cuda.device_memory_used(0) > awake - GIB // 2


def test_a_response_depends_on_its_seed_alone(start: Start, plain: Any, shared: ModuleType) -> None:
    engine = start(0, enable_deterministic_inference=True)
    engine.receive(Weights(0, shared.state_of(plain.cuda(0))))
    requests, sampling = shared.prompts(), SamplingParams(16)
    together = shared.answers(engine, requests, sampling)
    for request in requests[:3]:
        assert shared.answers(engine, [request], sampling)[request.index].token_ids == together[request.index].token_ids
