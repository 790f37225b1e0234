"""Routes of the rollout in training: recorded by the engine for every token, replayed by routers of every family."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import tiny_families
import torch

from rl_platform.config.schema.algorithm import Algorithm
from rl_platform.engines.rollout import kv_cache, prefill
from rl_platform.engines.rollout.base import Completion, Request
from rl_platform.engines.rollout.torch import TorchRolloutEngine
from rl_platform.models.experts.routers import Routing, packed_routes, routers, scores
from rl_platform.models.forward import TokenPolicy
from rl_platform.models.language import LanguageModel
from rl_platform.records import Prompt, RolloutBatch, SamplingParams, Trajectory, Weights
from rl_platform.runners.trajectories import rollout_batch, shaped_rewards

MIXTURES = (
    "deepseek_v2", "deepseek_v3", "gpt_oss", "qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "granitemoe",
    "granitemoeshared", "glm4_moe", "ernie4_5_moe", "dots1",
)  # fmt: skip
TEMPERATURE = 0.7
SAME, NOISE = 1e-6, 1e-5  # deviations of the router's weights from one another, and of the trainer's from the engine's
PROMPTS = [(5, 6, 7, 8, 9), (5, 6, 7, 8, 9), (5, 6, 7), (5, 6, 7, 8, 30, 31, 2)]


def undecided(family: str) -> Any:
    """A model whose routers have a nearly equal logit for every expert."""
    network = tiny_families.tiny(family, initializer_range=0.2)
    draw = torch.Generator().manual_seed(1)
    for router in routers(network.base_model).values():
        for name, parameter in router.named_parameters():
            shared = parameter.data[:1] if name == "weight" else torch.zeros(1)
            parameter.data = shared + SAME * torch.randn(parameter.shape, generator=draw)
    return network


def trajectories(network: Any, slots: int) -> list[Trajectory]:
    state = {name: tensor.detach() for name, tensor in LanguageModel(network).state_dict(keep_vars=True).items()}
    cpu = torch.device("cpu")
    engine = TorchRolloutEngine(copy.deepcopy(network.config), (10**6,), slots, cpu, records_routes=True)
    engine.receive(Weights(0, state))
    found: dict[int, Completion] = {}
    requests = [Request(index, prompt, index) for index, prompt in enumerate(PROMPTS)]
    engine.generate(requests, SamplingParams(6, TEMPERATURE), lambda done: found.update({done.index: done}))
    return [
        Trajectory(Prompt(index, "", "", prompt), 0, one.token_ids, one.log_probs, "length", 0, routes=one.routes)
        for index, prompt in enumerate(PROMPTS)
        for one in [found[index]]
    ]


def batch_of(responses: list[Trajectory]) -> RolloutBatch:
    return rollout_batch(responses, shaped_rewards(responses, Algorithm(), 6), pad_token_id=0)


@pytest.mark.parametrize("family", MIXTURES)
def test_log_probs_are_those_of_the_rollout_although_the_trainer_selects_other_experts(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With three slots prompts enter in parts and share prefixes. The trainer packs the common prefix once."""
    monkeypatch.setattr(kv_cache, "PAGE", 4)
    monkeypatch.setattr(prefill, "WORTH_A_PASS", 1)
    monkeypatch.setattr(prefill, "PREFILL_TOKENS", 3)
    network = undecided(family)
    batch = batch_of(trajectories(network, slots=3))
    routes, lengths = batch.inputs["routes"], batch.inputs["lengths"].tolist()
    layers = sorted(routers(network.base_model))
    for row, length in zip(routes, lengths, strict=True):
        assert bool((row[: length - 1, layers] >= 0).all())
        assert bool((row[length - 1 :] == -1).all())

    draw = torch.Generator().manual_seed(2)
    for router in routers(network.base_model).values():
        for parameter in router.parameters():
            parameter.data += NOISE * torch.randn(parameter.shape, generator=draw)
    policy = TokenPolicy(LanguageModel(network), TEMPERATURE, router_replay=True)
    own = replace(batch, inputs={name: tensor for name, tensor in batch.inputs.items() if name != "routes"})
    with torch.no_grad():
        replayed, selected = ((policy(one).log_probs - batch.rollout_log_probs)[batch.mask] for one in (batch, own))
    assert float(replayed.abs().max()) < 2e-4
    assert float(selected.abs().max()) > 0.1
    policy(batch).log_probs.sum().backward()
    assert all(router.weight.grad.abs().sum() > 0 for router in routers(network.base_model).values())


def test_a_shared_prefix_has_the_routes_of_its_first_sequence() -> None:
    """Two sequences of 3 and 4 tokens share 2; the last token of each has no routes; a slice holds tokens 1 to 3."""
    routes = torch.tensor([[[[1]], [[2]], [[-1]], [[-1]]], [[[5]], [[6]], [[7]], [[-1]]]], dtype=torch.int16)
    index, lengths = torch.tensor([[0, 1, 2, 0], [0, 1, 3, 4]]), torch.tensor([3, 4])
    assert packed_routes(routes, index, lengths, 5).flatten().tolist() == [1, 2, -1, 7, -1]
    assert packed_routes(routes, index - 1, lengths, 3).flatten().tolist() == [2, -1, 7]


@pytest.mark.parametrize("family", MIXTURES)
def test_scores_decide_which_experts_are_selected(family: str) -> None:
    network = tiny_families.tiny(family)
    router = next(iter(routers(network.base_model).values()))
    for name, tensor in (*router.named_parameters(), *router.named_buffers()):
        if "correction" in name:
            tensor.data.zero_()
    logits, _, routes = Routing.of(router(torch.randn(9, network.config.hidden_size)))
    best = scores(router, logits).topk(routes.shape[1]).indices
    assert torch.equal(routes.sort().values, best.sort().values)
